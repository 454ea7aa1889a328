"""Compares the passes of a determinism check and names the first difference. Pure.

A check trains the same few steps three times. Each of these passes runs in a new process. Pass 1 starts at step 0 and
stores a snapshot of an early step, called the kept step. Passes 2 and 3 restore this snapshot:

    pass   starts at             hash seed of Python
    1      step 0                a
    2      the kept step         a
    3      the kept step         b

After the kept step, each rank records digests of its batches, gradients and state, in the order in which they depend on
each other. Two equal passes have equal records. The kind of the first entry that differs shows the source of the
difference. The passes in which this entry differs show the pattern:

    equal passes        pattern
    2 and 3             RESTART: a restart loses a part of the state that training depends on
    1 and 2             HASH: the result depends on the hash seed, for example by the order of a set
    any other           EVERY_RUN: each run uses a value from outside the script, for example the time

Invariant: a check succeeds only if every rank has reported, and at least one step after the kept step was compared.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum
from itertools import takewhile, zip_longest
from typing import Final

import msgspec

REPORT: Final = "determinism.json"
"""Name of the file with a rank's result of a determinism check. Each rank writes it into its output directory."""
GUIDE: Final = "docs/resume.md"
SHOWN_NAMES: Final = 3
"""Number of names that the sentence with the result of a check lists. The report contains all names."""
START: Final = 0
"""Step number under which `Record.calls` stores the calls that the script made before its first step."""


class Kind(StrEnum):
    """The kinds of values whose digests a determinism check records, in the order in which a step computes them."""

    RESTORED = "restored"
    """State at the kept step. Pass 1 records it right after the step, passes 2 and 3 right after its restore."""
    ORDER = "order"
    """Indices that a sampler drew for one batch."""
    SAMPLE = "sample"
    """One sample, before `collate_fn`."""
    BATCH = "batch"
    """One batch, after `collate_fn`."""
    LOADED = "loaded"
    """One batch of a loader that does not let the check observe the single samples."""
    GENERATOR = "generator"
    """State of a random generator that snapshots contain."""
    SETTING = "setting"
    """Learning rate or another option of an optimizer, right before its step."""
    GRADIENT = "gradient"
    """Gradient of a parameter, right before the optimizer's step."""
    STATE = "state"
    """Tensor of the model or of an optimizer, right after the optimizer's step."""
    OBJECT = "object"
    """Scheduler or other object that the script registered, after the step."""
    VALUE = "value"
    """Value that the script logged."""
    VARIABLE = "variable"
    """Tensor or random generator that a variable of the script holds, at the end of a rehearsal."""
    END = "end"
    """The end of the script, in a rehearsal. Every later step is missing."""
    PLAIN = "plain-value"
    """Number, text or length of a container that training changes, at the end of a rehearsal."""


class Pattern(StrEnum):
    """Names which passes (runs of the same steps) of a determinism check recorded different values.

    The table in the module's docstring defines the patterns.
    """

    RESTART = "restart"
    HASH = "hash"
    EVERY_RUN = "every_run"


class Source(StrEnum):
    """The cause of a difference between two passes of a determinism check, as the report names it.

    `docs/resume.md` has a section for each cause.
    """

    RESTORE = "restore"
    DATA_ORDER = "data-order"
    DATASET = "dataset"
    AUGMENTATION = "augmentation"
    COLLATOR = "collator"
    LOADER = "loader"
    GENERATOR = "generator"
    OPTIMIZER_SETTING = "optimizer-setting"
    KERNEL = "kernel"
    ENTROPY = "entropy"
    PREFETCH = "prefetched-batch"
    UNSEEDED = "unseeded"
    UNKEPT_STATE = "unkept-state"
    UNKEPT_VALUE = "unkept-value"
    REGISTERED_OBJECT = "registered-object"
    LOGGED_VALUE = "logged-value"
    HASH_ORDER = "hash-order"


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """The digest of one value that a rank recorded, such as a batch, a gradient or a state."""

    kind: Kind
    name: str
    digest: str
    repeats: bool = True
    """False if a sample changed when the check requested it twice in one process.

    Always True for entries that are no samples.
    """


class Record(msgspec.Struct):
    """The digests that one rank recorded in one pass (one of three runs of the same steps) of a determinism check."""

    kept_step: int
    """The step whose snapshot the second and third pass of the check restore."""
    steps: dict[int, list[Entry]] = msgspec.field(default_factory=dict[int, list[Entry]])
    """Recorded values by step number, beginning with the step that passes 2 and 3 restore (the kept step).

    The values of a step are in the order of their recording.
    """
    calls: dict[int, list[str]] = msgspec.field(default_factory=dict[int, list[str]])
    """Calls of the script to functions whose results differ between runs, by step.

    Example: `time.time at train.py:12`.
    """
    variables: dict[int, dict[str, str]] = msgspec.field(default_factory=dict[int, dict[str, str]])
    """Type and digest of the script's variables, by moment: 2 k before step k, 2 k + 1 after it. Only in rehearsals."""
    early: dict[str, str] = msgspec.field(default_factory=dict[str, str])
    """The script's plain values when the process began to train, as in `variables`. Only in rehearsals."""
    places: dict[str, tuple[str, int]] = msgspec.field(default_factory=dict[str, tuple[str, int]])
    """File and line at which the script last fetched the batch or logged the value of a name. Only in rehearsals."""
    generators: list[str] = msgspec.field(default_factory=list[str])
    """Names of random generators that the script advanced and that no snapshot contains."""


class Finding(msgspec.Struct, frozen=True):
    """The first difference between the passes (runs of the same steps) of one rank."""

    rank: int
    step: int
    kind: Kind
    pattern: Pattern
    source: Source
    names: tuple[str, ...]
    """Names of all recorded values of this kind and step that differ between the passes."""
    calls: tuple[str, ...] = ()
    """Calls of the script that may cause the difference."""
    generators: tuple[str, ...] = ()
    """Random generators that may cause the difference, because no snapshot contains them."""


class RankReport(msgspec.Struct, frozen=True):
    """The result of a determinism check on one rank. The rank writes it into its output directory as `REPORT`."""

    rank: int
    world_size: int
    kept_step: int
    """The step whose snapshot the second and third pass of the check restored."""
    last_step: int
    """The last step whose records of all three passes the rank compared."""
    finding: Finding | None = None
    problem: str = ""
    """The reason why the check has no result on this rank. Empty if it has one."""


_REPORTS: Final = msgspec.json.Decoder(RankReport)


def read_report(data: bytes) -> RankReport:
    """Return the report in the content of a file `REPORT`.

    Args:
        data: JSON, as a rank wrote it.

    Returns:
        The report.

    Raises:
        msgspec.DecodeError: the bytes are not a report.
    """
    return _REPORTS.decode(data)


class Verdict(msgspec.Struct, frozen=True):
    """The result of a determinism check over all ranks."""

    is_deterministic: bool
    source: Source | None
    sentence: str
    """One sentence for people: the first difference, the problem, or that all passes were equal."""
    advice: str
    """How the user removes the difference. Empty without a difference."""
    ranks: tuple[RankReport, ...]


def compare(rank: int, passes: Sequence[Record], *, varies_hash: bool) -> Finding | None:
    """Return the first difference between the three passes of a rank, or None if they are equal.

    Args:
        rank: the rank that recorded the passes.
        passes: the three records, in the order of the passes.
        varies_hash: False if the job sets PYTHONHASHSEED, so that all passes had the same hash seed.

    Returns:
        The finding.

    Raises:
        ValueError: there are not exactly three records.
    """
    first, again, reseeded = passes
    for step in sorted(first.steps.keys() | again.steps.keys() | reseeded.steps.keys()):
        rows = list(zip_longest(*(record.steps.get(step, []) for record in passes)))
        place = next((number for number, row in enumerate(rows) if _differs(row)), None)
        if place is not None:
            return _finding(rank, step, rows[place:], passes, varies_hash=varies_hash)
    return None


def conclude(reports: Sequence[RankReport]) -> Verdict:
    """Return the result (verdict) of a determinism check from the reports of all ranks.

    A difference spreads from one rank to all others within a step. The result therefore names the earliest difference
    in causal order, over all ranks.

    Args:
        reports: the report of each rank, in any order.

    Returns:
        The result. The job counts as not deterministic if a report is missing, or if a rank reports a problem.
    """
    ranks = tuple(sorted(reports, key=lambda report: report.rank))
    findings = [report.finding for report in ranks if report.finding is not None]
    if findings:
        finding = min(findings, key=lambda each: (each.step, list(Kind).index(each.kind), each.rank))
        return Verdict(False, finding.source, sentence_of(finding), advice_of(finding), ranks)
    if problem := _problem(ranks):
        return Verdict(False, None, problem, "", ranks)
    first, last = ranks[0].kept_step + 1, min(report.last_step for report in ranks)
    sentence = f"Steps {first} to {last} are bit-identical after two restarts, on {_counted(len(ranks), 'rank')}."
    return Verdict(True, None, sentence, "", ranks)


def _problem(ranks: Sequence[RankReport]) -> str:
    for report in ranks:
        if report.problem:
            return f"Rank {report.rank}: {report.problem}"
    world_size = ranks[0].world_size if ranks else 0
    missing = sorted(set(range(world_size)) - {report.rank for report in ranks})
    if missing or not ranks:
        return f"Ranks without a report: {', '.join(map(str, missing)) or 'all'}. The check has no result."
    return ""


def _differs(row: tuple[Entry | None, ...]) -> bool:
    return len({_key(entry) for entry in row}) > 1


def _key(entry: Entry | None) -> tuple[str, str, str] | None:
    return None if entry is None else (entry.kind, entry.name, entry.digest)


def _finding(
    rank: int,
    step: int,
    rows: Sequence[tuple[Entry | None, ...]],
    passes: Sequence[Record],
    *,
    varies_hash: bool,
) -> Finding:
    """Return the finding about the first step at which the three passes of the check differ.

    Each row of `rows` contains the digests of one recorded value, such as a gradient, in the three passes. The first
    row is the first value of the step whose digests differ.
    """
    lead = next(entry for entry in rows[0] if entry is not None)
    alike = [row for row in takewhile(lambda row: _kind_of(row) == lead.kind, rows) if _differs(row)]
    pattern = _pattern(rows[0], varies_hash=varies_hash)
    names = tuple(dict.fromkeys(name for row in alike if (name := _name_of(row))))
    repeats = all(entry.repeats for entry in rows[0] if entry is not None)
    steps = (START, step) if lead.kind in (Kind.ORDER, Kind.SAMPLE) else (step,)
    calls = tuple(dict.fromkeys(call for each in passes for number in steps for call in each.calls.get(number, [])))
    generators = tuple(passes[0].generators) if pattern is Pattern.RESTART else ()
    source = _source(lead.kind, pattern, calls, repeats=repeats)
    if pattern is Pattern.RESTART and (lead.kind is Kind.GENERATOR or _is_ahead(passes[0], passes[1], step)):
        source = Source.PREFETCH
    return Finding(rank, step, lead.kind, pattern, source, names, calls, generators)


def _is_ahead(first: Record, again: Record, step: int) -> bool:
    """Return whether the replay got a batch in this step that the first run got only in the next step."""
    now, later, other = (
        [entry.digest for entry in entries if entry.kind in (Kind.BATCH, Kind.LOADED)]
        for entries in (first.steps.get(step, []), first.steps.get(step + 1, []), again.steps.get(step, []))
    )
    return len(other) > len(now) or any(digest in later and digest not in now for digest in other)


def _kind_of(row: tuple[Entry | None, ...]) -> Kind:
    return next(entry.kind for entry in row if entry is not None)


def _name_of(row: tuple[Entry | None, ...]) -> str:
    return next(entry.name for entry in row if entry is not None)


def _pattern(row: tuple[Entry | None, ...], *, varies_hash: bool) -> Pattern:
    first, again, reseeded = map(_key, row)
    if again == reseeded:
        return Pattern.RESTART
    return Pattern.HASH if first == again and varies_hash else Pattern.EVERY_RUN


_OF_KIND: Final = {
    Kind.RESTORED: Source.RESTORE,
    Kind.ORDER: Source.DATA_ORDER,
    Kind.SAMPLE: Source.DATASET,
    Kind.BATCH: Source.COLLATOR,
    Kind.LOADED: Source.LOADER,
    Kind.GENERATOR: Source.GENERATOR,
    Kind.SETTING: Source.OPTIMIZER_SETTING,
}


def _source(kind: Kind, pattern: Pattern, calls: Collection[str], *, repeats: bool) -> Source:
    if pattern is Pattern.HASH:
        return Source.HASH_ORDER
    if kind is Kind.SAMPLE and not repeats:
        return Source.AUGMENTATION
    if kind in _OF_KIND:
        return _OF_KIND[kind]
    if pattern is Pattern.RESTART:
        return Source.UNKEPT_STATE
    # Many scripts read the clock only to measure their speed. If they call nothing else, do not blame the clock.
    if any(not call.startswith("time.") for call in calls):
        return Source.ENTROPY
    return {Kind.VALUE: Source.LOGGED_VALUE, Kind.OBJECT: Source.REGISTERED_OBJECT}.get(kind, Source.KERNEL)


_SUBJECTS: Final = {
    Kind.RESTORED: "the restored state differs from the kept state",
    Kind.ORDER: "the sampler drew other samples",
    Kind.SAMPLE: "the dataset returned another sample for the same index",
    Kind.BATCH: "equal samples became another batch in `collate_fn`",
    Kind.LOADED: "the loader returned another batch",
    Kind.GENERATOR: "a random generator has another state after equal batches",
    Kind.SETTING: "an optimizer has another setting after equal batches",
    Kind.GRADIENT: "equal batches, generators and settings gave another gradient",
    Kind.STATE: "equal gradients and settings gave another state",
    Kind.OBJECT: "a registered object has another state after equal updates of the model",
    Kind.VALUE: "equal steps logged another value",
    Kind.VARIABLE: "a variable of the script has another value after equal steps",
    Kind.END: "the script has ended here, and not before the restart",
    Kind.PLAIN: "the steps are equal, and values that the script changes during training are not",
}
_PATTERNS: Final = {
    Pattern.RESTART: "Both restarts agree with each other, and not with the first run.",
    Pattern.HASH: "It differs only with another hash seed of Python.",
    Pattern.EVERY_RUN: "It differs in every run.",
}
_ADVICE: Final = {
    Source.RESTORE: "Make `load_state_dict` restore everything that `state_dict` returns.",
    Source.DATA_ORDER: (
        "Seed the sampler's generator, or let the sampler draw from the global generators of torch, numpy or Python, "
        "which Everstep keeps."
    ),
    Source.DATASET: "Sort the files that the dataset lists, and seed each shuffle before `init`.",
    Source.AUGMENTATION: (
        "Let the dataset draw from the global generators, or from generators that are its attributes. "
        "Everstep keeps both."
    ),
    Source.COLLATOR: "Let `collate_fn` draw from the global generators of torch, numpy or Python.",
    Source.LOADER: "Use a DataLoader over a map-style dataset, or make the loader's `state_dict` complete.",
    Source.GENERATOR: "Do not seed a generator from the clock or from the operating system within a step.",
    Source.OPTIMIZER_SETTING: "Derive the setting from the step number, or pass its scheduler to `init`.",
    Source.KERNEL: (
        "Use `torch.use_deterministic_algorithms(True)`, and reduce in a fixed order in kernels of your own."
    ),
    Source.ENTROPY: "Replace these calls by draws from a global generator of torch, numpy or Python.",
    Source.PREFETCH: (
        "Pass each loader to `init(data=…)`, and iterate over `session.data`. Fetch each batch within its own step, "
        "after the boundary of the previous step. Before the loop, draw only random numbers that the loop draws again."
    ),
    Source.UNSEEDED: (
        "Seed the generators of torch, numpy and Python at the beginning of the script. The script draws random "
        "values, such as data, before its loop."
    ),
    Source.UNKEPT_STATE: "Pass the object that holds this state to `init(extra={…})`, with `state_dict`.",
    Source.UNKEPT_VALUE: (
        "Start counters at the number that `restore()` returns. If the script iterates over a loader itself, pass the "
        "loader to `init(data=…)`. Keep other values in `init(extra={…})`. Values that are only printed may differ."
    ),
    Source.REGISTERED_OBJECT: "Leave out of its `state_dict` what differs between runs, such as times.",
    Source.LOGGED_VALUE: "The model itself is bit-identical. Nothing needs to change.",
    Source.HASH_ORDER: (
        "Sort each set before you iterate over it, and do not use `hash()` of texts. Or set PYTHONHASHSEED in the "
        "job's Environment."
    ),
}


def sentence_of(finding: Finding) -> str:
    """Return the difference as a text for people."""
    names = f" ({_shown(finding.names)})" if finding.names else ""
    parts = [f"Step {finding.step}, rank {finding.rank}: {_SUBJECTS[finding.kind]}{names}."]
    parts.append(_PATTERNS[finding.pattern])
    parts += _evidence(finding)
    return " ".join(parts)


def _evidence(finding: Finding) -> Iterator[str]:
    if finding.source is Source.AUGMENTATION:
        yield "A second call in the same process returned another sample, too."
    if finding.generators:
        yield f"The script advances generators that no snapshot contains: {_shown(finding.generators)}."
    if finding.calls:
        yield f"The script calls {_shown(finding.calls)}."


def advice_of(finding: Finding) -> str:
    """Return how the user removes the difference."""
    return f"{_ADVICE[finding.source]} See {GUIDE}#{finding.source}."


def _shown(names: Sequence[str]) -> str:
    more = len(names) - SHOWN_NAMES
    return ", ".join(names[:SHOWN_NAMES]) + (f" and {more} more" if more > 0 else "")


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
