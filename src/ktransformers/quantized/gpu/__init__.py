"""Packed weights in GPU memory: their layout, decoders in torch and in Triton, and products that read packed bytes."""
