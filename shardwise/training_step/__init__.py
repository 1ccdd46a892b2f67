"""What surrounds a training step, for models sharded in either way: clipping, CUDA graphs, batches."""
