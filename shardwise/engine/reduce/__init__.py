"""From full gradients to averaged gradients of shards."""
