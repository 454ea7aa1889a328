"""Tests the benchmark of many nodes: the calls that it times, the values that it reports, and its page."""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.measures import Verdict
from benchmarks.page import render, write
from benchmarks.scale import placement, report, rounds
from benchmarks.scale.leads import LOADS, LeadFigure, lead_figures
from benchmarks.scale.placement import DomainFigure, Known, PlanFigure
from benchmarks.scale.rounds import FLAT, CountedSession, RoundFigure, measure
from everstep.protocol.codec import Message, encode
from everstep.protocol.ids import Generation, NodeId, Rank, RunId
from everstep.protocol.peer_messages import Open
from everstep.protocol.rounds import RoundReport
from tests.unit.benchmarks.machine import MACHINE
from worker.core.tree import ARITY
from worker.replication.tcp import MAX_HANDSHAKE_BYTES, TcpSession

PLAN = PlanFigure(
    nodes=10_000, copies=2, plan_seconds=(0.02, 0.01, 0.03), odds={2: 0.9999, 5000: 1e-9}, odds_seconds=(0.1, 0.2, 0.4)
)
DOMAIN = DomainFigure(
    nodes=10_000,
    copies=2,
    domains=625,
    plan_seconds=(0.05,),
    odds={1: 1.0, 2: 0.99},
    blind_odds={1: 0.0, 2: 0.0},
    odds_seconds=(0.3,),
)
RUN = report.Run(
    machine=MACHINE,
    is_quick=False,
    seconds=30.0,
    plans=(replace(PLAN, nodes=16, plan_seconds=(5.0,), odds={2: 0.9333}), PLAN),
    domains=(DOMAIN,),
    known=(Known(what="16 nodes, 2 copies, 2 lost", found=0.93333, expected=0.9333),),
    rounds=(
        RoundFigure(2, FLAT, 1, 0.2, 0.1, 0.05, 1.0),
        RoundFigure(1024, FLAT, 1, 90.0, 74.0, 73.8, 1023.0),
        RoundFigure(1024, ARITY, 3, 120.0, 13.4, 9.3, 26.2),
    ),
    leads=(LeadFigure(load="no proposal is late", adaptive=0.9, constant={1: 1.0, 2: 0.5, 3: 0.3}),),
)


@pytest.mark.parametrize(("arity", "depth", "most_reports"), [(FLAT, 1, 7.0), (2, 3, 7.0)])
async def test_rounds_are_made_and_charged_to_their_agents(arity: int, depth: int, most_reports: float) -> None:
    row = await measure(8, arity)
    assert (row.agents, row.depth) == (8, depth)
    assert 0 < row.root_ms <= row.path_ms
    assert 1 <= row.root_messages <= most_reports


async def test_words_may_be_as_long_as_behind_a_handshake(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reports of a subtree with 64 agents are longer than a message of a handshake may be.

    The rounds still complete.
    """
    sizes, send = [], CountedSession.send

    async def note(session: CountedSession, *messages: Message) -> None:
        sizes.extend(len(encode(message)) for message in messages)
        await send(session, *messages)

    monkeypatch.setattr(CountedSession, "send", note)
    monkeypatch.setattr(rounds, "MOST_SECONDS", 10.0)
    assert (await measure(129, 2)).root_messages >= 1
    assert max(sizes) > MAX_HANDSHAKE_BYTES


async def test_what_is_sent_in_one_go_is_counted_one_by_one() -> None:
    lines = socket.socketpair()
    for line in lines:
        line.setblocking(False)
    opened = Open(
        run=RunId("r"), generation=Generation(1), kind="round", node_id=NodeId("i-1"), owner_rank=Rank(-1), nonce=b""
    )
    ours, theirs = CountedSession(lines[0], opened, NodeId("i-counted")), TcpSession(lines[1], opened, NodeId("i-1"))
    reports = [RoundReport(generation=Generation(number), nodes=()) for number in (1, 2)]
    try:
        await ours.send(*reports)
        assert [await asyncio.wait_for(theirs.receive(), 10.0) for _ in reports] == reports
        assert CountedSession.reports.pop(NodeId("i-counted")) == 2
    finally:
        ours.close()
        theirs.close()


# -- tests of the placement's measurement


def test_placement_is_timed_call_by_call_and_says_what_the_product_says() -> None:
    plan = placement.plan_figure(16, 2, calls=2)
    assert (len(plan.plan_seconds), len(plan.odds_seconds)) == (2, 2 * len(plan.odds))
    assert {lost: round(odds, 4) for lost, odds in plan.odds.items()} == {2: 0.9333, 3: 0.8, 4: 0.6154, 10: 0.0}
    over_domains = placement.domain_figure(64, 2, calls=2)
    assert (over_domains.domains, len(over_domains.plan_seconds), len(over_domains.odds_seconds)) == (4, 2, 8)
    assert (over_domains.odds[1], over_domains.blind_odds[1]) == (1.0, 0.0)


def test_everything_that_is_known_is_met() -> None:
    known = placement.known_figures()
    assert len(known) == 12
    assert [each.what for each in known if each.falls_short] == []
    assert replace(known[0], found=0.9334).falls_short


# -- tests of the benchmark's page


def test_the_slowest_call_of_the_most_nodes_is_judged() -> None:
    rows = report.rows(RUN)
    assert [(row.value, row.n) for row in rows[:4]] == [(30.0, 3), (50.0, 1), (400.0, 3), (300.0, 1)]
    assert {row.verdict for row in rows} == {Verdict.PASS}, "5 s were for 16 nodes"
    slow = report.rows(replace(RUN, plans=(replace(PLAN, plan_seconds=(0.01, 1.001)),)))
    assert [row.verdict is Verdict.SHORT for row in slow] == [True, *5 * [False]]
    wrong = report.rows(replace(RUN, known=(replace(RUN.known[0], found=0.9),)))
    assert wrong[4].verdict is Verdict.SHORT


def test_a_busy_machine_says_nothing_of_times() -> None:
    busy = replace(
        RUN, machine=replace(MACHINE, load_average=(3.0, 1.0, 1.0)), domains=(replace(DOMAIN, plan_seconds=(2.0,)),)
    )
    *timed, odds, _ = report.rows(busy)
    assert {row.verdict for row in timed} == {Verdict.INCONCLUSIVE}
    assert odds.verdict is Verdict.PASS


def test_the_page_has_flat_beside_tree_and_the_figures_have_all(tmp_path: Path) -> None:
    write(report.PAGE, RUN, tmp_path / "scale.json", tmp_path / "page.md")
    page = (tmp_path / "page.md").read_text()
    assert "| `placement.plan` of 10,000 nodes | 20 | **30** ms | 3 | ≤ 1,000 ms | pass |" in page
    assert "| 16 nodes, 2 copies, 2 lost | 0.9333 | 0.9333 | pass |" in page
    assert "| 2 | 0.10 | 0.20 | 0.05 | 1 | the same |  |  |  | 1 |" in page
    assert "| 1,024 | 74.00 | 90.00 | 73.80 | 1023 | 13.40 | 120.00 | 9.30 | 26 | 3 |" in page
    assert "| 16 | 2 | 5000.00 | 0.9333 |  |  |  |  | 400.00 |" in page
    written = json.loads((tmp_path / "scale.json").read_text())
    assert [len(written[part]) for part in ("known", "plans", "domains", "rounds")] == [1, 2, 1, 3]


def test_a_page_of_few_agents_has_no_tree() -> None:
    assert "tree" not in render(report.PAGE, replace(RUN, rounds=RUN.rounds[:1]))


def test_an_adaptive_lead_that_keeps_too_few_steps_falls_short() -> None:
    assert report.rows(RUN)[-1].verdict is Verdict.PASS
    row = report.rows(replace(RUN, leads=(replace(RUN.leads[0], adaptive=0.8),)))[-1]
    assert (row.value, row.verdict) == (0.8, Verdict.SHORT)


def test_no_constant_lead_suits_every_load_and_the_adaptive_one_does() -> None:
    figures = lead_figures()
    assert len(figures) == len(LOADS)
    for steps in (1, 2, 3):
        assert min(figure.constant[steps] / max(figure.constant.values()) for figure in figures) < report.LEAD_LIMIT
    assert min(figure.ratio for figure in figures) >= report.LEAD_LIMIT
