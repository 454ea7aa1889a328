"""The decisions about one job. `decide` calls the module that handles the job's current state."""

from control_plane.core.job.decide import decide

__all__ = ["decide"]
