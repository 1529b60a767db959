"""APIs of the server that hold a conversation: each parses its own requests and emits its own events."""
