"""Reduces: from full gradients to averaged gradients of shards, in any order or always in the same one."""
