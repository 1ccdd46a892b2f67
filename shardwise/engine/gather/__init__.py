"""From every rank's shards to full parameters."""
