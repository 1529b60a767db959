#!/usr/bin/env python3
"""Stands in for llama.cpp's program in tests of `bench/llama_cpp.py`: every call takes one millisecond per token."""

import sys

if sys.argv[1] != "time":
    sys.exit(f"expected time, got {sys.argv[1]}")
sys.stdout.write("CPU : STAND_IN = 1\n")
sys.stdout.flush()
for line in sys.stdin:
    context, prompt, new, streams = map(int, line.split())
    assert context >= prompt + new
    sys.stdout.write(f"{1e-3 * streams * prompt:.9f} {1e-3 * streams * new:.9f}\n")
    sys.stdout.flush()
