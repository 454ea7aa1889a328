"""`everstep audit`: list the API calls that could change something, newest first. For administrators."""

from __future__ import annotations

from typing import Annotated

import typer

from everstep.cli.commands import Pages, Service, Shown, command
from everstep.cli.output import Rows, when
from everstep.cli.request_options import FieldsOf
from everstep.cli.submission import Request
from everstep.cli.tables import Columns, Detail

app = typer.Typer(no_args_is_help=True, add_completion=False)


@command(app, "list")
def list_audit_entries(
    service: Service,
    pages: Pages,
    fields: Annotated[Request, FieldsOf("ListAuditEntries", {"TokenId": "--token"})],
) -> Shown:
    """List the API calls that could change something, newest first, with caller, source address and outcome."""
    answer = pages.of(service, "list_audit_entries", **fields)
    columns: Columns = {
        "TIME (UTC)": lambda entry: when(entry["Time"]),
        "OPERATION": "Operation",
        "RESOURCE": lambda entry: entry.get("Resource", "-"),
        "OUTCOME": lambda entry: " ".join(filter(None, (entry["Outcome"], entry.get("ErrorCode")))),
        "CALLER": lambda entry: entry["Caller"] or entry["TokenId"],
        "FROM": lambda entry: entry.get("SourceAddress", "-"),
        "PROJECT": Detail(lambda entry: entry.get("Project", "-")),
        "REQUEST": Detail("RequestId"),
    }
    return Shown(answer, Rows(answer["AuditEntries"], columns, empty="No call matches."))
