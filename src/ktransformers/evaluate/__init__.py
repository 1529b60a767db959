"""Judging a model: tasks in YAML, answers from a model in this process or behind a URL, numbers with their uncertainty.

The way of one question: `task` and `items` say what is asked, a `backend` (`local`, `remote`) answers, `run` keeps
every answer in a file so that a killed run goes on, `measure` turns answers into statistics, `statistic` into numbers
with intervals, and `compare`, `report` and `page` set runs side by side.
"""
