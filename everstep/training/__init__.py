"""Training hooks: a script registers its state once and says when a step is finished; every step is then kept in the cluster's memory.

    session = everstep.training.init(model=model, optimizer=optimizer, data=loader)
    for batch in session.batches(until_step=10_000):
        loss = train_step(batch)
        session.log(loss=loss)
    session.close()

Invariant: the same script runs alone, under torchrun and under Everstep; only in the last case are there snapshots.
"""

from __future__ import annotations

from everstep.training.errors import (
    AgentUnreachable,
    CannotResume,
    RestoreMismatch,
    SessionMisuse,
    StaleGeneration,
    TrainingError,
)
from everstep.training.registration import init
from everstep.training.script import hyperparameters, input_dir, output_dir
from everstep.training.session import Control, TrainingSession

__all__ = [
    "AgentUnreachable",
    "CannotResume",
    "Control",
    "RestoreMismatch",
    "SessionMisuse",
    "StaleGeneration",
    "TrainingError",
    "TrainingSession",
    "hyperparameters",
    "init",
    "input_dir",
    "output_dir",
]
