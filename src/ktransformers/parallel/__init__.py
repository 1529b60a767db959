"""Several processes: experts divided over ranks, rows exchanged between them, DDP and FSDP2, checks of ranks."""
