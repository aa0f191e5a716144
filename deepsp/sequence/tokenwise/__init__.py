"""Checks by dry runs that a module or model works on each token alone."""
