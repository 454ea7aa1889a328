"""Defines arguments for names of jobs, fleets and nodes, with shell completion from the service's lists.

    everstep --install-completion        for bash, zsh, fish and PowerShell
    everstep --show-completion           prints the completion script

Invariant: completion never fails and never blocks for long. If the service does not answer, completion offers nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated

import typer

from everstep.cli.commands import connect, searched
from everstep.errors import EverstepError

Offer = Callable[[typer.Context, str], list[str]]


def _names(operation: str, query: str) -> Offer:
    def offer(context: typer.Context, incomplete: str) -> list[str]:
        from everstep import sdk  # Import here to keep `--help` fast.

        try:
            given = context.params
            with connect(
                endpoint_url=given.get("endpoint_url"), profile_name=given.get("profile"), config=sdk.IMPATIENT
            ) as service:
                found: list[str] = searched(getattr(service, operation)(), query) or []
        except EverstepError:
            return []
        return [name for name in found if name.startswith(incomplete)]

    return offer


offer_jobs = _names("list_training_jobs", "TrainingJobSummaries[].TrainingJobName")
offer_fleets = _names("list_fleets", "Fleets[].FleetName")
offer_nodes = _names("list_nodes", "Nodes[].NodeId")

JobName = Annotated[str, typer.Argument(help="Name of the training job, or its RunId.", autocompletion=offer_jobs)]
FleetName = Annotated[str, typer.Argument(help="Name of the fleet.", autocompletion=offer_fleets)]
NodeId = Annotated[str, typer.Argument(help="Id of the node: its EC2 instance id.", autocompletion=offer_nodes)]
OnlyJob = Annotated[
    str | None, typer.Option("--job", help="Only this training job: its name or RunId.", autocompletion=offer_jobs)
]
OnlyFleet = Annotated[str | None, typer.Option("--fleet", help="Only this fleet.", autocompletion=offer_fleets)]
