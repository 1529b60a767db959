"""Serving over several nodes: rank 0 has everything but some of the experts, the other ranks have experts alone."""
