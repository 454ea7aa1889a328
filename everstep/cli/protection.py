"""`everstep protection …`: show which nodes hold the shards of a job in memory."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from everstep.cli.commands import Service, Shown, command
from everstep.cli.names import JobName
from everstep.cli.output import Facts, Json, Rows, moment, protection_words, size, step
from everstep.cli.tables import Columns, Detail, Prose

app = typer.Typer(no_args_is_help=True, add_completion=False)


@command(app)
def describe(service: Service, name: JobName) -> Shown:
    """Show the protection of a job's state: every shard, and the nodes that hold a copy of it."""
    protection = service.describe_protection(TrainingJobName=name)
    checkpoint = protection.get("LastCheckpoint")
    state, reason = protection["ProtectionState"], protection["Reason"]
    facts = [
        ("job", protection["TrainingJobName"]),
        ("protection", f"{state}: {reason}" if reason else state),
        ("generation", protection["Generation"]),
        ("committed step", step(protection["CommittedStep"])),
        ("proposed step", step(protection["ProposedStep"])),
        ("boundary", step(protection["Boundary"])),
        ("committed", moment(protection.get("CommittedAt"))),
        ("protected by", protection_words(protection)),
        ("memory survives", _odds(protection["RecoveryOdds"])),
        (
            "last checkpoint",
            f"step {checkpoint['Step']}, {size(checkpoint['Bytes'])}, {moment(checkpoint['CompletedAt'])}"
            if checkpoint
            else "none",
        ),
    ]
    columns: Columns = {
        "RANK": "Rank",
        "COMMITTED": lambda shard: step(shard["CommittedStep"]),
        "SIZE": Detail(lambda shard: size(shard["Bytes"])),
        "HOLDERS (owner first)": _holders,
        "REASON": Prose("Reason"),
    }
    return Shown(protection, (Facts(facts), Rows(protection["Shards"], columns, empty="No shard is held in memory.")))


def _odds(odds: Sequence[Json]) -> str | None:
    return "; ".join(f"{each['LostNodes']} lost: {each['Probability']:.4%}" for each in odds) or None


def _holders(shard: Json) -> str:
    return ", ".join(holder["NodeId"] + ("" if holder["InView"] else " (out of view)") for holder in shard["Holders"])
