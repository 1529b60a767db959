"""Attention of a served batch: over buffers of the cache, latent, windowed, selected by an indexer, fused per layer."""
