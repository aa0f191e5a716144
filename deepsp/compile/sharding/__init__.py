"""A graph for one device, rewritten into one rank's share of it."""
