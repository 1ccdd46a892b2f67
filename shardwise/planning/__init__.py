"""What goes where and in which order, as pure integer arithmetic: no tensors, processes or modules."""
