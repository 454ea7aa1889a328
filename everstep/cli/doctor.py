"""`everstep doctor`: check the configuration of this machine, the service and AWS, and suggest repairs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from everstep.cli.commands import Shown, command
from everstep.cli.output import FAILED

if TYPE_CHECKING:
    from everstep.doctor.findings import Finding

app = typer.Typer(add_completion=False)


@command(app)
def doctor(
    node: Annotated[bool, typer.Option("--node", help="Check this machine as a node that runs ranks.")] = False,
    aws: Annotated[
        bool | None,
        typer.Option("--aws/--no-aws", help="Check AWS, read-only; by default only with --node."),
    ] = None,
    asks_service: Annotated[bool, typer.Option("--service/--no-service", help="Ask the Everstep service.")] = True,
    instance_type: Annotated[str | None, typer.Option(help="Instance type whose quota and zones are checked.")] = None,
    node_count: Annotated[int, typer.Option(min=1, help="Number of instances that the quota must allow.")] = 1,
    capacity_block: Annotated[
        bool, typer.Option("--capacity-block", help="The instances are in a capacity block, which needs no such quota.")
    ] = False,
    profile: Annotated[str | None, typer.Option(help="Name of a service stored by everstep configure.")] = None,
    region: Annotated[str | None, typer.Option(help="AWS region to check.")] = None,
    bucket: Annotated[
        str | None, typer.Option(help="S3 bucket whose versioning, lifecycle rules and encryption are checked.")
    ] = None,
) -> Shown:
    """Check this machine, the service and AWS, and suggest a repair for each problem. Exit code 1 if any is found."""
    from everstep.doctor import bucket_checks, checks  # Import here to keep `--help` fast.
    from everstep.doctor import facts as doctor_facts

    is_aws_asked = node if aws is None else aws
    facts = doctor_facts.gather(
        is_node=node,
        with_aws=is_aws_asked,
        with_service=asks_service,
        instance_type=instance_type,
        node_count=None if capacity_block else node_count,
        profile_name=profile,
        region_name=region,
    )
    findings = checks.judge(facts)
    if bucket is not None:
        found = doctor_facts.bucket(bucket.removeprefix("s3://").rstrip("/"), region)
        findings = (*findings, *bucket_checks.judge_bucket(found))
    rows = [
        {
            "Check": finding.check,
            "Level": finding.level.value,
            "Message": finding.message,
            **({"Advice": finding.advice} if finding.advice else {}),
        }
        for finding in findings
    ]
    is_wrong = checks.is_wrong(findings)
    return Shown(
        {"Findings": rows, "IsWrong": is_wrong}, tuple(map(_line, findings)), exit_code=FAILED if is_wrong else 0
    )


def _line(finding: Finding) -> str:
    advice = f"\n        to do: {finding.advice}" if finding.advice else ""
    return f"{finding.level.value:<7} {finding.check}: {finding.message}{advice}"
