"""`kt loop`: from a model to a served, proven and judged adapter, stage by stage.

A stage is a `kt` command in a child process, so that memory is clean after each and what ran can be run again by hand.
Nothing of train, serve or evaluate is imported here: the verbs' files and documents are all that stages exchange. The
road: `settings` (the YAML) -> `stages` (commands, inputs, outputs) -> `run` (what changed is run) -> `report`.
"""
