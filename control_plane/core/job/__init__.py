"""The decisions about one job. `decide` is the table of contents: each state of a job has its module.

view, outcome                        what a pass sees, and how it ends
waiting, preparing, launching,       one module per phase
watching, leaving, ending
sources, roster, ruling, losses,     rules that several phases share
progress, restart, taken_over
"""

from control_plane.core.job.decide import decide

__all__ = ["decide"]
