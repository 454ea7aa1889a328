"""Proves while a job trains that a restart repeats its steps bit for bit.

    training ─ b ─ records n steps ─ S │ waits ──────────────────────────────────┬─ training after S
               keeps b        keeps S │                                         │
                                      └ child: restore b, repeat n steps, compare, and once more if they differ

All ranks agree on S = b + n with the coordinator (`everstep.training.step_rules`), and keep their states in files in
memory. A replay does not talk to the agent. If memory does not suffice for a second process of each rank, the ranks
replace themselves by exec:

    training ─ b ─ S │ exec: as the child ─┬─ equal: training after S
                                           └─ different, and once more: exec: restore S, training after S

Invariant: after the rehearsal, the state is that of the undisturbed training after S, whatever the replay computed.
With a child, this is also true of all that no snapshot contains.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import msgspec
import torch
import torch.distributed as dist

from everstep.determinism import Finding, Kind, Pattern, Record, Source
from everstep.protocol.ids import Generation, Step
from everstep.protocol.limits import cut
from everstep.protocol.rank_messages import MAX_LIMIT_SECONDS, Welcome
from everstep.protocol.rehearsals import (
    MAX_REHEARSED_CHARACTERS,
    RehearsalVerdict,
    Rehearsed,
)
from everstep.training.determinism import passes
from everstep.training.determinism.replays import compare_replays, differing
from everstep.training.determinism.script_lines import caller
from everstep.training.determinism.script_values import values_of_script
from everstep.training.kept_state import keep
from everstep.training.recorder import Recorder
from everstep.training.script import Environment
from everstep.training.state import RankState

REPLAY_VARIABLE = "EVERSTEP_REPLAY"
MEMORY_SHARE = 0.5
"""Share of the node's available memory that its ranks' kept states may take."""
LIMIT_SECONDS = 300
"""Seconds for a rehearsal, in addition to thirty times the time from `init` to the first step."""
_CHILD_SHARE = 0.8
"""Share of the rehearsal's time limit after which a rank ends its child, and trains on."""
RETURN = 4
_RECORDS = msgspec.json.Decoder(Record)


class Replay(msgspec.Struct, frozen=True):
    """The values that one process of a rehearsal hands to the next."""

    number: int
    """2 and 3 for replays from b, `RETURN` for the return to S."""
    generation: Generation
    first: Step
    last: Step
    kept: tuple[str, str]
    """Files with the states at the steps b (`first`) and S (`last`)."""
    records: str
    """File with one line per process that recorded the steps: its `Record` as JSON."""
    output: str
    """The script's stdout, which a replay does not use. In a child: a socket that receives the child's report."""
    is_child: bool
    """Whether the process that trains waits for this one."""
    began_at: float
    """Monotonic seconds at which the rank left training."""
    first_passed: int = 0
    resume_revision: int = 0
    report: Rehearsed | None = None

    @property
    def base(self) -> Welcome:
        """The step that this process restores, as an agent names it."""
        step, path = (self.last, self.kept[1]) if self.number == RETURN else (self.first, self.kept[0])
        return Welcome(generation=self.generation, word_path="", base_step=step, base_slot_path=path)

    @property
    def files(self) -> list[Path]:
        """The files that the processes share."""
        return list(map(Path, (*self.kept, self.records, self.output)))

    @property
    def text(self) -> str:
        """The replay as JSON."""
        return msgspec.json.encode(self).decode()

    @classmethod
    def read(cls) -> Replay | None:
        """Take this process's replay out of the environment. None if the process trains from its start."""
        text = os.environ.pop(REPLAY_VARIABLE, None)
        if text is None:
            return None
        replay = _REPLAYS.decode(text)
        for file in replay.files:
            os.set_inheritable(int(file.name), False)
        return replay

    def restart(self) -> NoReturn:
        """Start the script anew in this process. Collective."""
        passes.restart({REPLAY_VARIABLE: self.text}, self.files)


_REPLAYS = msgspec.json.Decoder(Replay)


_REPORTS = msgspec.json.Decoder(Rehearsed)


ENDED_EARLY = "the second process of the rank ended before it had repeated the steps; the rank's output has its error"


class Rehearsal:
    """The rehearsals of one rank. `replay` is None in a process that trains."""

    def __init__(self, state: RankState, environment: Environment, replay: Replay | None) -> None:
        self._state = state
        self._environment = environment
        self._recorder = Recorder(state, self._received, self._note_start)
        self._begun_at = time.monotonic()  # Not at the import: a template may import this long before the fork.
        self._first_step_seconds = 0.0
        self._early: dict[str, str] = {}
        """Plain values at the first batch of this process, and those that only its first boundary reaches."""
        self._files: list[Path] = []
        """Files with the state at b, the records, and from S on the state at S, while this process records."""
        self.replay = replay
        self.kept_step = 0
        """The step b, while this process records."""
        if replay is not None and replay.number != RETURN:
            self._recorder.attach()

    @property
    def _is_recording(self) -> bool:
        return bool(self._files) or (self.replay is not None and self.replay.number != RETURN)

    @property
    def limit_seconds(self) -> int:
        """Seconds after which a rank that rehearses counts as hung."""
        return min(MAX_LIMIT_SECONDS, LIMIT_SECONDS + int(30 * self._first_step_seconds))

    def obstacle(self) -> str:
        """Return why this rank cannot rehearse; empty if it can."""
        size = sum(item.tensor.nbytes for item in self._state.observe().tensors)
        needed, free = 2 * size * self._environment.ranks_per_node, _available_bytes()
        if needed > MEMORY_SHARE * free:
            return (
                f"the rehearsal needs {needed / 2**30:.1f} GiB for two copies of the node's state, and may use half of "
                f"the {free / 2**30:.1f} GiB that are available"
            )
        return ""

    def restored(self, step: int) -> None:
        """Record the restored state in a replay. Otherwise, note the script's values at the first batch."""
        if self._is_recording:
            self._recorder.restored(step)
        elif self._environment.agent_socket is not None:
            for stream in self._state.streams.values():
                stream.observe = stream.observe or self._received_first

    def logged(self, values: Mapping[str, object]) -> None:
        """Record values that the script logs."""
        if self._is_recording:
            self._recorder.logged(values)
            self._note_place(values)

    def boundary(self, step: int) -> None:
        """Record the state after a step."""
        if not self._first_step_seconds:
            self._first_step_seconds = time.monotonic() - self._begun_at
            self._note_early()
        if self._is_recording:
            self._recorder.boundary(step)
            self._note_variables(2 * step + 1)

    def begin(self, step: int) -> None:
        """Keep the state after step b, and record the next steps. Raises Exception, without a change, on failure."""
        self._files = [self._kept("rehearsed-state", step), passes.create_file("rehearsed-steps")]
        self.kept_step = step
        self._recorder.keep(step)
        self._recorder.record.early = self._early
        self._recorder.attach()

    def keep_last(self, step: int) -> None:
        """Keep the state after step S, to which the rank returns if the replay differs. Raises as `begin`."""
        self._files.append(self._kept("rehearsed-end", step))

    def _kept(self, name: str, step: int) -> Path:
        file = passes.create_file(name)
        try:
            keep(file, self._state, self._environment, step)
        except BaseException:
            os.close(int(file.name))
            raise
        return file

    def cancel(self) -> None:
        """End the recording, if there is one, because the ranks do not rehearse."""
        if self._files:
            self._recorder.detach()
            for file in self._files:
                os.close(int(file.name))
            self._files, self.kept_step = [], 0

    def repeat_beside(self, step: int) -> Rehearsed | None:
        """Repeat the recorded steps in a child, and wait at S. Collective. None if a rank lacks memory."""
        if not self._is_true_everywhere(has_room(self._state, self._environment)):
            return None
        began_at, limit = time.monotonic(), _CHILD_SHARE * self.limit_seconds
        first, line, reason = self.kept_step, b"", ENDED_EARLY
        ours, theirs = socket.socketpair()
        ours.settimeout(limit)
        replay = self._first_replay(step, theirs.fileno(), is_child=True)
        with ours, theirs, contextlib.ExitStack() as child:
            try:
                child.enter_context(passes.beside({REPLAY_VARIABLE: replay.text}, replay.files))
                theirs.close()
                line = ours.makefile("rb").readline()
            except TimeoutError:
                reason = f"the second process of the rank did not repeat the steps within {limit:.0f} s"
            except OSError as error:
                reason = str(error)
            # Wait for all ranks, because a child that has reported may still communicate with other children.
            self._is_true_everywhere(bool(line))
        self.cancel()
        if not line:
            return self.refusal(first, step - first, reason)
        return msgspec.structs.replace(_REPORTS.decode(line), seconds=time.monotonic() - began_at)

    def restart(self, step: int, first_passed: int, resume_revision: int) -> NoReturn:
        """Replace this process by the first replay. Collective. The two numbers are published again on return."""
        sys.stdout.flush()
        output = os.dup(1)
        with open(os.devnull, "wb") as nothing:
            os.dup2(nothing.fileno(), 1)
        replay = self._first_replay(step, output, is_child=False)
        msgspec.structs.replace(replay, first_passed=first_passed, resume_revision=resume_revision).restart()

    def _first_replay(self, step: int, output: int, *, is_child: bool) -> Replay:
        kept, records, last = self._files
        self._write(records)
        return Replay(
            number=2,
            generation=self._environment.generation,
            first=Step(self.kept_step),
            last=Step(step),
            kept=(str(kept), str(last)),
            records=str(records),
            output=str(kept.parent / str(output)),
            is_child=is_child,
            began_at=time.monotonic(),
        )

    def is_over(self, step: int) -> bool:
        """Compare the replay with the training, and return whether this process is a replay that may train on. If any
        rank differs, the call does not return: the rank replays once more, or returns to its kept state after S.
        """
        replay = self.replay
        if replay is None or step != replay.last:
            return False
        if replay.number == RETURN:
            return True
        records = self._write(Path(replay.records))
        finding = compare_replays(self._environment.rank, records)
        is_last = len(records) > 2
        # The second replay shows which values differ in every run, such as times. If only plain values differ after
        # it, the state is that of the training, and the rank need not return to it.
        if self._is_true_everywhere(finding is None or (is_last and finding.kind is Kind.PLAIN)):
            self.replay = msgspec.structs.replace(replay, report=self._report(replay, finding, records))
            if replay.is_child:
                self._leave(self.replay)
            return True
        if not is_last:
            msgspec.structs.replace(replay, number=3).restart()
        self._leave(msgspec.structs.replace(replay, number=RETURN, report=self._report(replay, finding, records)))

    def _leave(self, replay: Replay) -> NoReturn:
        """Return to the kept state after S. A child reports instead, and waits for its end."""
        if not replay.is_child:
            replay.restart()
        passes.end_children()
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        with os.fdopen(int(Path(replay.output).name), "wb") as parent:
            parent.write(msgspec.json.encode(replay.report) + b"\n")
        while True:
            signal.pause()

    def closed(self, step: int) -> None:
        """End the rehearsal, without return, if the script ends in a replay. Collective."""
        # Without this, the job would count as completed.
        replay = self.replay
        if replay is None or replay.number == RETURN:
            return
        step = max(step, replay.first)
        records = self._write(Path(replay.records))
        finding = compare_replays(self._environment.rank, [*records, records[-1]][:3])
        if finding is None or finding.step > step or finding.kind is Kind.PLAIN:
            finding = Finding(self._environment.rank, step + 1, Kind.END, Pattern.RESTART, Source.UNKEPT_STATE, ())
        report = self._report(replay, finding, [*records, records[-1]][:3])
        self._leave(msgspec.structs.replace(replay, number=RETURN, report=report))

    def end(self) -> Rehearsed:
        """Return the report of this replay, with the time since the rank left training, and let the rank train."""
        replay = self.replay
        assert replay is not None
        assert replay.report is not None
        self.replay = None
        self._recorder.detach()
        sys.stdout.flush()
        os.dup2(int(Path(replay.output).name), 1)
        for file in replay.files:
            os.close(int(file.name))
        return msgspec.structs.replace(replay.report, seconds=time.monotonic() - replay.began_at)

    def refusal(self, step: int, steps: int, reason: str) -> Rehearsed:
        """Return the report that this rank cannot rehearse from a step."""
        return Rehearsed(
            generation=self._environment.generation,
            step=Step(max(0, step)),
            steps=steps,
            seconds=0.0,
            verdict=RehearsalVerdict.REFUSED,
            message=cut(reason, MAX_REHEARSED_CHARACTERS),
        )

    def _received(self, name: str, batch: object) -> object:
        if not self._early:
            self._note_early()
        self._note_start()
        self._note_place([name])
        return self._recorder.batch(name, batch)

    def _received_first(self, _: str, batch: object) -> object:
        self._note_early()
        for stream in self._state.streams.values():
            if stream.observe == self._received_first:
                stream.observe = None
        return batch

    def _note_early(self) -> None:
        if self._environment.agent_socket is not None:
            self._early = values_of_script(_registered(self._state), with_tensors=False) | self._early

    def _note_place(self, names: Iterable[str]) -> None:
        if (place := caller()) is not None:
            self._recorder.record.places |= dict.fromkeys(names, place)

    def _note_start(self) -> None:
        """Record the script's variables at the first batch of a step. Without a loader: before its first update."""
        self._note_variables(2 * self._recorder.step)

    def _note_variables(self, moment: int) -> None:
        if moment not in self._recorder.record.variables:
            self._recorder.record.variables[moment] = values_of_script(_registered(self._state))

    def _write(self, records: Path) -> list[Record]:
        with records.open("ab") as file:
            file.write(msgspec.json.encode(self._recorder.record) + b"\n")
        return [_RECORDS.decode(line) for line in records.read_bytes().splitlines()]

    def _is_true_everywhere(self, value: bool) -> bool:
        values = [value]
        if passes.has_peers():
            values = [False] * dist.get_world_size()
            with self._state.on_device():
                dist.all_gather_object(values, value)
        return all(values)

    def _report(self, replay: Replay, finding: Finding | None, records: Sequence[Record]) -> Rehearsed:
        report = Rehearsed(
            generation=replay.generation,
            step=replay.first,
            steps=replay.last - replay.first,
            seconds=0.0,
            verdict=RehearsalVerdict.PROVEN,
        )
        return report if finding is None else differing(report, finding, records)


def has_room(state: RankState, environment: Environment) -> bool:
    """Return whether the memory of the node and its GPUs suffices for a second process of each rank."""
    lines = Path("/proc/self/status").read_text().splitlines()
    own = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))
    if own * environment.ranks_per_node > MEMORY_SHARE * _available_bytes():
        return False
    devices = {item.tensor.device for item in state.observe().tensors if item.tensor.is_cuda}
    return all(2 * free >= total for free, total in map(torch.cuda.mem_get_info, devices))


def _registered(state: RankState) -> list[object]:
    return [
        *state.parameters().values(),
        *state.companions(),
        *(module for tree in state.modules() for module in tree),
        *state.optimizers(),
        *(stream.loader for stream in state.streams.values()),
    ]


def _available_bytes() -> int:
    """Return the available memory of the node, or of this process's cgroup if that is less, in bytes."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    free = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    try:
        group = Path("/sys/fs/cgroup") / Path("/proc/self/cgroup").read_text().split("::", 1)[1].strip().lstrip("/")
        limit = int((group / "memory.max").read_text())
        return min(free, limit - int((group / "memory.current").read_text()))
    except (OSError, ValueError, IndexError):  # no cgroup of version 2, or one without a limit ("max")
        return free
