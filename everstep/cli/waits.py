"""`everstep wait …`: block until a condition holds.

The module adds one command for each waiter of the service model. boto3 and the AWS CLI have the same waiters.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import typer

from everstep.cli.commands import Service, Shown, command
from everstep.cli.output import Json
from everstep.cli.progress import Progress

MODEL = next((Path(__file__).parents[1] / "data" / "everstep").glob("*/waiters-2.json"))

app = typer.Typer(no_args_is_help=True, add_completion=False)


def _add(waiter: str, settings: Json) -> None:
    argument = "FleetName" if settings["operation"] == "DescribeFleet" else "TrainingJobName"

    def wait(
        service: Service,
        name: Annotated[str, typer.Argument(help="Name of the fleet, or name or RunId of the training job.")],
        delay: Annotated[int, typer.Option(min=1, help="Seconds between two polls.")] = settings["delay"],
        max_attempts: Annotated[int, typer.Option(min=1, help="Polls before the wait times out.")] = settings[
            "maxAttempts"
        ],
    ) -> Shown:
        asked = {argument: name}
        any_service: Any = service
        with Progress(service, name) as progress:
            if settings["operation"] == "DescribeTrainingJob":
                _show_looks(any_service, progress)
            any_service.get_waiter(_words(waiter, "_")).wait(
                **asked, WaiterConfig={"Delay": delay, "MaxAttempts": max_attempts}
            )
        answer: Json = getattr(service, _words(settings["operation"], "_"))(**asked)
        return Shown(answer, f"{name}: {_words(waiter.removeprefix('TrainingJob'), ' ')}")

    wait.__doc__ = settings["description"]
    command(app, _words(waiter.removeprefix("Training"), "-"))(wait)


def _show_looks(service: Any, progress: Progress) -> None:
    """Print the job's state after each poll of a waiter, because botocore's waiters report nothing before their end."""

    def show(http_response: Any, parsed: Json, **_: Any) -> None:
        if http_response.status_code < 300:
            progress.show(parsed)

    service.meta.events.register("after-call.everstep.DescribeTrainingJob", show)


def _words(name: str, between: str) -> str:
    return between.join(re.findall("[A-Z][a-z]+", name)).lower()


for _waiter, _settings in json.loads(MODEL.read_text())["waiters"].items():
    _add(_waiter, _settings)
