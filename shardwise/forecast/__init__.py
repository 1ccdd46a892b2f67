"""Predicts a training step without a device: its memory, its time, and which settings are best."""
