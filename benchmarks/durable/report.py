"""Computes the table rows, verdicts and page of the benchmark of checkpoints in S3. The functions are pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise

from benchmarks.durable import jobs, uploads
from benchmarks.durable.loads import Load
from benchmarks.durable.peers import Outcome
from benchmarks.durable.readers import READERS, SharedLoadTime
from benchmarks.durable.transfer import CONNECTIONS, MIB, PART_BYTES, RANGE_BYTES, Figure
from benchmarks.durable.uploads import UploadBlock
from benchmarks.durable.writers import CAP_MIB_PER_SECOND, OBJECT_MIB, WRITERS, SharedUploadTime
from benchmarks.errors import BenchmarkFailed
from benchmarks.measures import Verdict
from benchmarks.page import BenchmarkRun, Page
from benchmarks.rows import Row, limits, number, table, without_verdicts

LEAST_RATIO = 0.8
"""Throughput of Everstep's client ÷ boto3's transfer manager."""
MOST_EXTRA_BYTES = 64 * MIB
MOST_OF_FEWER = 0.9
"""Time of several nodes ÷ that of half as many."""
OWN, RAW = "everstep", "boto3"
SYSTEMS = {
    "load": (OWN, "dcp"),
    "copy": (OWN, "boto3"),
    "export": (OWN, "dcp", "zero_to_fp32"),
}
"""Systems by operation of `benchmarks.durable.peers`."""
GOALS = {
    ("load", "dcp"): ("load from S3, time ÷ that of DCP's download and load", 1.5),
    ("copy", "boto3"): ("export from S3 to S3, time ÷ that of a raw copy of the same bytes", 1.25),
    ("export", "dcp"): ("export of files, time ÷ that of DCP's consolidation", 1.0),
    ("export", "zero_to_fp32"): ("export of files, time ÷ that of zero_to_fp32", 1.0),
}
"""Title and limit, by operation and compared system."""
SYSTEM_NAMES = {
    ("load", OWN): "DCP's load with Everstep's reader",
    ("load", "dcp"): "boto3's download of DCP's directory, then DCP's load",
    ("copy", OWN): "Everstep's export from S3 to S3",
    ("copy", "boto3"): "boto3's download and upload of the file",
    ("export", OWN): "Everstep's export of files",
    ("export", "dcp"): "DCP's consolidation",
    ("export", "zero_to_fp32"): "DeepSpeed's zero_to_fp32",
}
NAMES = {
    "boto3": "boto3 with s3transfer",
    "awscrt": "awscrt",
    "obstore": "obstore",
    "everstep": "Everstep's store (boto3's calls)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample(Figure):
    """One upload or download by one S3 client."""

    server: str
    client: str
    is_upload: bool
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Outcome):
    """One load or export by one system."""

    name: str
    system: str
    mib: int
    """MiB of the parameters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Run(BenchmarkRun):
    """Measured values of one run. Parts that were not measured are empty."""

    samples: Sequence[Sample]
    comparisons: Sequence[Comparison] = ()
    """Loads and exports."""
    shared: Sequence[SharedUploadTime] = ()
    """Shared uploads."""
    restores: Sequence[SharedLoadTime] = ()
    """Shared loads."""
    uploads: Sequence[UploadBlock] = ()
    loads: Sequence[Load] = ()
    remeasured: Sequence[str] = ()
    """Parts that a later run has replaced (`--again`)."""


def rows(run: Run) -> list[Row]:
    """Return one row per limit."""
    found = []
    for (server, is_upload, size), group in _groups(run):
        if server != "SeaweedFS":
            continue
        what = f"{'upload' if is_upload else 'download'} of {size // MIB:,} MiB"
        own = [sample for sample in group if sample.client == OWN]
        raw = [sample for sample in group if sample.client == RAW]
        ratio = _median(raw, "seconds") / _median(own, "seconds")
        found += [
            Row(
                what=f"{what}, throughput ÷ that of {NAMES[RAW]}",
                value=ratio,
                n=len(own),
                limit=LEAST_RATIO,
                is_least=True,
            ).judged(),
            Row(
                what=f"{what}, extra memory",
                value=_median(own, "extra_bytes") / MIB,
                unit="MiB",
                n=len(own),
                limit=MOST_EXTRA_BYTES / MIB,
            ).judged(),
        ]
    found += _compared(run)
    found += _divided(run)
    found += jobs.upload_rows(run.uploads)
    found += jobs.load_rows(run.loads)
    found = without_verdicts(found) if run.is_busy else found
    if not run.samples:
        return found
    broken = [sample for sample in run.samples if not sample.is_intact]
    return [
        *found,
        Row(
            what="downloads with other bytes than the upload",
            value=len(broken),
            n=len([sample for sample in run.samples if not sample.is_upload]),
            limit=0,
            verified=not broken,
            verdict=Verdict.SHORT if broken else Verdict.PASS,
        ),
    ]


def _compared(run: Run) -> list[Row]:
    """Return one row per compared load or export. Wrong tensors of either system miss the limit."""
    rows: list[Row] = []
    for (name, system), (what, limit) in GOALS.items() if run.comparisons else ():
        own, other = _outcomes(run, name, OWN), _outcomes(run, name, system)
        is_equal = all(each.is_equal for each in (*own, *other))
        row = Row(
            what=what,
            value=_median(own, "seconds") / _median(other, "seconds"),
            n=len(own),
            limit=limit,
            verified=is_equal,
        )
        rows.append(row.judged() if is_equal else replace(row, verdict=Verdict.SHORT, reason="tensors differ"))
    return rows


def _divided(run: Run) -> list[Row]:
    """Return a row per number of nodes that share an upload or load, against the next lower number."""
    return [
        Row(
            what=f"{what} of one shard by {more} nodes, time ÷ that by {'1 node' if fewer == 1 else f'{fewer} nodes'}",
            value=statistics.median(times[more]) / statistics.median(times[fewer]),
            n=len(times[more]),
            limit=MOST_OF_FEWER,
        ).judged()
        for what, times in (("upload", _uploads_by(run)), ("load", _loads_by(run)))
        for fewer, more in pairwise(times)
    ]


def _uploads_by(run: Run) -> dict[int, list[float]]:
    """Return seconds of shared uploads, by number of writers of different parts of one shard."""
    found = {count: [each.seconds for each in run.shared if each.writers == count] for count in WRITERS}
    return {count: times for count, times in found.items() if times}


def _loads_by(run: Run) -> dict[int, list[float]]:
    """Return seconds of shared loads, by number of readers of different parts of one shard."""
    found = {count: [each.seconds for each in run.restores if each.readers == count] for count in READERS}
    return {count: times for count, times in found.items() if times}


def _outcomes(run: Run, name: str, system: str) -> list[Comparison]:
    return [each for each in run.comparisons if (each.name, each.system) == (name, system)]


def replaced(before: Run, found: Run, parts: Sequence[str]) -> Run:
    """Return an earlier run's results with `parts` replaced by a later run's.

    Raises BenchmarkFailed if revisions or machines differ, or a run is quick or began on a busy machine.
    """
    then, now = (replace(run.machine, load_average=(0.0, 0.0, 0.0)) for run in (before, found))
    if then != now or before.is_quick != found.is_quick or before.is_busy or found.is_busy:
        raise BenchmarkFailed(
            "the stored results are of another revision or machine, or do not count: measure all parts"
        )
    taken = {part: getattr(found, part) for part in parts}
    remeasured = sorted({*before.remeasured, *parts})
    return replace(before, **taken, seconds=before.seconds + found.seconds, remeasured=remeasured)


def values(run: Run) -> dict[str, str | None]:
    """Return the text for each placeholder of the template of this benchmark's page."""
    return {
        "machine": run.machine.words(),
        "remeasured": ", ".join(f"`{part}`" for part in run.remeasured) or None,
        "connections": str(CONNECTIONS),
        "part": f"{PART_BYTES // MIB} MiB",
        "range": f"{RANGE_BYTES // MIB} MiB",
        "rounds": str(max((len(group) for _, group in _groups(run)), default=0) // len(NAMES)),
        "limits": limits(rows(run)),
        "uploads": _table(run, True) if run.samples else None,
        "downloads": _table(run, False) if run.samples else None,
        "model": f"{run.comparisons[0].mib} MiB" if run.comparisons else None,
        "comparisons": _comparisons(run) if run.comparisons else None,
        "shared": _shared(_uploads_by(run)) if run.shared else None,
        "restores": _shared(_loads_by(run)) if run.restores else None,
        "shared_mib": f"{OBJECT_MIB} MiB" if run.shared else None,
        **_job_values(run),
        "cap": f"{CAP_MIB_PER_SECOND} MiB/s" if run.shared else None,
    }


def _job_values(run: Run) -> dict[str, str | None]:
    blocks, loads = run.uploads, run.loads
    return {
        "job_uploads": jobs.upload_table(blocks) if blocks else None,
        "job_steps": str(len(blocks[0].steps)) if blocks else None,
        "job_rank_mib": f"{number(blocks[0].state_bytes / MIB)} MiB" if blocks else None,
        "job_count": str(uploads.compared_count(blocks)) if blocks else None,
        "job_rate": f"{number(uploads.BYTES_PER_SECOND / 1e6)} MB/s" if blocks else None,
        "job_step": f"{1000 * jobs.usual_step_seconds(blocks):.0f} ms" if blocks else None,
        "loads": jobs.load_table(loads) if loads else None,
        "load_mib": f"{number(loads[0].state_bytes / MIB)} MiB" if loads else None,
    }


def _table(run: Run, is_upload: bool) -> str:
    head = ("server", "size, MiB", "client", "MiB/s, median", "MiB/s, all", "CPU s per GiB", "extra memory, MiB")
    body = [
        [
            server,
            f"{size // MIB:,}",
            NAMES[client],
            number(size / MIB / _median(samples, "seconds")),
            ", ".join(number(size / MIB / sample.seconds) for sample in samples),
            number(_median(samples, "cpu_seconds") * 1024 * MIB / size),
            number(_median(samples, "extra_bytes") / MIB),
        ]
        for (server, of_uploads, size), group in _groups(run)
        if of_uploads == is_upload
        for client in NAMES
        if (samples := [sample for sample in group if sample.client == client])
    ]
    return table(head, body)


def _comparisons(run: Run) -> str:
    body = [
        [words, number(_median(found, "seconds")), ", ".join(number(each.seconds) for each in found)]
        for (name, system), words in SYSTEM_NAMES.items()
        if (found := _outcomes(run, name, system))
    ]
    return table(("operation", "seconds, median", "seconds, all"), body)


def _shared(times: Mapping[int, Sequence[float]]) -> str:
    body = [
        [str(count), number(statistics.median(found)), ", ".join(number(seconds) for seconds in found)]
        for count, found in times.items()
    ]
    return table(("nodes", "seconds, median", "seconds, all"), body)


def _groups(run: Run) -> list[tuple[tuple[str, bool, int], list[Sample]]]:
    def key(sample: Sample) -> tuple[str, bool, int]:
        return sample.server, sample.is_upload, sample.bytes

    return [(place, list(group)) for place, group in groupby(sorted(run.samples, key=key), key)]


def _median(samples: Sequence[Sample] | Sequence[Comparison], name: str) -> float:
    return statistics.median(getattr(sample, name) for sample in samples)


PAGE = Page(name="durable", command="make bench-durable", run=Run, values=values, rows=rows)
