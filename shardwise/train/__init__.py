"""Trains a language model from a recipe: the command ``shardwise train``, and the library's worked example.

A recipe is a function that returns a ``Config``. This package does the rest: data, sharding, the training loop,
display and checkpoints.
"""

from shardwise.train.callbacks import Callback, Run
from shardwise.train.config import (
    Checkpoints,
    Config,
    Data,
    Evaluation,
    Optimization,
    Output,
    Sharding,
    Source,
    Training,
)
from shardwise.train.hugging_face import HuggingFaceModel
from shardwise.train.llama import Llama
from shardwise.train.loggers import MLflow, TensorBoard, WandB
from shardwise.train.model import OwnModel

__all__ = [
    "Callback",
    "Checkpoints",
    "Config",
    "Data",
    "Evaluation",
    "HuggingFaceModel",
    "Llama",
    "MLflow",
    "Optimization",
    "Output",
    "OwnModel",
    "Run",
    "Sharding",
    "Source",
    "TensorBoard",
    "Training",
    "WandB",
]
