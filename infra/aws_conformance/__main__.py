"""The command line of a conformance run: `everstep aws-conformance` starts `python -P -m infra.aws_conformance`.

The exit code is 0 after a complete run, 1 if a question has no answer or AWS refuses the setup, and 2 if the user does
not confirm the start of the run.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import boto3
import typer
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError
from rich.console import Console
from rich.markup import escape

from infra.aws_conformance.account import MAX_INSTANCES, Account, Place, clean
from infra.aws_conformance.questions import QUESTIONS
from infra.aws_conformance.run import ask
from infra.local_cloud import aws_answers
from infra.local_cloud.processes import exit_when_asked

IMAGE: Final = "resolve:ssm:/aws/service/ami-amazon-linux-latest/al2023-ami-kernel-default-x86_64"
INSTANCE_TYPE: Final = "t3.nano"
HOURS: Final = 1.0
PRICES_USD_PER_HOUR: Final = {"t3.nano": 0.0052, "its public IPv4 address": 0.005, "8 GiB of its gp3 volume": 0.0009}
"""Prices in us-east-1. Source: aws.amazon.com/ec2/pricing, 2025. Requests cost less than a cent."""

app = typer.Typer(add_completion=False)
console = Console(stderr=True, highlight=False)
Client = Callable[[str], Any]


@app.command()
def conformance(
    out: Annotated[Path, typer.Option(help="File for the answers.")] = Path("aws_answers.json"),
    zone: Annotated[str, typer.Option(help="Availability Zone; by default the region's first.")] = "",
    subnet: Annotated[str, typer.Option(help="Subnet of the zone; by default the default subnet.")] = "",
    instance_type: Annotated[str, typer.Option(help="Type of the instances.")] = INSTANCE_TYPE,
    image: Annotated[str, typer.Option(help="Image of the instances.")] = IMAGE,
    watch_seconds: Annotated[
        float, typer.Option(min=0, help="Seconds for which the run watches an ended member.")
    ] = 900.0,
    question: Annotated[
        list[str] | None, typer.Option(help="Name of a question to ask, may be repeated; by default all questions.")
    ] = None,
    yes: Annotated[bool, typer.Option("--yes", help="Start without a confirmation.")] = False,
    only_clean: Annotated[
        bool, typer.Option("--clean", help="Only delete the resources that an earlier run left, and end.")
    ] = False,
) -> None:
    """Ask a real AWS account the questions that AWS's documentation leaves open, and store the answers."""
    asked = [each for each in QUESTIONS if not question or each.name in question]
    if question and {each.name for each in asked} != set(question):
        raise typer.BadParameter(f"the questions are {', '.join(each.name for each in QUESTIONS)}")
    # SystemExit lets the run remove its resources.
    exit_when_asked(with_parent=False)
    session = boto3.Session()
    client, single_attempt = _clients(session, attempts=5), _clients(session, attempts=1)
    try:
        account_id = client("sts").get_caller_identity()["Account"]
        console.print(f"AWS account {account_id}, region {session.region_name}")
        if only_clean:
            for sentence in clean(client, pause) or ["nothing to delete"]:
                console.print(escape(sentence))
            return
        console.print(cost_words(instance_type), soft_wrap=True)
        if not yes and not typer.confirm("Start the run?", err=True):
            raise typer.Exit(2)
        place = Place(zone=zone or first_zone(client("ec2")), instance_type=instance_type, image=image, subnet=subnet)
        account = Account(
            client=client,
            single_attempt=single_attempt,
            run=secrets.token_hex(4),
            monotonic=time.monotonic,
            pause=pause,
            watch_seconds=watch_seconds,
        )
        recorded = ask(
            account,
            place,
            asked,
            region=str(session.region_name),
            now=datetime.now(UTC),
            report=lambda sentence: console.print(escape(sentence), soft_wrap=True),
        )
    except (ClientError, BotoCoreError, ResponseParserError) as error:
        console.print(f"[red]error:[/red] {escape(str(error))}", soft_wrap=True)
        console.print("Delete what the run may have left: everstep aws-conformance --clean")
        raise typer.Exit(1) from error
    out.write_bytes(aws_answers.encode(recorded))
    console.print(f"wrote {out}; use it with: everstep local up --aws-answers {out}", soft_wrap=True)
    if recorded.unanswered:
        raise typer.Exit(1)


def cost_words(instance_type: str) -> str:
    """Return two sentences about the instances, duration and cost of a run."""
    begins = (
        f"The run launches {MAX_INSTANCES} instances of type {instance_type} for about {HOURS:g} hour, and reaches the "
        "rate limit of Auto Scaling for some seconds."
    )
    if instance_type != INSTANCE_TYPE:
        return f"{begins} See the price of {instance_type} at https://aws.amazon.com/ec2/pricing."
    usd = MAX_INSTANCES * HOURS * sum(PRICES_USD_PER_HOUR.values())
    return f"{begins} It costs about {usd:.2f} USD at the prices of us-east-1."


def first_zone(ec2: Any) -> str:
    """Return the region's first available zone."""
    available = [{"Name": "state", "Values": ["available"]}, {"Name": "zone-type", "Values": ["availability-zone"]}]
    return min(
        str(zone["ZoneName"]) for zone in ec2.describe_availability_zones(Filters=available)["AvailabilityZones"]
    )


def pause(seconds: float) -> None:
    """Wait between two calls to AWS."""
    threading.Event().wait(seconds)


def _clients(session: boto3.Session, *, attempts: int) -> Client:
    """Return a function that creates the boto3 client of a service once. `attempts` is the maximum per call."""
    made: dict[str, Any] = {}
    config = Config(retries={"mode": "standard", "total_max_attempts": attempts}, user_agent_extra="everstep")

    def client(service: str) -> Any:
        if service not in made:
            made[service] = session.client(service, config=config)
        return made[service]

    return client


if __name__ == "__main__":
    app(prog_name="everstep aws-conformance")
