"""A process group's collectives: the group's own, a user's, and small messages for agreement."""
