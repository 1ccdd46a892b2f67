"""DECIDE: integers in, integers out. Nothing here knows a tensor, a process or a module."""
