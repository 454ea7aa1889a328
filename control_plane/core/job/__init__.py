"""The decisions about one job. The function `decide` calls the module that handles the job's current state.

One decision and its execution are a *pass* over the job. The job loop makes about one pass per second.

view, outcome                        what a pass observes, and how the pass ends
waiting, preparing, launching,       one module per phase of a job
watching, leaving, ending
sources, roster, ruling, losses,     rules that several phases share
progress, restart, resizing, taken_over
"""

from control_plane.core.job.decide import decide

__all__ = ["decide"]
