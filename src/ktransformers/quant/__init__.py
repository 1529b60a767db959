"""`kt quant`: any supported checkpoint into a packed directory, with a report of what quantization changed."""
