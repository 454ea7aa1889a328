"""Provides the training hooks, with which a script keeps a snapshot of its state at every step in cluster memory.

    session = everstep.training.init(model=model, optimizer=optimizer, data=loader)
    for batch in session.batches(until_step=10_000):
        loss = train_step(batch)
        session.log(loss=loss)
    session.close()

The script registers its state once with `init`. `batches` then reports each finished step to Everstep.

Invariant: the same script runs alone, under torchrun and under Everstep. Snapshots are taken only under Everstep.
"""

from __future__ import annotations

import os

from everstep.training.errors import (
    AgentUnreachable,
    CannotRelayout,
    CannotResume,
    RestoreMismatch,
    SessionMisuse,
    StaleGeneration,
    TrainingError,
)
from everstep.training.registration import init
from everstep.training.script import accumulation, hyperparameters, input_dir, output_dir
from everstep.training.session import Control, TrainingSession
from everstep.training.submodules import import_on_use
from everstep.training.values import counter

__all__ = [
    "AgentUnreachable",
    "CannotRelayout",
    "CannotResume",
    "Control",
    "RestoreMismatch",
    "SessionMisuse",
    "StaleGeneration",
    "TrainingError",
    "TrainingSession",
    "accumulation",
    "counter",
    "hyperparameters",
    "init",
    "input_dir",
    "output_dir",
]

if "EVERSTEP_AGENT_SOCKET" in os.environ:
    import_on_use()
