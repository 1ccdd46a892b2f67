"""Around a training step, for models of either API: clipping, loss scaling, CUDA graphs, uneven batches."""
