"""Installs the fault points in each Python process of a cluster under test.

Python imports this module at its start if PYTHONPATH contains this folder.
"""

from __future__ import annotations

import os

if "FAULT_POINTS" in os.environ:
    import fault_points

    fault_points.install()
