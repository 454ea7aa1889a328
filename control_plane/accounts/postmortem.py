"""The post-mortem of an incident as a Markdown document.

Invariant: pure. Text of users, ranks and AWS never becomes a heading or a table of the document.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from control_plane.accounts import duties
from control_plane.accounts.duties import Action, Subject
from control_plane.accounts.facts import sentence
from control_plane.accounts.incidents import CLOSED, Account, IncidentOutcome, milestones, verdict
from control_plane.accounts.jobs import SOURCES, restore_reason
from control_plane.accounts.occurrences import occurrence
from control_plane.accounts.responses import response
from control_plane.core.duties import PersonDuty
from control_plane.core.incidents import PHASES, phase_moments
from everstep.protocol.visible_text import visible

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~&])")
"""Characters with a meaning inside a line of Markdown. `&` begins the HTML code of any character."""
_FIRST = re.compile(r"^(?:(\d+)([.)])|([-+=]))")
"""A beginning of a line that Markdown reads as a list, a rule or an underline."""


@dataclass(frozen=True, slots=True)
class TimelineEntry:
    """One event of an incident's timeline. `at` is the Unix time in seconds."""

    at: float
    words: str


@dataclass(frozen=True, slots=True)
class WrittenNote:
    """A note that a person wrote about an incident. `at` is the Unix time in seconds."""

    at: float
    author: str
    text: str


@dataclass(frozen=True, slots=True)
class Stack:
    """One stack that several ranks have in common."""

    ranks: tuple[int, ...]
    text: str


@dataclass(frozen=True, slots=True)
class SimilarIncident:
    """An incident that has the same cause as the described incident. `opened_at` is in Unix seconds."""

    incident_id: str
    job_name: str
    opened_at: float
    outcome: IncidentOutcome


@dataclass(frozen=True, slots=True, kw_only=True)
class PostMortem:
    """All facts from which `markdown` writes the post-mortem of one incident."""

    account: Account
    duty: PersonDuty
    subject: Subject
    owner: str
    acknowledged_by: str
    events: tuple[TimelineEntry, ...]
    lines: tuple[str, ...]
    lines_missing: str
    """The reason why `lines` is empty although ranks may have printed lines. Empty if no lines are missing."""
    stacks: tuple[Stack, ...]
    notes: tuple[WrittenNote, ...]
    similar: tuple[SimilarIncident, ...]
    written_at: float


def markdown(post_mortem: PostMortem) -> str:
    """Return the post-mortem as a Markdown document. Every line ends with a line feed."""
    account = post_mortem.account
    evidence = map(sentence, account.evidence)
    decided = (response(account.decision), restore_reason(account.from_step, account.restore_source))
    blocks = [
        f"# Post-mortem: job {_inline(account.job_name)}, {_minute(account.failed_at)} UTC",
        f"**{_inline(verdict(account, post_mortem.written_at))}** {_inline(duties.sentence(post_mortem.duty))}",
        _identity(post_mortem),
        *_section("Impact", _impact(account, post_mortem.written_at)),
        *_section("Timeline", _timeline(post_mortem)),
        *_section("Evidence", "\n".join(f"- {_inline(each)}" for each in evidence) or "None was recorded."),
        *_section("Decision", "\n\n".join(map(_inline, decided))),
        *_section("Last lines before the failure", _lines(post_mortem)),
        *_section("Stacks", "\n\n".join(_stack(each) for each in post_mortem.stacks)),
        *_section("Notes", "\n\n".join(_note(each) for each in post_mortem.notes)),
        *_section("Similar incidents", "\n".join(_similar(each) for each in post_mortem.similar)),
        *_section("What to do", _to_do(post_mortem)),
    ]
    return "\n\n".join(blocks) + "\n"


def _section(title: str, body: str) -> Iterator[str]:
    if body:
        yield f"## {title}"
        yield body


def _identity(post_mortem: PostMortem) -> str:
    account = post_mortem.account
    facts = [
        ("Incident", account.incident_id),
        ("Cause", occurrence(account.cause)),
        ("Project", account.project),
        ("Fleet", account.fleet_name),
        ("Owner", post_mortem.owner or "none"),
        ("Acknowledged by", post_mortem.acknowledged_by or "nobody"),
        ("Written", f"{_second(post_mortem.written_at)} UTC"),
    ]
    return "\n".join(f"- {name}: {_inline(value)}" for name, value in facts)


def _impact(account: Account, now: float) -> str:
    moments = phase_moments(account, now)
    # Round the ends of the phases instead of their lengths, so that the shown lengths add up to the shown total.
    ends = [round((moment - moments[0]) * 100) for moment in moments]
    rows = [(phase, later - earlier) for phase, earlier, later in zip(PHASES, ends, ends[1:], strict=False)]
    rows.append(("**interruption**", ends[-1]))
    table = ["| phase | seconds |", "| --- | ---: |", *(f"| {name} | {part / 100:.2f} |" for name, part in rows)]
    return "\n".join((*table, "", *(f"- {name}: {_inline(value)}" for name, value in _figures(account))))


def _figures(account: Account) -> Iterator[tuple[str, str]]:
    lost = account.lost_steps
    kind = "Unsaved steps" if account.has_ended_the_job else "Recomputed steps"
    yield kind, "unknown" if lost is None else f"{lost:,}"
    if account.reached_step is not None:
        yield "Step before the failure", f"{account.reached_step:,}"
    if account.has_ended_the_job:
        yield "Newest checkpoint", "none" if account.kept_step is None else f"step {account.kept_step:,}"
    elif account.from_step is not None:
        source = account.restore_source
        yield "Resumed from", f"step {account.from_step:,}" + (f", from {SOURCES[source]}" if source else "")
    yield (
        "Cost of idle nodes",
        "unknown, the fleet has no price" if account.cost_usd is None else f"${account.cost_usd:,.2f}",
    )
    yield "Failure on", ", ".join(account.faulted_instance_ids) or "no particular node"
    yield "Lost nodes", ", ".join(account.instance_ids) or "none"
    yield "Replacements", ", ".join(account.replacement_instance_ids) or "none"


def _timeline(post_mortem: PostMortem) -> str:
    entries = [(each.at, f"**{_inline(each.words)}**") for each in milestones(post_mortem.account)]
    entries += [(each.at, _inline(each.words)) for each in post_mortem.events]
    # The sort is stable, and the incident's own times come first in the list. They therefore precede events of equal
    # time.
    entries.sort(key=lambda each: each[0])
    return "\n".join(f"- {_second(at)} {words}" for at, words in entries)


def _lines(post_mortem: PostMortem) -> str:
    return _fenced(post_mortem.lines) if post_mortem.lines else _inline(post_mortem.lines_missing)


def _stack(stack: Stack) -> str:
    noun = "Rank" if len(stack.ranks) == 1 else "Ranks"
    return f"{noun} {_spans(stack.ranks)}:\n\n{_fenced(stack.text.splitlines())}"


def _spans(ranks: Iterable[int]) -> str:
    """Return rank numbers as text, with consecutive numbers joined: `0-3, 7`."""
    spans: list[tuple[int, int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][1] + 1:
            spans[-1] = spans[-1][0], rank
        else:
            spans.append((rank, rank))
    return ", ".join(str(first) if first == last else f"{first}-{last}" for first, last in spans)


def _note(note: WrittenNote) -> str:
    text = "\n".join(f"> {_inline(line)}" if line.strip() else ">" for line in note.text.splitlines())
    return f"{_second(note.at)} {_inline(note.author)}:\n\n{text}"


def _similar(incident: SimilarIncident) -> str:
    how = {IncidentOutcome.OPEN: "still open", IncidentOutcome.RECOVERED: "recovered"}.get(
        incident.outcome, CLOSED[incident.outcome].rstrip(".").lower()
    )
    return f"- {_second(incident.opened_at)} {_inline(incident.incident_id)}, job {_inline(incident.job_name)}: {how}"


def _to_do(post_mortem: PostMortem) -> str:
    found = (duties.action(each, post_mortem.subject) for each in post_mortem.duty.actions)
    steps = [f"{number}. {_step(each)}" for number, each in enumerate(found, 1)]
    nothing = [] if steps else ["Nothing."]
    advice = f"The runbook explains this cause: `/runbook.html#{post_mortem.account.cause.value}` on the control plane."
    return "\n".join((*steps, *nothing, "", advice))


def _step(action: Action) -> str:
    commands = ", ".join(f"`{command}`" for command in (action.command, *action.further_commands))
    return f"{_inline(action.words)} {commands}"


def _fenced(lines: Iterable[str]) -> str:
    """Return lines as a code block whose fence is longer than every run of backticks in them."""
    shown = [visible(line) for line in lines]
    longest = max((len(run) for line in shown for run in re.findall("`+", line)), default=0)
    fence = "`" * max(3, longest + 1)
    return "\n".join((f"{fence}text", *shown, fence))


def _inline(text: str) -> str:
    """Return a text as one line of Markdown that shows the characters of the text without formatting."""
    line = _SPECIAL.sub(r"\\\1", " ".join(visible(text).split()))
    return _FIRST.sub(lambda found: f"{found[1] or ''}\\{found[2] or found[3]}", line)


def _minute(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M}"


def _second(at: float) -> str:
    return f"{datetime.fromtimestamp(at, UTC):%Y-%m-%d %H:%M:%S}"
