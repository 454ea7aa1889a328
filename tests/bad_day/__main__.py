"""Run a bad day and judge it: `python -m tests.bad_day --minutes 10 [--seed N]`.

A bad day is a test run of many minutes in which faults hit a fleet of training jobs. The exit code is 1 if the observed
facts violate a rule.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from pathlib import Path

import msgspec

from infra.local_cloud import fault_script, network
from tests.bad_day import facts, rules
from tests.bad_day.day import DayOptions, spend
from tests.bad_day.plan import plan, script

_began = time.monotonic()


def tell(words: str) -> None:
    """Print a line of progress."""
    print(f"{time.monotonic() - _began:7.1f} s  {words}", flush=True)


def main() -> int:
    """Run a bad day and judge it, or judge the facts that an earlier day stored."""
    parser = argparse.ArgumentParser(prog="python -m tests.bad_day", description=__doc__)
    parser.add_argument("--seed", type=int, help="repeats a day's plan [default: a fresh one, printed]")
    parser.add_argument("--minutes", type=float, default=10.0, help="how long things die")
    parser.add_argument("--nodes-per-job", type=int, default=3, help="two such jobs fill the fleet")
    parser.add_argument("--without", default="", help="switch off: lease, contract, evidence; tempts it, too")
    parser.add_argument(
        "--temptation", default="", help="only what a control plane without this safeguard will not stand"
    )
    parser.add_argument("--standby", action="store_true", help="a second control plane stands by")
    parser.add_argument(
        "--production",
        action="store_true",
        help="Terraform's resources, two servers behind HAProxy, PostgreSQL, SeaweedFS",
    )
    parser.add_argument("--keep", type=Path, help="leave logs and facts in this folder")
    parser.add_argument("--print-plan", action="store_true", help="only print the plan of strikes")
    parser.add_argument(
        "--print-script", action="store_true", help="only print it as a fault script, for `everstep local fault play`"
    )
    parser.add_argument("--judge", type=Path, help="only judge the day.json of a day that was kept")
    given = parser.parse_args()
    if given.judge:
        return _report(msgspec.json.decode(given.judge.read_bytes(), type=facts.Day))
    seed = random.SystemRandom().randrange(1 << 32) if given.seed is None else given.seed
    if given.print_plan or given.print_script:
        lines = plan(
            seed=seed,
            minutes=given.minutes,
            has_links=network.obstacle() is None,
            has_servers=given.production and given.print_plan,
        )
        told = fault_script.encode(script(lines)) if given.print_script else None
        print(
            told.decode() if told is not None else "\n".join(msgspec.json.encode(line).decode() for line in lines),
            end="" if told else "\n",
        )
        return 0
    options = DayOptions(
        seed=seed,
        minutes=given.minutes,
        nodes_per_job=given.nodes_per_job,
        without=given.without,
        temptation=given.temptation or given.without,
        has_standby=given.standby,
        is_production=given.production,
        keeps=given.keep,
    )
    return _report(spend(options, tell))


def _report(day: facts.Day) -> int:
    counts = Counter(strike.kind for strike in day.strikes if strike.seen)
    tell(
        f"{sum(counts.values())} strikes took effect: "
        f"{', '.join(f'{count} {kind}' for kind, count in sorted(counts.items()))}; {day.refused} refused"
    )
    for job in day.jobs:
        incidents = [incident for incident in day.incidents if incident.job == job.name]
        lost = sum(incident.lost_steps or 0 for incident in incidents)
        tell(
            f"{job.name}: {job.status}, {len(incidents)} incidents, {lost} steps lost, ETTR "
            f"{job.ettr if job.ettr is None else round(job.ettr, 3)}"
        )
    wrong = rules.judge(day)
    for violation in wrong:
        tell(f"WRONG, {violation.rule}: {violation.words}")
    tell("nothing was wrong" if not wrong else f"{len(wrong)} things were wrong; seed {day.seed}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
