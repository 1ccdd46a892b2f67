"""Gradient sums that are the same on any number of ranks."""
