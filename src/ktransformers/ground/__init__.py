"""What every package imports and what imports no other package of ours: errors, files, logging, progress, settings,
environment variables, the machine, charts."""
