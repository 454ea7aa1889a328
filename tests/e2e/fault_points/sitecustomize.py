"""Python imports this at its start wherever this folder is on PYTHONPATH: the processes of a cluster that dies at
moments of a test's choice.
"""

from __future__ import annotations

import os

if "FAULT_POINTS" in os.environ:
    import fault_points

    fault_points.install()
