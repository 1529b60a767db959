"""Serving: one resident base, an engine that batches requests continuously, an adapter or none for each of them, and
the OpenAI API around it. `launch.py` puts the parts together; `engine.py` is where to begin reading.
"""
