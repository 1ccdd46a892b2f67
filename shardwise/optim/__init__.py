"""Optimizers for shards: several tensors stepped as one, or matrices stepped whole by one rank each."""

from shardwise.optim.batched_muon import BatchedMuon
from shardwise.optim.elementwise_classes import blockwise, elementwise, rowwise
from shardwise.optim.flat_optimizer import flat
from shardwise.optim.mixed_optimizer import mixed
from shardwise.optim.whole_optimizer import whole

__all__ = ["BatchedMuon", "blockwise", "elementwise", "flat", "mixed", "rowwise", "whole"]
