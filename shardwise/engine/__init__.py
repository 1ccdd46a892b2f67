"""DO: makes the plan happen to real parameters."""
