"""The composable API: ``fully_shard`` and ``FSDPModule``."""
