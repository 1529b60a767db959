"""Frozen weights of dense (non-expert) layers, packed as the core multiplies them, and their products on a GPU."""
