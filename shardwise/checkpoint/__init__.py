"""Checkpoints of a run, built on torch's DCP, and conversion of weights from and to other formats.

DCP plans which rank writes and reads what; the file format, the manifest and the folders are ours. Reading a checkpoint
never runs code from it.
"""

from shardwise.checkpoint.manifest import Manifest, read_manifest
from shardwise.checkpoint.reading import load_parts
from shardwise.checkpoint.saver import Saver
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.training_state import TrainingState

__all__ = ["Manifest", "Saver", "Store", "TrainingState", "load_parts", "read_manifest"]
