"""Keys, values and states of sequences: buffers, blocks, tiers in host memory and on disk."""
