"""Gives recordings other names, times and numbers. Tests must then read the expected content from the API.

    names      job, fleet, group, bucket, zone and type; ids and addresses of nodes, agents and the run
    times      the recorded incident ends at another time and lasts `pace` times as long
    numbers    seconds are multiplied by `pace`, steps by `step_factor`, dollars by `pace` and the ratio of the fleets'
               prices

`pace` and `step_factor` are whole numbers, so that sums of seconds still match to the microsecond. Sentences change
with the columns: steps, durations and times in them follow the same rules. Ranks, launches, numbers of nodes and
hardware messages stay unchanged, because the incident depends on them.

All functions are pure. Invariant: equal deals give equal recordings, and each name has one new name everywhere.
"""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, time, timedelta
from typing import Any, Final

import msgspec

from everstep.protocol.log_chunks import decode_chunk, encode_head, encode_lines
from tests.dashboard.recording import Recording, Row, Strike

JOBS: Final = tuple(
    f"{word}-{size}"
    for word, size in itertools.product(
        ("atlas", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "juniper", "krill", "larch"),
        ("7b", "13b", "70b", "moe"),
    )
)
FLEETS: Final = ("amber", "basalt", "cobalt", "dune", "estuary", "flint", "granite", "harbour")
TYPES: Final = ("p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p5e.48xlarge", "p5en.48xlarge")
ZONES: Final = ("us-east-2b", "us-west-2c", "eu-central-1a", "eu-north-1b", "ap-northeast-1d")
MONTHS: Final = datetime(2026, 3, 1, tzinfo=UTC), datetime(2026, 9, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class Deal:
    """The new names of one recording, and the factors for its times and numbers."""

    job: str
    fleet: str
    instance_type: str
    availability_zone: str
    price_usd_per_hour: float
    pace: int
    """Factor for all durations: with a larger value, the incident lasts longer."""
    step_factor: int
    ends_at: datetime
    id_seed: int


def deal(seed: int, count: int) -> tuple[Deal, ...]:
    """Return `count` deals with different names of jobs and fleets, so that one server can show all recordings."""
    chance = random.Random(seed)
    ends_at = MONTHS[0] + timedelta(microseconds=chance.randrange((MONTHS[1] - MONTHS[0]) // timedelta(microseconds=1)))
    return tuple(
        Deal(
            job=job,
            fleet=fleet,
            instance_type=chance.choice(TYPES),
            availability_zone=chance.choice(ZONES),
            price_usd_per_hour=chance.randrange(2000, 9900) / 100,
            pace=chance.randrange(2, 5),
            step_factor=chance.randrange(3, 10),
            ends_at=ends_at,
            id_seed=chance.getrandbits(64),
        )
        for job, fleet in zip(chance.sample(JOBS, count), chance.sample(FLEETS, count), strict=True)
    )


def shuffled(recording: Recording, dealt: Deal) -> Recording:
    """Return a recording with other names, times and numbers."""
    words = _Words(recording, dealt)
    return Recording(
        story=recording.story,
        ended_at=dealt.ends_at,
        strikes=tuple(Strike(command=words.text(each.command), did=words.text(each.did)) for each in recording.strikes),
        tables={name: [words.row(name, row) for row in rows] for name, rows in recording.tables.items()},
        objects={words.text(key): words.printed(text) for key, text in recording.objects.items()},
    )


class _Words:
    """Maps each value of a recording to its new value.

    Args:
        recording: recording with the old names and price.
        dealt: new names and factors.
    """

    def __init__(self, recording: Recording, dealt: Deal) -> None:
        self._dealt = dealt
        self._ended_at = recording.ended_at
        (fleet,) = recording.tables["fleet"]
        self._fleet: str = fleet["name"]
        self._moments = sorted(_moments(recording.tables["incident"]))
        self._dollars = dealt.price_usd_per_hour / fleet["price_usd_per_hour"]
        self._names = _names(recording, dealt)
        known = "|".join(re.escape(name) for name in sorted(self._names, key=len, reverse=True))
        # One pass replaces all patterns. A second pass could replace the new name or number of the first pass again.
        self._pattern = re.compile(
            rf"(?<![0-9A-Za-z])(?P<name>{known})(?![0-9A-Za-z])"
            rf"|(?<=\b[Ff]leet[ -])(?P<fleet>{re.escape(self._fleet)})\b"
            r"|(?P<moment>\b\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:\.\d+)?(?:Z|\+00:00))"
            r"|(?P<clock>\b\d\d:\d\d:\d\d)(?= UTC\b)"
            r"|(?P<before>\b(?:[Ss]teps?|[Bb]oundary)(?: beyond)?[ =])(?P<step> *\d+(?:,\d{3})*)"
            r"|(?P<count>\b\d+(?:,\d{3})*)(?P<steps> (?:committed )?step)s?\b"
            r"|(?P<seconds>\b\d+(?:\.\d+)?)(?= (?:s|seconds?)\b)"
            r"|(?<=\d-)(?P<milliseconds>1\d{12})(?=(?:\.i-[0-9a-f]+)?\.jsonl)"
        )

    def row(self, table: str, row: Row) -> Row:
        """Return the new row of a table."""
        match table:
            case "fleet":
                return {
                    **self._object(row),
                    "name": self._dealt.fleet,
                    "price_usd_per_hour": self._dealt.price_usd_per_hour,
                }
            case "metric":
                value = float(row["last_value"]) * self._metric_factor(row["name"])
                return {**self._object(row), "last_value": repr(value)}
            case "metric_chunk":
                factor = self._metric_factor(row["name"])
                points = [self._point(point, factor) for point in row["points"]]
                return {**self._object({**row, "points": []}), "points": points}
            case "job_span":
                return {
                    **self._object(row),
                    "start": self._microseconds(row["start"]),
                    "end": self._microseconds(row["end"]),
                }
        return self._object(row)

    def _point(self, point: list[Any], factor: float) -> list[Any]:
        step, at, value, *spread = point
        moved = [step * self._dealt.step_factor, self._unix(at), value * factor]
        if not spread:
            return moved
        count, least, most, *nodes = spread
        return [*moved, count, least * factor, most * factor, *map(self.text, nodes)]

    def text(self, text: str) -> str:
        """Return the new form of a sentence, a name, an id or a key."""
        return self._pattern.sub(self._replacement, text)

    def printed(self, text: str) -> str:
        """Return a new chunk of the job's log lines, with their times."""
        head, lines, length = decode_chunk(text.encode())
        assert head is not None
        assert length == len(text.encode())
        moved = [
            msgspec.structs.replace(line, at_ms=self._milliseconds(line.at_ms), text=self.text(line.text))
            for line in lines
        ]
        return (encode_head(head) + encode_lines(moved)).decode()

    def _object(self, row: Mapping[str, Any]) -> Row:
        return {self.text(key): self._value(key, value) for key, value in row.items()}

    def _value(self, key: str, value: Any) -> Any:
        match value:
            case None | bool():
                return value
            case str() if key in ("fleet_name", "fleet_names"):
                return self._dealt.fleet
            case list() if key == "spans":
                return [{**each, "start": self._microseconds(each["start"])} for each in value]
            case str() if _STEP.search(key) and value.isdecimal():
                return str(self._steps(int(value)))
            case str():
                return self.text(value)
            case list():
                return [self._value(key, each) for each in value]
            case dict() if key == "accounting":
                return {bucket: spent * self._dealt.pace for bucket, spent in value.items()}
            case dict():
                return self._object(value)
        return self._number(key, value)

    def _number(self, key: str, value: Any) -> Any:
        if key in ("at", "until", "state_since") or key.endswith(("_at", "_at_seconds")):
            return self._unix(value)
        if key == "seconds" or key.endswith(("_seconds", "_microseconds")):
            return value * self._dealt.pace
        if key.endswith("_usd"):
            return value * self._dealt.pace * self._dollars
        return self._steps(value) if _STEP.search(key) else value

    def _replacement(self, found: re.Match[str]) -> str:
        kind, said = found.lastgroup, found[0]
        if kind == "name":
            return self._names[said]
        if kind == "fleet":
            return self._dealt.fleet
        if kind == "moment":
            return self._moment(datetime.fromisoformat(said)).isoformat().replace("+00:00", "Z")
        if kind == "clock":
            return self._moment(self._exact(self._nearest(time.fromisoformat(said)))).strftime("%H:%M:%S")
        if kind == "step":
            return found["before"] + self._counted(found["step"])
        if kind == "steps":
            count = self._counted(found["count"])
            return f"{count}{found['steps']}{'' if count == '1' else 's'}"
        if kind == "milliseconds":
            return str(self._milliseconds(int(said)))
        _, _, decimals = said.partition(".")
        return f"{float(said) * self._dealt.pace:.{len(decimals)}f}"

    def _nearest(self, clock: time) -> datetime:
        """Return the date and time for a time of day: the one that is closest to the end of the recording."""
        today = datetime.combine(self._ended_at, clock, UTC)
        return min((today + timedelta(days=days) for days in (-1, 0, 1)), key=lambda at: abs(at - self._ended_at))

    def _exact(self, second: datetime) -> datetime:
        """Return the exact time in an incident's columns that rounds down to `second`, or `second` itself."""
        return next((at for at in self._moments if at.replace(microsecond=0) == second), second)

    def _counted(self, said: str) -> str:
        """Return the new number of steps, written like the old one: with the same width and with or without commas."""
        steps = self._steps(int(said.replace(",", "")))
        return (f"{steps:,}" if "," in said else str(steps)).rjust(len(said))

    def _steps(self, steps: int) -> int:
        return steps * self._dealt.step_factor if steps > 0 else steps  # keep 0 and the value -1, which means no step

    def _moment(self, at: datetime) -> datetime:
        return self._dealt.ends_at + (at - self._ended_at) * self._dealt.pace

    def _unix(self, at: float) -> float:
        return self._moment(datetime.fromtimestamp(at, UTC)).timestamp()

    def _milliseconds(self, at_ms: int) -> int:
        return round(self._unix(at_ms / 1000) * 1000)

    def _microseconds(self, at: int) -> int:
        """Return the new time for Unix microseconds, without the rounding of a float."""
        end = round(self._ended_at.timestamp() * 1_000_000)
        return round(self._dealt.ends_at.timestamp() * 1_000_000) + (at - end) * self._dealt.pace

    def _metric_factor(self, name: str) -> float:
        """Return the factor for values of a metric.

        A metric whose name ends with `_seconds` is a duration per step. `pace` makes the incident longer, and
        `step_factor` divides it into more steps. Other metrics keep their values.
        """
        return self._dealt.pace / self._dealt.step_factor if name.endswith("_seconds") else 1.0


_STEP: Final = re.compile(r"(^|_)(steps?|boundary)$")


def _moments(rows: Iterable[Row]) -> Iterator[datetime]:
    for row in rows:
        for key, value in row.items():
            if key.endswith("_at") and value is not None:
                yield datetime.fromisoformat(value)


def _names(recording: Recording, dealt: Deal) -> dict[str, str]:
    """Return the new form of each name and id that occurs in a recording."""
    chance = random.Random(dealt.id_seed)
    (fleet,) = recording.tables["fleet"]
    job, spec = recording.job, recording.job["spec"]
    run = _like(job["run_id"], chance)
    names = {
        job["name"]: dealt.job,
        job["run_id"]: run,
        job["run_id"][:12]: run[:12],  # ids of the run's incidents start with this prefix
        spec["source_sha256"]: _like(spec["source_sha256"], chance),
        spec["log_uri"].removeprefix("s3://").partition("/")[0]: f"everstep-{dealt.fleet}",
        fleet["auto_scaling_group_name"]: f"everstep-{dealt.fleet}",
        fleet["instance_type"]: dealt.instance_type,
        fleet["availability_zone"]: dealt.availability_zone,
    }
    subnet = f"10.{chance.randrange(256)}.{chance.randrange(256)}"
    for number, node in enumerate(recording.tables["node"], start=chance.randrange(1, 200)):
        names[node["id"]] = "i-" + _like(node["id"].removeprefix("i-"), chance)
        names[node["address"]] = f"{subnet}.{number}"
        names[node["agent_id"]] = _like(node["agent_id"], chance)
        if node["failure_domain"] and node["failure_domain"] not in names:
            names[node["failure_domain"]] = "nn-" + _like(node["failure_domain"].removeprefix("nn-"), chance)
    return {old: new for old, new in names.items() if old}


def _like(old: str, chance: random.Random) -> str:
    """Return an id of the same form with other hexadecimal digits."""
    return "".join(chance.choice("0123456789abcdef") if digit in "0123456789abcdef" else digit for digit in old)
