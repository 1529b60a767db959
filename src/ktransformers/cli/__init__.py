"""The `kt` command: main.py holds the list of verbs, every verb has a file of its own."""
