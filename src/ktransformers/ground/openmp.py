"""Limits spinning of OpenMP threads, which share cores with the expert threads.

torch computes attention with OpenMP threads, the experts with their own pool. Idle OpenMP threads spin before they
sleep, in libgomp for tens of milliseconds, and the experts start right after a torch operator, so they would get half
of each core. GOMP_SPINCOUNT limits spinning to about 50 microseconds, enough to bridge the gap between two operators.
libgomp reads it when it is loaded, so it must be set before torch is imported; values set by the user take precedence.
"""

from __future__ import annotations

import os

SPIN_COUNT = "1000"  # iterations of about 50 nanoseconds
USER_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning() -> None:
    """Must run before torch is imported."""
    if not any(name in os.environ for name in USER_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
