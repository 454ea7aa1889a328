"""Undisturbed runs of a training script, without an agent. Tests compare jobs with them."""

from __future__ import annotations

import json
import os
import runpy
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.warm_parent import Launch, WarmParent


@dataclass(frozen=True)
class References:
    """Starts undisturbed runs."""

    parent: WarmParent

    def start(self, script: Path, world: int, directory: Path, hyperparameters: dict[str, str]) -> Launch:
        """Start `world` ranks of the script."""
        directory.mkdir(parents=True)
        environment = {"EVERSTEP_HYPERPARAMETERS": json.dumps(hyperparameters)}
        call = ("tests.e2e.reference:train", str(script), str(directory))
        return self.parent.fork(
            *call, world=world, directory=directory, environment=environment, result="rank={rank}/result.json"
        )


def train(script: str, directory: str) -> None:
    """Set the rank's output directory, then run the script. The warm parent calls this function in the rank."""
    # Set the variables that a launcher such as torchrun sets. Here, each rank counts as the only rank of its node.
    launcher = {"GROUP_RANK": os.environ["RANK"], "GROUP_WORLD_SIZE": os.environ["WORLD_SIZE"]}
    os.environ |= {**launcher, "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TORCHELASTIC_RUN_ID": "undisturbed"}
    os.environ["EVERSTEP_OUTPUT_DIR"] = f"{directory}/rank={os.environ['RANK']}"
    sys.argv = [script]
    sys.path.insert(0, str(Path(script).parent))
    runpy.run_path(script, run_name="__main__")
