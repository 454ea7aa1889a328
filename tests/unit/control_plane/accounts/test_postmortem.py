"""Tests the Markdown document of a post-mortem."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from control_plane.accounts.duties import Subject
from control_plane.accounts.incidents import IncidentOutcome
from control_plane.accounts.postmortem import PostMortem, SimilarIncident, Stack, TimelineEntry, WrittenNote, markdown
from control_plane.core.duties import NOTHING, ActionKind, DutyKind, FleetFacts, PersonAction, PersonDuty, Urgency
from control_plane.core.states import FleetStatus
from everstep.protocol.ids import Step
from tests.unit.control_plane.accounts.test_incidents import FAILED, RECOVERED

WHOLE = PostMortem(
    account=RECOVERED,
    duty=NOTHING,
    subject=Subject(
        fleet=FleetFacts(name="main", auto_scaling_group_name="main", status=FleetStatus.ACTIVE), job="gpt"
    ),
    owner="ann",
    acknowledged_by="bob",
    events=(TimelineEntry(101.5, "The spare i-2 joins gpt."), TimelineEntry(100.0, "EC2 reports i-1.")),
    lines=("00:01:39 rank 0  step 12", "00:01:40 rank 1  \x1b[31mKilled\x1b[0m"),
    lines_missing="",
    stacks=(Stack((0, 1, 2, 5), "train.py:7 all_reduce"),),
    notes=(WrittenNote(130.0, "ann", "The host failed.\n\nAWS confirmed it."),),
    similar=(SimilarIncident("inc-0", "gpt", 40.0, IncidentOutcome.RECOVERED),),
    written_at=200.0,
)


def test_a_document_has_its_sections_in_order() -> None:
    assert (
        markdown(replace(WHOLE, account=replace(RECOVERED, cost_usd=0.5)))
        == """\
# Post-mortem: job gpt, 1970-01-01 00:01 UTC

**i-1 was terminated. Everstep recovered the job in 12 s; no step was lost.** Nothing to do.

- Incident: inc-1
- Cause: An instance was terminated
- Project: default
- Fleet: main
- Owner: ann
- Acknowledged by: bob
- Written: 1970-01-01 00:03:20 UTC

## Impact

| phase | seconds |
| --- | ---: |
| detect | 0.50 |
| replace | 0.50 |
| restore | 1.00 |
| rework | 10.30 |
| **interruption** | 12.30 |

- Recomputed steps: 2
- Step before the failure: 12
- Resumed from: step 10, from the memory of other nodes
- Cost of idle nodes: $0.50
- Failure on: i-1
- Lost nodes: i-1
- Replacements: i-2

## Timeline

- 1970-01-01 00:01:40 **The failure occurred.**
- 1970-01-01 00:01:40 EC2 reports i-1.
- 1970-01-01 00:01:40 **Everstep detected the failure.**
- 1970-01-01 00:01:41 **i-2 was ready in place of i-1.**
- 1970-01-01 00:01:41 The spare i-2 joins gpt.
- 1970-01-01 00:01:42 **Training resumed from step 10.**
- 1970-01-01 00:01:52 **Training had caught up.**

## Evidence

- EC2 reports i-1 as terminated

## Decision

replace i-1 and restart all ranks

restores step 10 from the memory of other nodes: the newest step that every rank can get

## Last lines before the failure

```text
00:01:39 rank 0  step 12
00:01:40 rank 1  Killed
```

## Stacks

Ranks 0-2, 5:

```text
train.py:7 all_reduce
```

## Notes

1970-01-01 00:02:10 ann:

> The host failed.
>
> AWS confirmed it.

## Similar incidents

- 1970-01-01 00:00:40 inc-0, job gpt: recovered

## What to do

Nothing.

The runbook explains this cause: `/runbook.html#instance_terminated` on the control plane.
"""
    )


def test_a_document_without_lines_says_why_and_omits_empty_sections() -> None:
    written = markdown(replace(WHOLE, lines=(), lines_missing="S3 did not answer", stacks=(), notes=(), similar=()))
    assert "## Last lines before the failure\n\nS3 did not answer\n" in written
    for section in ("Stacks", "Notes", "Similar incidents"):
        assert f"## {section}" not in written


def test_the_post_mortem_of_a_failed_job_counts_steps_from_the_checkpoint() -> None:
    again = PersonAction(kind=ActionKind.SUBMIT_AGAIN, urgency=Urgency.NOW, step=Step(5))
    duty = PersonDuty(kind=DutyKind.JOB_FAILED, urgency=Urgency.NOW, actions=(again,))
    written = markdown(replace(WHOLE, account=FAILED, duty=duty))
    assert "28 steps are lost.** Act now: correct the cause, and submit the job again.\n" in written
    assert "- Unsaved steps: 28\n" in written
    assert "- Newest checkpoint: step 5\n" in written
    assert "Resumed from" not in written
    assert "1. Correct the cause, and submit the job again from step 5." in written
    assert "`everstep jobs logs gpt --tail 50`" in written


@pytest.mark.security
@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("user\u202egpj.exe", "user�gpj.exe"),
        ("a\x1b]8;;http://evil\x07b\x1b[2J\x9b1m\x00", "ab�"),
        ("a\u2028# b", r"a�\# b"),
        ("<img src=x> &#8238; [a](b) **c**", r"\<img src=x\> \&\#8238; \[a\](b) \*\*c\*\*"),
    ],
)
def test_foreign_text_neither_formats_nor_reorders_the_document(text: str, shown: str) -> None:
    note = WrittenNote(at=130.0, author=text, text=text)
    written = markdown(replace(WHOLE, lines=(text,), stacks=(Stack((0,), text),), notes=(note,), owner=text))
    assert f"- Owner: {shown}\n" in written
    assert not re.search("[\x00-\x09\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]", written)
