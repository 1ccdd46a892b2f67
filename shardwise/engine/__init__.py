"""The engine: shards, gathers and reduces units, as ``plan`` lays them out."""
