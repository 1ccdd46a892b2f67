"""Ranks on one host: they read one another's memory instead of sending messages."""
