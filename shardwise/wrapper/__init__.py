"""The wrapper API: ``FullyShardedDataParallel``."""
