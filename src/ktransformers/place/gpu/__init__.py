"""Device code of the placement engine, behind few functions: `layout` says how packed experts lie, `decode` makes bf16
matrices of them, `compute` multiplies, `slots` and `pinned` bring bytes to the device. Another vendor's GPU would need
streams and events under the names that torch gives CUDA's; nothing else here knows whose device it is."""
