"""Gathers: from every rank's shards to full parameters."""
