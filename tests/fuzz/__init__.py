"""Fuzzing: random programs, files and faults, each generated from a seed."""
