"""The engine: shards, gathers and reduces units, as ``planning`` lays them out."""
