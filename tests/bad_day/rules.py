"""The rules of a bad day: pure functions of the collected facts. Each returns a sentence per violation.

A *strike* is a fault that the day injected. A *ledger* is the division of a job's or an incident's time: a job's time
into buckets such as `train` and `restore`, an incident's time into phases.

one job per node           no two generations, of one job or of two, make steps on a node at the same time
decided before it ended    an instance ends because of a strike, or after an event records Everstep's decision
evidence                   the ranks of a node that Everstep gave up as silent finished at most two further steps
steady capacity            desired capacity changes direction only after a node is taken out of use or returns to use
bit-identical              every rank's result equals that of an undisturbed run
ledgers                    a job's buckets add up to its wall time, an incident's phases to the interruption;
                           lost steps match the ranks' traces
enough                     enough strikes took effect: of each kind, during recoveries, on two jobs together
lost steps                 their sum is at most three per recovery from memory, plus a checkpoint interval per recovery
                           from S3, or two intervals if the control plane was down shortly before the failure
one server                 two servers do not alternate in changing the fleet, unless a strike hit one of them
caused                     a job has at most as many incidents as strikes hit its nodes or a service that it needs
ettr                       of a long day: not below the bound that follows from the strikes
ended well                 all jobs completed, and the job of higher priority waited for nodes
orphans                    no instance, object or row is left that nothing refers to
well-formed calls          AWS documents the parameters of every call of EC2 and Auto Scaling
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Final

from tests.bad_day.facts import Boundary, Call, Day, Incident, Start, Strike, Violation
from tests.bad_day.plan import AWS_ROUND, SERVER_ROUND

KINDS: Final = ("ranks", "agents", "instances", "groups", "control plane", "links", *AWS_ROUND)
"""Kinds of strikes (injected faults) that must take effect often enough in a day.

With two servers, the kinds in `SERVER_ROUND` must, too. Failed status checks need not: they do harm only if the control
plane lacks a safeguard.
"""
OBEYED: Final = 200
DECIDED: Final = frozenset(
    {"SetDesiredCapacity", "LaunchInstances", "TerminateInstanceInAutoScalingGroup", "CompleteLifecycleAction"}
)
"""Calls that only the server that manages a fleet makes. Any server makes the others, in answer to API requests."""
ENDS_BY_NAME: Final = "TerminateInstanceInAutoScalingGroup"
UNREACHABLE: Final = "node_unreachable"
ENDS_INSTANCES: Final = frozenset({"instances", "groups"})
STRIKES_PER_MINUTE: Final = 4.0
STRIKES_PER_KIND_PER_MINUTE: Final = 0.4
RECOVERIES_HIT_PER_MINUTE: Final = 0.5
CAUSE_REACH_SECONDS: Final = 45.0
"""Longest time from an event such as a lost node until Everstep changes desired capacity because of it.

The limit allows for throttling by AWS.
"""
CONTROL_PLANE_AWAY_SECONDS: Final = 15.0
"""Time after a fault of the control plane or its database during which a due checkpoint may be missing.

In this time, the control plane is down for up to 3 s, starts in up to 5 s, and waits for the reports of its agents.
"""
TAKEOVER_SECONDS: Final = 18.0
"""Time in which a server takes over a fleet from a frozen server.

The lease expires after 9 s. The new server then allows the agents another 9 s to connect to it.
"""
FLAP_SECONDS: Final = 120.0
"""Two opposite changes of desired capacity within this time count as flapping, unless an event explains the second."""
SILENT_STEPS: Final = 2
"""Maximum number of steps that a node's rank may finish after the node counts as silent.

These steps were in progress when the node's link broke. If the rank finishes more steps, Everstep was wrong to give the
node up (docs/design.md#failures).
"""
REPORT_SECONDS: Final = 1.0
"""Longest time between two reports of an agent with the default detection time: a third of the lease."""
MEMORY_STEPS: Final = 3
LEDGER_SECONDS: Final = 2e-6
"""Tolerance for the sum of a ledger's entries: they are exact microseconds, but a sum of floats is not exact."""
COST_SECONDS: Final = {
    "ranks": 4.0,
    "agents": 2.0,
    "instances": 8.0,
    "groups": 20.0,
    "control plane": 2.0,
    "links": 6.0,
    "checks": 1.0,
    "throttle": 1.0,
    "stale view": 4.0,
    "zone": 4.0,
    "freeze": 10.0,
    "database": 6.0,
}
"""Seconds for which one strike (injected fault) may keep a job from training, on average, by the strike's kind.

The times are four times those on a quiet machine with two cores, and twice those on a busy one. The bound for ETTR, the
fraction of time spent on training, follows from them.
"""
MEAN_MINUTES: Final = 5.0
"""Shortest day whose ETTR the rules judge.

A shorter day has too few faults for a mean. It also runs beside other tests, whose load slows the start of ranks.
"""
EVERYWHERE: Final = frozenset({"control plane", "freeze", "database", "zone", "stale view", "throttle"})
"""Kinds of strikes (injected faults) that hit a service which all jobs need, not single nodes."""

_Rule = Callable[[Day], list[str]]


def judge(day: Day) -> list[Violation]:
    """Apply every rule to the facts of a day, and return the violations."""
    return [Violation(rule=name, words=words) for name, rule in RULES.items() for words in rule(day)]


def has_begun(starts: Iterable[Start]) -> bool:
    """Return True if every given job has committed a step. The day injects faults only after that."""
    return all(start.committed_step > 0 for start in starts)


def one_job_per_node(day: Day) -> list[str]:
    lives: dict[str, dict[tuple[str, int, int], tuple[float, float]]] = defaultdict(dict)
    for line in day.boundaries:
        first, last = lives[line.node].get((line.job, line.generation, line.pid), (line.monotonic, line.monotonic))
        lives[line.node][line.job, line.generation, line.pid] = (min(first, line.monotonic), max(last, line.monotonic))
    wrong = []
    for node, of_node in sorted(lives.items()):
        latest: tuple[tuple[str, int, int], float] | None = None
        for who, (first, last) in sorted(of_node.items(), key=lambda item: item[1]):
            if latest is not None and first < latest[1] and who[:2] != latest[0][:2]:
                wrong.append(
                    f"{node} made steps of {_named(who)} {latest[1] - first:.3f} s before those of "
                    f"{_named(latest[0])} were over"
                )
            latest = (who, last) if latest is None or last > latest[1] else latest
    return wrong


def decided_before_it_ended(day: Day) -> list[str]:
    struck = {target for strike in day.strikes if strike.kind in ENDS_INSTANCES for target in strike.targets}
    wrong = []
    for ended in day.ended:
        if ended.instance in struck:
            continue
        asked = [
            call.at
            for call in day.calls
            if call.instance == ended.instance and call.action == ENDS_BY_NAME and call.status == OBEYED
        ]
        decided = [decision.at for decision in day.decisions if decision.instance == ended.instance]
        if not asked:
            wrong.append(f"{ended.instance} ended, and nobody had asked for that by name")
        elif not decided or min(decided) > min(asked):
            wrong.append(
                f"{ended.instance} ended because Everstep asked for it, and no decision that names it came before"
            )
    return wrong


def evidence(day: Day) -> list[str]:
    wrong = []
    steps = {key: sorted(line.at for line in lines) for key, lines in _lines_by_place(day.boundaries).items()}
    ended = {ended.instance: ended.at for ended in day.ended}
    struck = {target: strike.at for strike in day.strikes if strike.kind in ENDS_INSTANCES for target in strike.targets}
    # If a rank was killed after the node's silence began, the kill itself stopped training. Only steps after the kill
    # then prove that the node was alive when Everstep gave it up.
    killed, cuts = _kills_of_ranks(day), _cuts_of_links(day)
    for incident in day.incidents:
        # A node that was part of a failure stays usable if its agent reports again during the recovery.
        silent = [
            node
            for node in incident.faulted
            if incident.cause == UNREACHABLE and not _is_named_for_rank(incident, node)
        ]
        for instance in sorted({*incident.instances, *silent}):
            if ended.get(instance, float("inf")) <= incident.opened_at or struck.get(instance, float("inf")) <= (
                incident.closed_at or float("inf")
            ):
                continue  # the instance ended before or during the recovery
            passed = steps.get((incident.job, incident.generation_before, instance), [])
            stops = [at for at in killed[incident.job, incident.generation_before] if at <= incident.opened_at]
            # A failure's time is that of the node's last report. If a strike cut the link after this report and before
            # the next, the node trained until the cut, so only steps after the cut count.
            stops += [at for at in cuts[instance] if incident.failed_at < at <= incident.failed_at + REPORT_SECONDS]
            since = sum(max([incident.failed_at, *stops]) < at <= incident.opened_at for at in passed)
            if since > SILENT_STEPS:
                wrong.append(
                    f"{incident.id}: {instance} was given up, though it made {since} steps between "
                    f"{incident.cause} and that"
                )
    return wrong


def _is_named_for_rank(incident: Incident, node: str) -> bool:
    """Return True if the evidence names the node only because its ranks ended.

    Ranks also end because another node is lost, so such a node does not count as silent.
    """
    naming = [words for words in incident.evidence if node in words]
    return bool(naming) and all(words.startswith("rank ") and f" on {node} " in words for words in naming)


def _kills_of_ranks(day: Day) -> dict[tuple[str, int], list[float]]:
    """Return the times at which strikes killed ranks, by the job and generation that the struck node trained last."""
    killed = defaultdict[tuple[str, int], list[float]](list)
    for strike in day.strikes:
        if strike.kind == "ranks" and strike.seen:
            before = [line for line in day.boundaries if line.node in strike.targets and line.at <= strike.at]
            if before:
                last = max(before, key=lambda line: line.at)
                killed[last.job, last.generation].append(strike.at)
    return killed


def _cuts_of_links(day: Day) -> dict[str, list[float]]:
    """Return the times at which strikes cut the link of each instance."""
    cuts = defaultdict[str, list[float]](list)
    for strike in day.strikes:
        if strike.kind == "links" and strike.seen:
            for target in strike.targets:
                cuts[target].append(strike.at)
    return cuts


def steady_capacity(day: Day) -> list[str]:
    # A decision to drain a node because the fleet has too many nodes is no excuse for a change of desired capacity.
    decisions = [decision for decision in day.decisions if "surplus" not in decision.words]
    causes = sorted(decision.at for decision in (*decisions, *day.returned))
    moves = _moves(day.calls)
    wrong, used = [], set[int]()
    for (at_before, before), (at, after) in pairwise(moves):
        if before * after > 0 or at - at_before > FLAP_SECONDS:
            continue
        excuse = next(
            (
                number
                for number, cause in enumerate(causes)
                if number not in used and at - CAUSE_REACH_SECONDS <= cause <= at + 1
            ),
            None,
        )
        if excuse is None:
            wrong.append(f"desired capacity went {before:+d} and {at - at_before:.1f} s later {after:+d}, for no cause")
        else:
            used.add(excuse)
    return wrong


def _moves(calls: Iterable[Call]) -> list[tuple[float, int]]:
    """Return the time and the amount of each change of desired capacity that AWS accepted.

    A removal by name and the launch that replaces it soon afterwards cancel each other.
    """
    moves, desired, tokens = list[tuple[float, int]](), 0, set[str]()
    for call in sorted(calls, key=lambda call: call.at):
        if call.status != OBEYED or call.token in tokens:
            continue
        if call.launched:
            tokens.add(call.token)
            count, desired = call.launched, desired + call.launched
            while count and moves and moves[-1][1] == -1 and call.at - moves[-1][0] <= CAUSE_REACH_SECONDS:
                moves.pop()
                count -= 1
            moves += [(call.at, count)] if count else []
            continue
        after = desired - 1 if call.is_decrement else desired if call.desired is None else call.desired
        if after != desired:
            moves.append((call.at, after - desired))
        desired = after
    return moves


def bit_identical(day: Day) -> list[str]:
    wrong = []
    for job in day.jobs:
        if len(job.result) != len(job.undisturbed) or not job.undisturbed:
            wrong.append(
                f"{job.name}: {len(job.result)} ranks left a result, {len(job.undisturbed)} of an undisturbed run"
            )
        for rank, (found, expected) in enumerate(zip(job.result, job.undisturbed, strict=False)):
            if found != expected:
                keys = sorted(key for key in expected if found.get(key) != expected[key])
                wrong.append(f"{job.name}: rank {rank} left other {', '.join(keys)} than an undisturbed run")
    return wrong


def ledgers(day: Day) -> list[str]:
    wrong = []
    for job in day.jobs:
        if job.accounted_until is None:
            wrong.append(f"{job.name} has no ledger")
            continue
        wall = job.accounted_until - job.created_at
        spent = sum(job.accounting_seconds.values())
        if abs(spent - wall) > LEDGER_SECONDS:
            wrong.append(f"{job.name}: the buckets have {spent:.6f} s, the wall time is {wall:.6f} s")
        if job.accounted_until != job.ended_at:
            wrong.append(f"{job.name}: it ended at {job.ended_at}, its ledger at {job.accounted_until}")
    for incident in day.incidents:
        if incident.closed_at is None:
            wrong.append(f"{incident.id} was never closed")
            continue
        length = incident.closed_at - incident.failed_at
        if abs(sum(incident.phase_seconds) - length) > LEDGER_SECONDS:
            wrong.append(
                f"{incident.id}: the phases have {sum(incident.phase_seconds):.6f} s, the interruption took "
                f"{length:.6f} s"
            )
    for incident in day.incidents:
        if incident.from_step is None or incident.generation_after is None:
            continue
        traced = _traced_lost_steps(incident, day.boundaries)
        # The trace of a lost node may lack its rank's last step. A rank may also be stopped between a step and the line
        # in its trace.
        known = _traced_lost_steps(incident, [line for line in day.boundaries if line.node not in incident.instances])
        if incident.lost_steps is None or not known <= incident.lost_steps <= traced + 1:
            wrong.append(
                f"{incident.id}: it says {incident.lost_steps} lost steps, the ranks made {traced} again from "
                f"step {incident.from_step} on"
            )
    return wrong


def enough(day: Day) -> list[str]:
    if not has_begun(day.starts):
        return []  # The day injected no strike, and the rule "ended well" reports the missing start.
    took = [strike for strike in day.strikes if strike.seen]
    if day.is_temptation:
        return [] if took else ["nothing was done"]
    wrong = [f"{strike.did}: no effect was seen" for strike in day.strikes if not strike.seen]
    counts = Counter(strike.kind for strike in took)
    least = int(STRIKES_PER_MINUTE * day.minutes)
    if len(took) < least:
        wrong.append(f"{len(took)} strikes took effect, {least} are a bad day of {day.minutes:g} minutes")
    least = max(1, int(STRIKES_PER_KIND_PER_MINUTE * day.minutes))
    wrong += [
        f"{counts[kind]} strikes of {kind} took effect, not {least}"
        for kind in (*KINDS, *(SERVER_ROUND if day.has_servers else ()))
        if counts[kind] < least and (kind != "links" or day.has_links)
    ]
    inside = sum(_is_in_recovery(strike, day.incidents) for strike in took)
    least = max(1, int(RECOVERIES_HIT_PER_MINUTE * day.minutes))
    if inside < least:
        wrong.append(f"{inside} strikes came during a recovery, not {least}")
    hits = [
        (strike.at, name) for strike in took if strike.kind == "instances" for name in _jobs_on(strike, day.boundaries)
    ]
    if not any(name != other and abs(at - then) < 1 for at, name in hits for then, other in hits):
        wrong.append("no two jobs lost a node in the same second")
    return wrong


def _jobs_on(strike: Strike, lines: Iterable[Boundary]) -> set[str]:
    """Return the jobs that trained on the struck nodes: the jobs whose ranks finished the newest step on each node."""
    latest: dict[str, Boundary] = {}
    for line in lines:
        if (
            line.node in strike.targets
            and line.at <= strike.at
            and (line.node not in latest or line.at > latest[line.node].at)
        ):
            latest[line.node] = line
    return {line.job for line in latest.values()}


def lost_steps(day: Day) -> list[str]:
    wrong = []
    every = {job.name: job.checkpoint_every for job in day.jobs}
    lost = sum(incident.lost_steps or 0 for incident in day.incidents)
    allowed = sum(
        MEMORY_STEPS
        if incident.source in ("local", "peer")
        # The incident names no source if all copies were lost before the first complete checkpoint. The job then starts
        # from step 0 again.
        else every.get(incident.job, 0) * (2 if _has_missed_a_checkpoint(incident, day.strikes) else 1)
        for incident in day.incidents
    )
    if lost > allowed:
        wrong.append(
            f"{lost} steps were made again; three an incident from memory and an interval or two an incident "
            f"from S3 are {allowed}"
        )
    return wrong


def _has_missed_a_checkpoint(incident: Incident, strikes: Iterable[Strike]) -> bool:
    """Return True if a checkpoint may be missing because the control plane was down shortly before the incident.

    Only the control plane starts checkpoints.
    """
    away = {"control plane": 0.0, "freeze": TAKEOVER_SECONDS, "database": 0.0}
    return any(
        0 <= incident.failed_at - strike.at < away[strike.kind] + CONTROL_PLANE_AWAY_SECONDS
        for strike in strikes
        if strike.kind in away
    )


def one_server(day: Day) -> list[str]:
    # A restarted process is another server. A fault of the database can move a lease there and back.
    allowed = sum({"control plane": 1, "freeze": 2, "database": 2}.get(strike.kind, 0) for strike in day.strikes)
    calls = sorted(day.calls, key=lambda call: call.at)
    servers = [call.server for call in calls if call.server and call.action in DECIDED]
    turns = sum(before != after for before, after in pairwise(servers))
    if turns <= allowed:
        return []
    return [
        f"{len(set(servers))} servers changed the fleet in turn, {turns} times; strikes on servers explain {allowed}"
    ]


def caused(day: Day) -> list[str]:
    wrong = []
    trained = defaultdict[str, set[str]](set)
    for line in day.boundaries:
        trained[line.job].add(line.node)
    for job in day.jobs:
        nodes, opened = trained[job.name], 0
        for incident in sorted(day.incidents, key=lambda incident: incident.opened_at):
            if incident.job != job.name:
                continue
            opened += 1
            nodes |= {*incident.instances, *incident.faulted}
            hits = sum(
                1 if strike.kind in EVERYWHERE else len(nodes.intersection(strike.targets))
                for strike in day.strikes
                if strike.at <= incident.opened_at
            )
            if opened > hits:
                wrong.append(f"{incident.id} is incident {opened} of {job.name}, and {hits} strikes came before it")
    return wrong


def ettr(day: Day) -> list[str]:
    if day.minutes < MEAN_MINUTES:
        return []
    seconds = {
        job.name: sum(
            spent
            for name, spent in job.accounting_seconds.items()
            if name not in ("queue", "provision", "paused", "start")
        )
        for job in day.jobs
    }
    trained = sum(job.accounting_seconds.get("train", 0.0) for job in day.jobs)
    wall, bound = sum(seconds.values()), expected_ettr(day.strikes, sum(seconds.values()))
    ratio = trained / wall if wall else 0.0
    return [f"ETTR is {ratio:.3f}; from the strikes follows at least {bound:.3f}"] if ratio < bound else []


def ended_well(day: Day) -> list[str]:
    wrong = [_in_vain(start) for start in day.starts if not has_begun([start])]
    wrong += [
        f"{job.name} ended as {job.status}"
        if job.ended_at is not None
        else f"{job.name} did not end: it was {job.status}"
        for job in day.jobs
        if job.status != "Completed"
    ]
    highest = max((job.priority for job in day.jobs), default=0)
    for job in day.jobs:
        if job.priority == highest and highest > 0 and job.started_at is not None:
            before = [other.ended_at for other in day.jobs if other is not job and other.ended_at is not None]
            if not any(at <= job.started_at for at in before):
                wrong.append(f"{job.name} did not wait for nodes of another job: the fleet was not full")
    return wrong


RULES: Final[dict[str, _Rule]] = {
    "one job per node": one_job_per_node,
    "decided before it ended": decided_before_it_ended,
    "evidence": evidence,
    "steady capacity": steady_capacity,
    "bit-identical": bit_identical,
    "ledgers": ledgers,
    "enough": enough,
    "lost steps": lost_steps,
    "one server": one_server,
    "caused": caused,
    "ettr": ettr,
    "ended well": ended_well,
    "orphans": lambda day: [*day.orphans],
    "well-formed calls": lambda day: [*day.wrong_calls],
}


def expected_ettr(strikes: Iterable[Strike], wall_seconds: float) -> float:
    """Return the lowest ETTR (fraction of wall time spent on training) that the rules accept for these injected faults.

    The bound is 1 − Σ cost of each fault ÷ Σ wall seconds of all jobs, without time in the queue. The cost counts for
    one job only. It does not grow with the duration of the fault, because a node without a link is replaced. Each of
    the three jobs may also spend the cost of one lost instance on its start.
    """
    cost = sum(COST_SECONDS[strike.kind] for strike in strikes) + 3 * COST_SECONDS["instances"]
    return max(0.0, 1.0 - cost / wall_seconds) if wall_seconds else 0.0


def _in_vain(start: Start) -> str:
    had = f"had {start.node_count} nodes and had committed no step" if start.node_count else "had no nodes"
    return (
        f"{start.job} never began: {start.waited_seconds:.0f} s after it was submitted it {had} "
        f"({start.status}, {start.secondary}: {start.reason})"
    )


def _named(who: tuple[str, int, int]) -> str:
    return f"{who[0]}, generation {who[1]}"


def _lines_by_place(lines: Iterable[Boundary]) -> dict[tuple[str, int, str], list[Boundary]]:
    found: dict[tuple[str, int, str], list[Boundary]] = defaultdict(list)
    for line in lines:
        found[line.job, line.generation, line.node].append(line)
    return found


def _traced_lost_steps(incident: Incident, lines: Iterable[Boundary]) -> int:
    """Return how many steps after the restored step the generations of the incident had finished before the recovery.

    Steps of earlier generations belong to earlier incidents.
    """
    assert incident.from_step is not None  # The caller passes only incidents that ended with a recovery.
    assert incident.generation_after is not None
    generations = range(incident.generation_before, incident.generation_after)
    before = [line.step for line in lines if line.job == incident.job and line.generation in generations]
    return max(0, max(before, default=0) - incident.from_step)


def _is_in_recovery(strike: Strike, incidents: Iterable[Incident]) -> bool:
    return any(incident.failed_at + 0.01 < strike.at < (incident.closed_at or strike.at + 1) for incident in incidents)
