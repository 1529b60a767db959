"""Serving over several hosts: rank 0 has everything but some of the experts, the other ranks have experts alone."""
