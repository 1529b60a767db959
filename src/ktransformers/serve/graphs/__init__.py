"""CUDA graphs of decode steps, one graph for several adapters included."""
