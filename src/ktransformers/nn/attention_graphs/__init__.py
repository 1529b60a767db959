"""Attention of training steps replayed from CUDA graphs."""
