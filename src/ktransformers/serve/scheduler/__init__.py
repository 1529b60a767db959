"""The engine: requests become sequences, sequences become batches, batches run through the model."""
