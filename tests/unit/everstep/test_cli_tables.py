"""Tests how commands fit tables to the terminal, form plurals, and show progress."""

from __future__ import annotations

from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.cells import cell_len

from everstep.cli import steps, tables
from everstep.cli.output import counted, duration
from everstep.cli.progress import line_of
from everstep.cli.tables import Detail, Prose
from tests.unit.everstep.test_cli import INCIDENT, JOB

COLUMNS: tables.Columns = {"NAME": "name", "AGE": Detail("age"), "ZONE": Detail("zone"), "REASON": Prose("reason")}
PRINTED = st.characters(categories=["L", "N", "P", "S", "Zs"])
ROW = {
    "name": "i-0123456789abcdef0",
    "age": "12 min 05 s",
    "zone": "us-east-1a",
    "reason": "The agent of this node\nis silent. " * 4,
}


def printed(width: int | None, *rows: dict, columns: tables.Columns = COLUMNS) -> list[str]:
    return [line.plain for line in tables.lines(tables.cells_of(rows, columns), columns, width)]


def test_without_a_terminal_nothing_is_cut():
    heading, line = printed(None, ROW)
    assert heading.split() == ["NAME", "AGE", "ZONE", "REASON"]
    assert line.endswith("The agent of this node is silent.")


def test_a_narrow_terminal_cuts_sentences_first_and_leaves_out_details_next():
    assert [len(line) for line in printed(80, ROW)][1] == 80
    assert printed(80, ROW)[0].split() == ["NAME", "AGE", "ZONE", "REASON"]
    assert printed(60, ROW)[0].split() == ["NAME", "AGE", "REASON"]
    assert printed(45, ROW)[0].split() == ["NAME", "REASON"]
    assert printed(45, ROW)[1] == "i-0123456789abcdef0  The agent of this node …"


@given(
    rows=st.lists(
        st.fixed_dictionaries({name: st.text(PRINTED, max_size=40) for name in ("name", "age", "zone", "reason")}),
        min_size=1,
        max_size=4,
    ),
    width=st.integers(10, 200),
)
def test_every_row_is_one_line_and_names_are_never_cut(rows, width):
    lines = tables.lines(tables.cells_of(rows, COLUMNS), COLUMNS, width)
    assert len(lines) == len(rows) + 1
    names = [" ".join(row["name"].split("\n")) for row in rows]
    longest = max(cell_len("NAME"), *map(cell_len, names))
    assert all(line.cell_len <= max(width, longest + len(tables.GAP) + 1) for line in lines)
    assert all(line.plain.startswith(name.rstrip()) for line, name in zip(lines[1:], names, strict=True))


@pytest.mark.parametrize(
    ("arguments", "answers", "whole"),
    [
        (
            ("jobs", "list"),
            {"list_training_jobs": {"TrainingJobSummaries": [{**JOB, "TargetStep": 10_000, "Reason": "long " * 60}]}},
            ["gpt", "200/10000"],
        ),
        (
            ("incidents", "list"),
            {"list_incidents": {"Incidents": [{**INCIDENT, "IncidentId": f"inc-{'0' * 12}-3"}]}},
            [f"inc-{'0' * 12}-3"],
        ),
        (
            ("nodes", "list"),
            {
                "list_nodes": {
                    "Nodes": [
                        {
                            "NodeId": "i-0123456789abcdef0",
                            "FleetName": "main",
                            "NodeStatus": "Active",
                            "Warm": True,
                            "Connected": True,
                            "Address": "10.0.0.1",
                            "InstanceType": "c7i.2xlarge",
                            "CreationTime": datetime.fromisoformat("2026-03-01T12:00:00Z"),
                            "Reason": "long\nreason " * 30,
                        }
                    ]
                }
            },
            ["i-0123456789abcdef0"],
        ),
    ],
)
def test_lists_fit_80_columns_and_print_ids_whole(run, monkeypatch, arguments, answers, whole):
    setenv = monkeypatch.setenv
    monkeypatch.setattr(monkeypatch, "setenv", lambda name, value: setenv(name, "80" if name == "COLUMNS" else value))
    code, out, _, _ = run(*arguments, **answers)
    lines = out.splitlines()
    assert code == 0
    assert len(lines) == 2, "a row is one line"
    assert max(map(len, lines)) <= 80
    assert [word for word in whole if word not in lines[1].split()] == []


@pytest.mark.parametrize(
    ("count", "words"), [(0, "0 incidents"), (1, "1 incident"), (2, "2 incidents"), (1200, "1,200 incidents")]
)
def test_nouns_agree_with_their_number(count, words):
    assert counted(count, "incident") == words


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-1, "0 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (725, "12 min 05 s"),
        (12_000, "3 h 20 min"),
        (187_200, "2 d 4 h"),
    ],
)
def test_durations_read_as_people_say_them(seconds, words):
    assert duration(seconds) == words


def test_progress_names_target_percentage_and_remaining_time():
    job = {**JOB, "Boundary": 4895, "TargetStep": 10_000, "EstimatedRemainingSeconds": 725.0}
    assert steps.reached(job) == "4895/10000"
    assert steps.words(job) == "step 4895 of 10000 █████████░░░░░░░░░░░ 48 %, about 12 min 05 s left"


@pytest.mark.parametrize(
    ("boundary", "shown"), [(-1, "░" * 20 + " 0 %"), (9_999, "█" * 19 + "░ 99 %"), (10_000, "█" * 20 + " 100 %")]
)
def test_a_bar_is_full_only_at_the_target(boundary, shown):
    assert steps.bar({**JOB, "Boundary": boundary, "TargetStep": 10_000}) == shown


def test_a_script_without_a_target_has_no_bar():
    assert (steps.words(JOB), steps.bar(JOB), steps.remaining(JOB)) == ("step 200", "", None)


def test_wait_and_describe_show_target_bar_and_remaining_time(run):
    job = {**JOB, "SecondaryStatus": "Stopping", "TargetStep": 400, "EstimatedRemainingSeconds": 60.0}
    shown = "of 400 ██████████░░░░░░░░░░ 50 %, about 1 min 00 s left"
    code, out, _, _ = run("jobs", "describe", "gpt", describe_training_job=job, list_incidents={"Incidents": []})
    assert (code, shown in out, shown in line_of(job)) == (0, True, True)


def test_the_version_is_printed(run):
    assert run("--version")[:2] == (0, "everstep 0.1.0, protocol version 1\n")


def test_a_file_in_the_place_of_a_directory_is_an_error_without_a_traceback(run, tmp_path):
    target = tmp_path / "results"
    target.write_text("")
    code, _, err, calls = run("jobs", "output", "gpt", "--to", str(target))
    assert (code, calls) == (2, [])
    assert f"error: {target} is a file." in err
    assert "hint: Pass a directory" in err


def test_whatever_the_operating_system_refuses_is_an_error_without_a_traceback(run, tmp_path):
    outputs = {"Outputs": [{"Generation": 1, "Key": "k", "Path": "rank=0/a", "Bytes": 0}]}
    (tmp_path / "rank=0").write_text("")  # this file has the name of the directory that the command must create
    code, _, err, _ = run("jobs", "output", "gpt", "--to", str(tmp_path), list_outputs=outputs)
    assert code == 1
    assert err.startswith(f"error: 1 of 1 files are not in {tmp_path}: rank=0/a: ")
