"""Train a language model from a recipe: the command ``shardwise train``, and the library's worked example.

A recipe is a function that returns a ``Config``. Everything else here takes it from there: data, sharding, the loop,
what is shown, what is saved.
"""

from shardwise.train.config import (
    Checkpoints,
    Config,
    Data,
    Evaluation,
    Optimization,
    Output,
    Sharding,
    Training,
)
from shardwise.train.model import HuggingFaceModel, Llama, OwnModel

__all__ = [
    "Checkpoints",
    "Config",
    "Data",
    "Evaluation",
    "HuggingFaceModel",
    "Llama",
    "Optimization",
    "Output",
    "OwnModel",
    "Sharding",
    "Training",
]
