"""Decode steps replayed from CUDA graphs, several adapters in one graph included."""
