"""`kt quant`: any supported checkpoint into a packed directory, with a receipt of what quantisation changed."""
