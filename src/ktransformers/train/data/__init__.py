"""Training data: files -> rows -> conversations -> token ids with labels."""
