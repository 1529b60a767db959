"""The routed experts of one layer: the packed store, the operator with autograd, the interface to transformers,
LoRA."""
