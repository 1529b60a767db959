"""`kt prove`: the same rows under the trainer's model, under the server and under stock PEFT, compared number by
number."""
