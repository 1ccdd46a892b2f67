"""The only place for torch's underscore names, checked on torch 2.11 and 2.13."""

from shardwise.torch_internals.dtensor import *
