"""SHOW: the public faces of the engine."""
