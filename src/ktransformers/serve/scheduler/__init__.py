"""Continuous batching: sequences, the KV cache, one forward pass for all of them, sampling."""
