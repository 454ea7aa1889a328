"""Shortens the time after which a server of a cluster under test regards a spare as idle.

Python imports this module at its start if PYTHONPATH contains this folder. Modules that copy the constant import it
later.
"""

from __future__ import annotations

from control_plane.core import burn_in

burn_in.IDLE_SECONDS = 5.0
