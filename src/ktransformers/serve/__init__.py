"""Serving: one base model in memory, an engine with continuous batching, a LoRA adapter or none for each request, and
the OpenAI API. `launch.py` assembles the parts; start reading at `engine/engine.py`.
"""
