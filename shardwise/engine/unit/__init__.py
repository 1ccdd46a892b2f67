"""A unit: parameters that are gathered, freed and reduced together."""
