"""Other people's libraries on shardwise, beside the same program on torch's own FSDP: ``make test-ecosystem``."""
