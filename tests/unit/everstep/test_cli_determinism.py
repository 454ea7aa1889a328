"""`everstep jobs submit --check-determinism` waits for the check, prints its result and exits accordingly."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

from everstep.determinism import REPORT, Finding, Kind, Pattern, RankReport, Source
from everstep.errors import NothingToDownload
from tests.unit.everstep.conftest import Client
from tests.unit.everstep.test_cli import planned

SUBMIT = ("jobs", "submit", "--name", "gpt", "--source-dir", "code", "--entry-point", "train.py", "--node-count", "4")
DIFFERENT = Finding(1, 3, Kind.BATCH, Pattern.EVERY_RUN, Source.COLLATOR, ("data",), ("os.urandom at train.py:7",))
COMPLETED = {
    "TrainingJobName": "gpt",
    "TrainingJobStatus": "Completed",
    "SecondaryStatus": "Completed",
    "Reason": "every rank ended with success",
    "IncidentCount": 0,
    "Generation": 1,
    "Boundary": -1,
}


@pytest.fixture
def check(run, monkeypatch):
    """Submit a check whose ranks have written these reports."""

    def check(*options: str, reports: list[RankReport] | Exception, job: dict | None = None):
        def download_outputs(client: Client, *, Directory: str, **request: str) -> None:
            client.calls.append(("download_outputs", request))
            if isinstance(reports, Exception):
                raise reports
            for report in reports:
                path = Path(Directory) / f"rank={report.rank}" / REPORT
                path.parent.mkdir(parents=True)
                path.write_bytes(msgspec.json.encode(report))

        monkeypatch.setattr(Client, "download_outputs", download_outputs)
        return run(
            *SUBMIT,
            "--check-determinism",
            *options,
            upload_source={"SourceId": "s"},
            create_training_job=planned,
            describe_training_job={**COMPLETED, **(job or {})},
            list_incidents={"Incidents": []},
        )

    return check


def test_a_deterministic_script_ends_with_success(check):
    code, out, _, calls = check("--environment", "A=1", reports=[RankReport(rank, 2, 2, 8) for rank in range(2)])
    assert code == 0
    assert "Steps 3 to 8 are bit-identical after two restarts, on 2 ranks." in out
    (request,) = [request for name, request in calls if name == "create_training_job" and "DryRun" not in request]
    assert request["Environment"] == {"A": "1", "EVERSTEP_CHECK_DETERMINISM": "8"}


def test_a_difference_is_named_with_its_remedy_and_ends_with_failure(check):
    reports = [RankReport(0, 2, 2, 8), RankReport(1, 2, 2, 8, DIFFERENT)]
    code, out, _, calls = check("--check-steps", "20", reports=reports)
    assert code == 1
    assert "collator" in out
    assert "Step 3, rank 1: equal samples became another batch in `collate_fn` (data)." in out
    assert "os.urandom at train.py:7" in out
    assert "docs/resume.md#collator" in out
    (request,) = [request for name, request in calls if name == "create_training_job" and "DryRun" not in request]
    assert request["Environment"] == {"EVERSTEP_CHECK_DETERMINISM": "20"}


def test_json_contains_the_report_of_each_rank(check):
    reports = [RankReport(0, 2, 2, 8), RankReport(1, 2, 2, 8, DIFFERENT)]
    code, out, _, _ = check("--output", "json", reports=reports)
    body = json.loads(out)
    assert (code, body["is_deterministic"], body["source"]) == (1, False, "collator")
    assert [rank["finding"] is None for rank in body["ranks"]] == [True, False]


def test_a_missing_report_is_no_success(check):
    code, out, _, _ = check(reports=[RankReport(0, 2, 2, 8)])
    assert code == 1
    assert "Ranks without a report: 1." in out


def test_a_script_without_a_session_has_no_result(check):
    code, _, err, _ = check(reports=NothingToDownload("no outputs"))
    assert code == 1
    assert "gpt has no result, because no rank wrote a report." in err
    assert "everstep.training.init()" in err


def test_a_failed_job_has_no_result(check):
    job = {"TrainingJobStatus": "Failed", "Reason": "rank 0 exited with code 1"}
    code, _, err, calls = check(reports=[RankReport(0, 1, 2, 8)], job=job)
    assert code == 1
    assert "gpt is Failed: rank 0 exited with code 1" in err
    assert "download_outputs" not in [name for name, _ in calls]


def test_a_number_of_steps_without_a_check_is_refused(run):
    code, _, err, calls = run(*SUBMIT, "--check-steps", "8")
    assert (code, calls) == (2, [])
    assert "--check-steps belongs to --check-determinism." in err


def test_a_dry_run_of_a_check_starts_nothing(run):
    options = ("--check-determinism", "--dry-run")
    code, out, _, calls = run(*SUBMIT, *options, upload_source={"SourceId": "s"}, create_training_job=planned)
    assert code == 0
    assert [name for name, _ in calls] == ["upload_source", "create_training_job"]
    assert "fleet" in out
