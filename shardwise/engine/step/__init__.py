"""One training step of a model: order, memory, agreement between ranks, recovery."""
