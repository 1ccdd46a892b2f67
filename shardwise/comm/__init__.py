"""TALK: tensors and processes. Nothing here knows a module."""
