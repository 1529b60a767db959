"""`kt prove`: the same rows of tokens in the trainer's model, in the server and in stock PEFT, compared number by
number."""
