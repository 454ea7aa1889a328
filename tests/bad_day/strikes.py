"""Carries out the strikes of a plan, which are injected faults, and checks that each strike takes effect.

An effect is an ended process, an instance state that AWS reports, or a packet that a link dropped.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from typing import Any, Final

import httpx
from botocore.exceptions import BotoCoreError, ClientError

from infra.local_cloud.errors import FaultRefused, LocalCloudError
from infra.local_cloud.fault_kinds import AnyFault, Effect
from infra.local_cloud.processes import Process, identify
from infra.local_cloud.roles import Aim, with_nodes
from infra.local_cloud.up import LocalCluster
from tests.bad_day import facts
from tests.bad_day.plan import Line, faults, patience_seconds
from tests.bad_day.watch import GONE, Watch
from tests.production.stack import Servers

SEE_SECONDS: Final = 60.0
"""Longest time until an injected fault has an observed effect.

It is long, because a busy machine polls late, and because stale views and disruptions of AWS hide ended instances from
the checker, too: one after the other for 20 s.
"""
LOOK_SECONDS: Final = 0.1
MOST_AT_ONCE: Final = 16
Tell = Callable[[str], None]


class Strikes:
    """Carries out the strikes (planned faults) of a plan.

    Each strike has its own thread, so that a lasting strike does not delay the next strike.

    Args:
        cluster: the cluster under test.
        watch: supplies the jobs that train and the running instances.
        tell: receives a line for each strike.
        servers: the two servers and PostgreSQL of a production installation, if the cluster has them.
    """

    def __init__(self, cluster: LocalCluster, watch: Watch, tell: Tell, servers: Servers | None = None) -> None:
        self.done: list[facts.Strike] = []
        self.refused = 0
        self._cluster = cluster
        self._servers = servers
        self._watch = watch
        self._tell = tell
        self._pool = ThreadPoolExecutor(MOST_AT_ONCE)
        self._pending: list[Future[None]] = []
        self._aim = Aim(watch.training_jobs, watch.running)
        self._server = threading.Lock()
        """Lock that a strike holds while it hits a control-plane server or the database."""

    def play(self, lines: Iterable[Line], goes_on: Callable[[], bool]) -> None:
        """Inject the fault of each line of the plan at its time. Stop early when `goes_on` returns False.

        Return after the effect of every fault has been checked. Clear all lasting faults at the end.
        """
        began = time.monotonic()
        for line in lines:
            while (left := began + line.at_seconds - time.monotonic()) > 0 and goes_on():
                threading.Event().wait(min(left, 0.5))
            if not goes_on():
                break
            self._pending.append(self._pool.submit(self._strike, line))
        self._pool.shutdown()
        for pending in self._pending:
            pending.result()
        with suppress(LocalCloudError):
            self._cluster.clear_faults()

    def _strike(self, line: Line) -> None:
        deadline = time.monotonic() + patience_seconds(line)
        while True:
            try:
                getattr(self, f"_{line.kind.replace(' ', '_')}")(line)
            except (LocalCloudError, LookupError, httpx.HTTPError) as error:
                if time.monotonic() > deadline:
                    self.refused += 1
                    self._tell(f"{line.kind}: nobody could be hit: {error}")
                    return
                threading.Event().wait(0.3)
            else:
                return

    # Strikes (injected faults), one method per kind

    def _aimed(self, line: Line) -> list[list[AnyFault]]:
        return [self._aim(fault) for fault in faults(line)]

    def _injected(self, line: Line) -> tuple[float, Effect]:
        """Inject the fault of a plan line that has a single fault. Return the time and the effect of the injection."""
        ((fault,),) = self._aimed(line)
        return time.time(), self._cluster.inject(fault)

    def _ranks(self, line: Line) -> None:
        at, effect = self._injected(line)
        self._note(
            at, "ranks", (effect.target,), effect, self._see_gone(effect.facts["pid"], f"rank {effect.facts['rank']}")
        )

    def _agents(self, line: Line) -> None:
        at, effect = self._injected(line)
        self._note(at, "agents", (effect.target,), effect, self._see_gone(effect.facts["pid"], "agent"))

    def _instances(self, line: Line) -> None:
        self._end("instances", self._aimed(line))

    def _pair(self, line: Line) -> None:
        if len(with_nodes(self._watch.training_jobs(), self._watch.running())) < 2:
            raise LookupError("not two jobs have nodes")
        self._end("instances", self._aimed(line))

    def _groups(self, line: Line) -> None:
        self._end("groups", self._aimed(line))

    def _control_plane(self, line: Line) -> None:
        with self._one_server():
            at, effect = self._injected(line)
            seen = self._see_gone(effect.facts["pid"], "control plane")
            self._note(at, "control plane", (), effect, seen if effect.facts["new_pid"] != effect.facts["pid"] else "")

    @contextmanager
    def _one_server(self) -> Iterator[None]:
        """Hold the lock `_server`, so that at most one server or the database is down at a time.

        At the end, wait until both servers of a production installation are ready.
        """
        if not self._server.acquire(blocking=False):
            raise LookupError("a part of the control plane is away already")
        try:
            yield
            if (servers := self._servers) is not None:
                self._see(lambda: all(map(servers.is_ready, servers.urls)), "both servers are ready")
        finally:
            self._server.release()

    def _freeze(self, line: Line) -> None:
        assert self._servers is not None
        with self._one_server():
            holder, at = self._servers.holder(), time.time()
            with self._servers.frozen(line.server) as process:
                seen = self._see(lambda: process.is_stopped, f"pid {process.pid} is stopped")
                threading.Event().wait(line.lasts_seconds)
            words = f"the {line.server} stood still for {line.lasts_seconds} s; the {holder or 'nobody'} held the fleet"
            self._note(at, "freeze", (), Effect(fault="freeze", target="", did=words), seen)

    def _database(self, line: Line) -> None:
        assert self._servers is not None
        database = self._servers.database
        with self._one_server():
            before, at = database.pid, time.time()
            if database.has_standby and line.pick % 3 == 0:
                database.promote()
                words = "the primary of the database crashed for good, and its standby was promoted"
            else:
                database.restart()
                words = "the primary of the database crashed and started again"
            seen = self._see(lambda: database.pid != before, f"the primary's pid was {before}, is {database.pid}")
            self._note(at, "database", (), Effect(fault="database", target="", did=words), seen)

    def _links(self, line: Line) -> None:
        at, effect = self._injected(line)
        node = effect.target
        before = effect.facts["dropped_to"] + effect.facts["dropped_from"]
        most, deadline = before, time.monotonic() + line.lasts_seconds
        while time.monotonic() < deadline or (most == before and time.monotonic() < deadline + SEE_SECONDS / 2):
            threading.Event().wait(0.3)
            with suppress(LocalCloudError, httpx.HTTPError):
                counters = self._cluster.links().get(node)
                if counters is None:
                    break  # the link ended together with the instance
                most = max(most, counters["dropped_to"] + counters["dropped_from"])
        with suppress(LocalCloudError, httpx.HTTPError):
            # another strike may still keep another link cut
            self._cluster.clear_faults("partition", target=node)
        seen = f"its line has dropped {most - before} packets" if most > before else ""
        if not seen and self._is_gone(node):
            seen = "the instance ended before a packet was lost"
        self._note(at, "links", (node,), effect, seen)

    def _checks(self, line: Line) -> None:
        at, effect = self._injected(line)
        node = effect.target
        seen = self._see(
            lambda: self._watch.impaired.get(node, 0.0) >= at or self._is_gone(node),
            f"DescribeInstanceStatus says impaired of {node}",
        )
        threading.Event().wait(max(0.0, at + line.lasts_seconds - time.time()))
        with suppress(LocalCloudError):
            self._cluster.clear_faults("fail-status")
        self._note(at, "checks", (node,), effect, seen)

    def _throttle(self, line: Line) -> None:
        self._disturb_aws(
            line, "throttle", lambda at: self._watch.throttled_at > at, "the checker's own calls were refused"
        )

    def _stale_view(self, line: Line) -> None:
        words = "an answer of DescribeInstances omitted an instance that runs"
        self._disturb_aws(line, "stale-view", lambda at: self._omits_an_instance(), words)

    def _zone(self, line: Line) -> None:
        words = "DescribeInstances answered the checker that the zone is disrupted"
        self._disturb_aws(line, "zone-disruption", lambda at: self._watch.disrupted_at > at, words)

    def _disturb_aws(self, line: Line, fault: str, is_seen: Callable[[float], bool], words: str) -> None:
        """Inject a lasting fault of AWS's API, check its effect, and clear it at its time."""
        at, effect = self._injected(line)
        seen = self._see(lambda: is_seen(at), words)
        threading.Event().wait(max(0.0, at + line.lasts_seconds - time.time()))
        with suppress(LocalCloudError):
            self._cluster.clear_faults(fault)
        self._note(at, line.kind, (), effect, seen)

    def _omits_an_instance(self) -> bool:
        with suppress(ClientError, BotoCoreError, LocalCloudError, httpx.HTTPError):
            return bool(self._cluster.instances().keys() - self._watch.described())
        return False

    def _end(self, kind: str, groups: list[list[AnyFault]]) -> None:
        """Terminate all given instances within one second.

        Each inner list becomes one recorded strike, for example the terminations of all holders of a shard.
        """
        inits = {node: identify(pid) for node, pid in self._cluster.instances().items()}
        hits, at = [], time.time()
        for group in groups:
            effects = list[Effect]()
            for fault in group:
                with suppress(FaultRefused):  # the instance has already ended
                    effects.append(self._cluster.inject(fault))
            if effects:
                hits.append(effects)
        if not hits:
            raise LookupError("they have ended already")
        for effects in hits:
            hit = tuple(effect.target for effect in effects)

            def are_gone(hit: tuple[str, ...] = hit) -> bool:
                return all(self._is_gone(node) and not _is_alive(inits.get(node)) for node in hit)

            seen = self._see(are_gone, f"EC2 says so of {', '.join(hit)}, and no init of theirs is left")
            did = (
                effects[0]
                if len(effects) == 1
                else Effect(fault="terminate", target="", did=f"{' and '.join(hit)} were terminated from outside")
            )
            self._note(at, kind, hit, did, seen)

    # Checks of the effects of strikes

    def _is_gone(self, node: str) -> bool:
        return self._watch.states.get(node) in GONE or node in self._watch.ended

    def _see_gone(self, pid: int, what: str) -> str:
        """Check that a killed process has ended. A later process with the same pid does not count as alive."""
        killed = identify(pid)
        return self._see(lambda: not _is_alive(killed), f"{what}: pid {pid} is gone")

    def _see(self, is_so: Callable[[], Any], words: str) -> str:
        deadline = time.monotonic() + SEE_SECONDS
        while not is_so():
            if time.monotonic() > deadline:
                return ""
            threading.Event().wait(LOOK_SECONDS)
        return words

    def _note(self, at: float, kind: str, targets: tuple[str, ...], effect: Effect, seen: str) -> None:
        self.done.append(facts.Strike(at=at, kind=kind, targets=targets, did=effect.did, seen=seen))
        self._tell(f"{kind}: {effect.did}; {seen or 'NO EFFECT SEEN'}")


def _is_alive(process: Process | None) -> bool:
    return process is not None and process.is_alive
