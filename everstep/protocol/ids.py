"""Defines the types of identifiers. Invariant: code compares identifiers for equality only and never parses them."""

from __future__ import annotations

from typing import NewType

from everstep.protocol.limits import GenerationNumber, Id, RankNumber, StepNumber

FleetName = NewType("FleetName", Id)
JobName = NewType("JobName", Id)
RunId = NewType("RunId", Id)
"""One submission of a job: 32 hexadecimal digits."""
NodeId = NewType("NodeId", Id)
"""The EC2 instance id."""
Rank = NewType("Rank", RankNumber)
Generation = NewType("Generation", GenerationNumber)
Step = NewType("Step", StepNumber)
"""Number of finished optimizer steps. Step 0 is the initial state that the script builds."""
FIRST_STEP = Step(0)
NO_STEP = Step(-1)
NO_RANK = Rank(-1)
"""Stands in for a rank where a record or a connection belongs to a whole node."""

NAME_PATTERN = r"^[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,62}$"
"""Names of jobs and fleets (SageMaker's rule for TrainingJobName)."""
NODE_ID_PATTERN = r"\A[A-Za-z0-9-]{1,63}\Z"
