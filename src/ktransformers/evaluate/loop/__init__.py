"""`kt loop`: from a model to a served, verified and evaluated adapter, stage by stage.

A stage is a `kt` command in a child process, so memory is released after each stage and a stage can be repeated by
hand. Nothing of train, serve or evaluate is imported: stages communicate only through files. The steps: `settings` (the
YAML) -> `stages` (commands, inputs, outputs) -> `run` (runs what changed) -> `report`.
"""
