"""Identifiers: what names a thing on the wire and in memory.

Invariant: ids compare for equality only; none of them is ever parsed for meaning.
"""

from __future__ import annotations

from typing import NewType

FleetName = NewType("FleetName", str)
JobName = NewType("JobName", str)
RunId = NewType("RunId", str)
"""One submission of a job: 32 hexadecimal digits. A job name that is used again gets another run."""
NodeId = NewType("NodeId", str)
"""The EC2 instance id."""
Rank = NewType("Rank", int)
Generation = NewType("Generation", int)
Step = NewType("Step", int)
"""Optimizer steps finished: step k is the state after the k-th step.

Step 0 is the state that the script itself builds.
"""
FIRST_STEP = Step(0)

NAME_PATTERN = r"^[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,62}$"
"""Names of jobs and fleets (SageMaker's rule for TrainingJobName)."""
