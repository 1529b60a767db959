"""Two crews on the same cores: torch computes attention with OpenMP's threads, the experts have threads of their own.

OpenMP's threads look for work before they sleep, in libgomp for tens of milliseconds, and the experts begin right after
a product of torch's: their threads would have half of each core. So libgomp is told to look for some 50 microseconds,
enough to bridge the gap from one product to the next. It reads that once, when it is loaded, so this has to be said
before torch is imported; who has set one of the variables has the last word.
"""

from __future__ import annotations

import os

SPIN_COUNT = "1000"  # looks, each with a pause of some 50 nanoseconds
USER_VARIABLES = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning() -> None:
    """Before torch is imported."""
    if not any(name in os.environ for name in USER_VARIABLES):
        os.environ["GOMP_SPINCOUNT"] = SPIN_COUNT
