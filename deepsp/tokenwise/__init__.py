"""Whether a module or model works on each token alone: dry runs say so."""
