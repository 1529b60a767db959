"""From logits to text: draws of tokens, penalties and limits, detokenising."""
