"""`everstep doctor`: whether this machine can do what is wanted of it, and what to do where it cannot."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.output import Columns, Output, OutputFormat, show_json, show_rows


def doctor(
    node: Annotated[bool, typer.Option("--node", help="Judge this machine as a node that is to run ranks.")] = False,
    aws: Annotated[bool | None, typer.Option("--aws/--no-aws", help="Whether AWS is asked; of a node unless said. Nothing is changed there.")] = None,
    instance_type: Annotated[str | None, typer.Option(help="Instance type whose quota is looked up.")] = None,
    node_count: Annotated[int, typer.Option(min=1, help="How many of them are to be launched.")] = 1,
    output: Output = OutputFormat.TABLE,
) -> None:
    """Check this machine, the service and AWS, and say what to do about what is wrong. Exit code 1 if anything is."""
    from everstep import doctor as judging  # with the client, which no --help needs
    from everstep import doctor_facts

    is_aws_asked = node if aws is None else aws
    findings = judging.judge(doctor_facts.gather(is_node=node, with_aws=is_aws_asked, instance_type=instance_type, node_count=node_count))
    rows = [
        {"Check": finding.check, "Level": finding.level.value, "Message": finding.message, **({"Advice": finding.advice} if finding.advice else {})}
        for finding in findings
    ]
    if output is OutputFormat.JSON:
        show_json({"Findings": rows, "IsWrong": judging.is_wrong(findings)})
    else:
        columns: Columns = {"CHECK": "Check", "": "Level", "FOUND": "Message", "WHAT TO DO": lambda row: row.get("Advice", "")}
        show_rows(rows, columns, empty="Nothing was looked at.")
    raise typer.Exit(1 if judging.is_wrong(findings) else 0)
