"""Checkpoints on torch's DCP: what is saved of a run, how it lies on disk, and the ways to other formats.

DCP plans who writes and who reads what; the bytes, the page that describes them and the folders are ours. Nothing
that is read here can run code.
"""

from shardwise.checkpoint.manifest import Manifest, read_manifest
from shardwise.checkpoint.reading import load_parts
from shardwise.checkpoint.saver import Saver
from shardwise.checkpoint.store import Store
from shardwise.checkpoint.training_state import TrainingState

__all__ = ["Manifest", "Saver", "Store", "TrainingState", "load_parts", "read_manifest"]
