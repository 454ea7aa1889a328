"""Records the steps of one pass of a determinism check (`everstep.determinism`), and ends the pass after its last step.

The rank trains without its agent. Pass 1 stores a snapshot of the kept step, which passes 2 and 3 restore.

Invariant: the check ends with a report about three complete records, or with an error.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from typing import Any

import msgspec
import torch.distributed as dist

from everstep.determinism import (
    REPORT,
    START,
    Entry,
    Finding,
    Kind,
    RankReport,
    Record,
    Verdict,
    compare,
    conclude,
)
from everstep.protocol.ids import Generation, RunId, Step
from everstep.protocol.rank_messages import Welcome
from everstep.training import rng
from everstep.training.agent_link import NullLink
from everstep.training.determinism import calls, passes
from everstep.training.determinism.digests import digest_of
from everstep.training.determinism.passes import PASS_COUNT, PASS_VARIABLE, Pass
from everstep.training.determinism.script_values import find_private
from everstep.training.determinism.traced_data import untraced
from everstep.training.errors import SessionMisuse
from everstep.training.kept_state import keep
from everstep.training.recorder import Recorder
from everstep.training.script import Environment, output_dir
from everstep.training.state import RankState

RUN = RunId("0" * 32)
"""Run id in the check's slot header, because a script outside of Everstep has none."""
_RECORDS = msgspec.json.Decoder(Record)
if PASS_VARIABLE in os.environ:
    # Record calls of the clock, of OS entropy and of directory listings from the import on, because the script may
    # make such calls before it calls `init`.
    calls.install()


class CheckLink(NullLink):
    """Stands in for the agent during a determinism check, and names the step to restore."""

    def __init__(self, current: Pass) -> None:
        self._pass = current

    def welcome(self) -> Welcome:
        """Return the step to restore: none in pass 1, later `kept_step`."""
        if self._pass.number <= 1:
            return super().welcome()
        return Welcome(
            generation=self.generation,
            word_path="",
            base_step=Step(self._pass.kept_step),
            base_slot_path=str(self._pass.state),
        )


class DeterminismCheck:
    """The determinism check of one rank during one pass."""

    def __init__(self, current: Pass, environment: Environment) -> None:
        self.link = CheckLink(current)
        self.environment = dataclasses.replace(environment, run=RUN, generation=Generation(0))
        self._pass = current
        self._state: RankState | None = None
        self._recorder: Recorder | None = None
        self._has_ended = False
        self._private: dict[str, tuple[rng.Generator, str]] = {}
        """Generators that no snapshot contains, with the digest of their state at the kept step."""

    @classmethod
    def read(cls, environment: Environment) -> DeterminismCheck | None:
        """Return the check of this process at the start of its pass; None without a check. In the process that the
        launcher started, it does not return but starts pass 1. Raises SessionMisuse if the number of steps is not
        valid.
        """
        current = Pass.read()
        if current is None:
            return None
        if current.number == 0:
            passes.begin(current.following())
        return cls(current, environment)

    def attach(self, state: RankState) -> None:
        """Observe the optimizers and loaders of the session. Called once, before the restore."""
        self._state = state
        self._recorder = Recorder(state, self._received)
        self._recorder.attach()

    @property
    def _records(self) -> Recorder:
        assert self._recorder is not None
        return self._recorder

    def restored(self, step: int) -> None:
        """Record the state after the restore of `step`, 0 in pass 1."""
        self._records.record.calls[START] = calls.drain()
        self._records.restored(step)

    def logged(self, values: Mapping[str, object]) -> None:
        """Record values that the script logs for the current step."""
        self._records.logged(values)

    def boundary(self, step: int) -> None:
        """Record the state after a step. After the last step, end the pass and do not return."""
        self._records.boundary(step)
        self._records.record.calls.setdefault(step, []).extend(calls.drain())
        if self._pass.number == 1 and step == self._pass.kept_step:
            self._keep(step)
        if step >= self._pass.last_step:
            self.end()

    def end(self) -> None:
        """Store the record, and start the next pass or report. Does not return. After an error, it does nothing."""
        if self._has_ended:
            return
        self._has_ended = True
        record = self._records.record
        record.kept_step = self._pass.kept_step
        record.generators = [
            name for name, (generator, before) in self._private.items() if _state_digest(generator) != before
        ]
        with self._pass.records.open("ab") as file:
            file.write(msgspec.json.encode(record) + b"\n")
        if self._pass.number < PASS_COUNT:
            passes.begin(self._pass.following())
        self._report()

    def _received(self, name: str, item: object) -> object:
        batch, trace = untraced(item)
        recorder = self._records
        if trace is None:
            return recorder.batch(name, batch)
        entries = recorder.entries()
        entries.append(Entry(Kind.ORDER, name, trace.order))
        entries += [
            Entry(Kind.SAMPLE, f"{name}, sample {number} of the batch", digest, repeats)
            for number, (digest, repeats) in enumerate(zip(trace.samples, trace.repeats, strict=True))
        ]
        entries.append(Entry(Kind.BATCH, name, trace.batch))
        recorder.record.calls.setdefault(recorder.step, []).extend(trace.calls)
        recorder.add_generators()
        return batch

    def _keep(self, step: int) -> None:
        assert self._state is not None
        keep(self._pass.state, self._state, self.environment, step)
        self._records.record.calls = {START: self._records.record.calls.get(START, [])}
        self._records.keep(step)
        kept = [generator for stream in self._state.streams.values() for generator in stream.source.generators]
        self._private = {name: (each, _state_digest(each)) for name, each in find_private(kept).items()}

    def _report(self) -> None:
        """Compare the passes, write this rank's report, print the result, exit with code 0."""
        records = [_RECORDS.decode(line) for line in self._pass.records.read_bytes().splitlines()]
        if len(records) != PASS_COUNT:
            raise SessionMisuse(f"the determinism check has {len(records)} records of {PASS_COUNT} passes")
        report = self._compared(records)
        (output_dir() / REPORT).write_bytes(msgspec.json.format(msgspec.json.encode(report)) + b"\n")
        reports: list[Any] = [report]
        if passes.has_peers():
            assert self._state is not None
            reports = [None] * dist.get_world_size()
            with self._state.on_device():
                dist.all_gather_object(reports, report)
        if self.environment.rank == 0:
            _print(conclude(reports))
        passes.end_children()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        # Exit now. Code after the training loop would write results, although the run made only a few steps.
        os._exit(0)

    def _compared(self, records: list[Record]) -> RankReport:
        finding: Finding | None = compare(self.environment.rank, records, varies_hash=self._pass.varies_hash)
        kept, last = self._pass.kept_step, max((max(record.steps, default=0) for record in records), default=0)
        problem = ""
        if last <= kept:
            problem = (
                f"the script ended after step {last}. A check needs at least {kept + 1} steps; lower --check-steps"
            )
        return RankReport(self.environment.rank, self.environment.world_size, kept, last, finding, problem)


def _state_digest(generator: rng.Generator) -> str:
    return digest_of(rng.generator_state(generator))


def _print(verdict: Verdict) -> None:
    name = "deterministic" if verdict.is_deterministic else verdict.source or "no result"
    lines = [f"Determinism check: {name}. {verdict.sentence}", *([verdict.advice] if verdict.advice else [])]
    sys.stdout.write("".join(f"{line}\n" for line in lines))
