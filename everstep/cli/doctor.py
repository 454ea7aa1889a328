"""`everstep doctor`: whether this machine can do what is wanted of it, and what to do where it cannot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from everstep.cli.commands import Shown, command
from everstep.cli.output import FAILED

if TYPE_CHECKING:
    from everstep.doctor import Finding

app = typer.Typer(add_completion=False)


@command(app)
def doctor(
    node: Annotated[bool, typer.Option("--node", help="Judge this machine as a node that is to run ranks.")] = False,
    aws: Annotated[
        bool | None,
        typer.Option("--aws/--no-aws", help="Whether AWS is asked; of a node unless said. Nothing is changed there."),
    ] = None,
    instance_type: Annotated[str | None, typer.Option(help="Instance type whose quota is looked up.")] = None,
    node_count: Annotated[int, typer.Option(min=1, help="How many of them are to be launched.")] = 1,
    profile: Annotated[
        str | None, typer.Option(help="Which of the services that everstep configure wrote down.")
    ] = None,
    region: Annotated[str | None, typer.Option(help="In which AWS is asked.")] = None,
) -> Shown:
    """Check this machine, the service and AWS, and say what to do about what is wrong. Exit code 1 if anything is."""
    from everstep import doctor as judging  # with the client, which no --help needs
    from everstep import doctor_facts

    is_aws_asked = node if aws is None else aws
    facts = doctor_facts.gather(
        is_node=node,
        with_aws=is_aws_asked,
        instance_type=instance_type,
        node_count=node_count,
        profile_name=profile,
        region_name=region,
    )
    findings = judging.judge(facts)
    rows = [
        {
            "Check": finding.check,
            "Level": finding.level.value,
            "Message": finding.message,
            **({"Advice": finding.advice} if finding.advice else {}),
        }
        for finding in findings
    ]
    is_wrong = judging.is_wrong(findings)
    return Shown(
        {"Findings": rows, "IsWrong": is_wrong}, tuple(map(_line, findings)), exit_code=FAILED if is_wrong else 0
    )


def _line(finding: Finding) -> str:
    """Return one finding, its advice on a line of its own."""
    advice = f"\n        to do: {finding.advice}" if finding.advice else ""
    return f"{finding.level.value:<7} {finding.check}: {finding.message}{advice}"
