"""Libraries on two NCCL ranks of one GPU, on a machine where nothing can be installed: they are brought along."""
