"""Evaluation of models: tasks in YAML, answers from a model in this process or behind a URL, metrics with intervals.

`task` and `items` define the questions, a `backend` (`local`, `remote`) answers them, `run` stores every answer so that
a killed run resumes, `measure` turns answers into statistics, `statistic` into values with confidence intervals, and
`compare`, `report` and `page` compare runs.
"""
