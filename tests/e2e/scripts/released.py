"""Prints which release of Everstep the rank imports, then trains like `train.py`."""

from __future__ import annotations

import runpy

import everstep
import everstep.training

print(f"the rank imports everstep {everstep.__version__}", flush=True)  # noqa: T201
runpy.run_path("train.py", run_name="__main__")
