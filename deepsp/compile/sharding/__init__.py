"""Rewrites a graph for one device into one rank's part of it."""
