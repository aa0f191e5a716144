"""Experts of a mixture on the ranks that share the sequence."""
