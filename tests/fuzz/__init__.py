"""Programs and files nobody thought of, made from a seed."""
