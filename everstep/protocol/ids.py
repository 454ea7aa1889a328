"""Defines the types of identifiers in messages and in memory.

Invariant: code compares identifiers for equality only and never parses them.
"""

from __future__ import annotations

from typing import NewType

from everstep.protocol.limits import GenerationNumber, Id, RankNumber, StepNumber

FleetName = NewType("FleetName", Id)
JobName = NewType("JobName", Id)
RunId = NewType("RunId", Id)
"""One submission of a job: 32 hexadecimal digits.

A second job with the same name gets a different run id.
"""
NodeId = NewType("NodeId", Id)
"""The EC2 instance id."""
Rank = NewType("Rank", RankNumber)
Generation = NewType("Generation", GenerationNumber)
Step = NewType("Step", StepNumber)
"""Number of finished optimizer steps: step k is the state after the k-th step.

Step 0 is the initial state that the script builds itself.
"""
FIRST_STEP = Step(0)
NO_STEP = Step(-1)
"""Value of a field for a step while there is no such step."""
NO_RANK = Rank(-1)
"""Value of a field for a rank in a record or a connection that belongs to a whole node instead of one rank."""

NAME_PATTERN = r"^[a-zA-Z0-9](?:-?[a-zA-Z0-9]){0,62}$"
"""Valid names of jobs and fleets (SageMaker's rule for TrainingJobName)."""
NODE_ID_PATTERN = r"\A[A-Za-z0-9-]{1,63}\Z"
