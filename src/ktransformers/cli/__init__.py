"""The `kt` command: main.py lists the verbs, each verb has its own module."""
