"""Device code of the placement engine: `layout` describes packed experts, `dequantize` turns them into bf16 matrices,
`grouped_mlp` multiplies, `expert_cache` and `pinned` copy experts to the device, `executor` combines them. Another
vendor's GPU would need streams and events under torch's CUDA names; nothing else depends on the vendor."""
