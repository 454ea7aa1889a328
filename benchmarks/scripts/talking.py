"""A job's script that prints the time a few times per second, for the API benchmark's log readers."""

from __future__ import annotations

import threading
import time

from everstep.training import hyperparameters

settings = hyperparameters(seconds=10.0, lines_per_second=10.0)
ends_at = time.time() + settings.seconds
while time.time() < ends_at:
    print(f"at {time.time():.6f}", flush=True)
    threading.Event().wait(1 / settings.lines_per_second)
