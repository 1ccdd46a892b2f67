"""Reduces: from full gradients to averaged gradients of shards."""
