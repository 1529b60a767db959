"""Requests and answers over HTTP: the OpenAI API, adapters, health, metrics and the page."""
