"""Passes over graphs that gather sharded weights."""
