"""Tests the command line with a fake client that answers from a table."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace

import pytest

from everstep.aws_models import DATA
from everstep.cli import confirm, programs, submission
from everstep.cli import main as cli
from everstep.cli.progress import incident_line, line_of
from everstep.cli.waiting import UNANSWERED_SECONDS, ended
from everstep.errors import ConfigurationError, FieldError, ServiceFailed, SourceRefused, WaitFailed, WaitTimedOut
from everstep.protocol.ids import NAME_PATTERN
from tests.unit.everstep.conftest import Client

PROVEN = {"Verdict": "Proven", "Step": 20, "Steps": 5, "Seconds": 12.25}
DIFFERENCE = {"Rank": 3, "Message": "the loss differs.", "Advice": "Register it."}
JOB = {
    "TrainingJobName": "gpt",
    "RunId": "r" * 32,
    "FleetName": "main",
    "Project": "default",
    "TrainingJobStatus": "Completed",
    "SecondaryStatus": "Completed",
    "SecondaryStatusTransitions": [
        {
            "Status": "Pending",
            "State": "queued",
            "StartTime": datetime.fromisoformat("2026-03-01T12:00:00Z"),
            "StatusMessage": "Waiting [its] turn.",
        }
    ],
    "Reason": "All ranks exited with success.",
    "EntryPoint": "train.py",
    "HyperParameters": {"steps": "200"},
    "NodeCount": 4,
    "RanksPerNode": 1,
    "Protection": {"Copies": 2},
    "CheckpointConfig": {"EverySteps": 100, "S3Uri": "s3://b/c/", "ThirdSlot": False},
    "CheckpointActivity": {
        "Policy": "every 100 steps and when the job stops",
        "NextStep": 300,
        "NextTime": datetime.fromisoformat("2026-03-01T12:05:00Z"),
        "LastUploadSeconds": 8.25,
        "LastUploadCostSeconds": 0.5,
        "Upload": {
            "Step": 200,
            "StoredBytes": 61,
            "TotalBytes": 100,
            "SlowestRank": 3,
            "SlowestStoredBytes": 3 * 2**29,
            "SlowestTotalBytes": 2**31,
        },
    },
    "OutputDataConfig": {"S3OutputPath": "s3://b/o/"},
    "StoppingCondition": {},
    "CreationTime": datetime.fromisoformat("2026-03-01T12:00:00Z"),
    "TrainingStartTime": datetime.fromisoformat("2026-03-01T12:00:10Z"),
    "TrainingEndTime": datetime.fromisoformat("2026-03-01T12:05:00Z"),
    "Generation": 3,
    "BaseStep": 120,
    "CommittedStep": 199,
    "Boundary": 200,
    "MaxBoundary": 200,
    "NodeIds": ["i-1", "i-2"],
    "CoordinatorNodeId": "i-1",
    "IncidentCount": 1,
    "AccountingSeconds": {"train": 100.0, "queue": 0.0},
    "Reliability": {
        "EttrRatio": 0.75,
        "EttrWithQueueRatio": 0.5,
        "MttfSeconds": 50.0,
        "MttrSeconds": 4.0,
        "LostSteps": 3,
        "IncidentCostUsd": 1.5,
    },
    "QueuedBehind": [],
    "NodeSeconds": 7200.0,
    "CostUsd": 20.0,
    "Priority": 0,
}
INCIDENT = {
    "IncidentId": "inc-1",
    "TrainingJobName": "gpt",
    "Cause": "instance_terminated",
    "Phase": "closed",
    "Evidence": ["EC2 reports i-1 as terminated"],
    "Decision": "a spare takes over",
    "Reason": "the node is gone",
    "RestoreSource": "peer",
    "FromStep": 120,
    "ReachedStep": 121,
    "LostSteps": 1,
    "GenerationBefore": 2,
    "GenerationAfter": 3,
    "InstanceIds": ["i-1"],
    "FaultedInstanceIds": ["i-1"],
    "ReplacementInstanceIds": ["i-5"],
    "FailedAt": datetime.fromisoformat("2026-03-01T12:01:00Z"),
    "OpenedAt": datetime.fromisoformat("2026-03-01T12:01:01Z"),
    "RestoredAt": datetime.fromisoformat("2026-03-01T12:01:04Z"),
    "ClosedAt": datetime.fromisoformat("2026-03-01T12:01:05Z"),
    "DetectSeconds": 1.0,
    "ReplaceSeconds": 0.5,
    "RestoreSeconds": 2.0,
    "ReworkSeconds": 0.5,
    "CostUsd": 0.0125,
    "RankSources": [
        {"Source": "local", "FirstRank": 0, "LastRank": 2},
        {"Source": "peer", "FirstRank": 3, "LastRank": 3},
    ],
}
PROTECTION = {
    "TrainingJobName": "gpt",
    "Generation": 3,
    "CommittedStep": 9,
    "ProposedStep": 10,
    "Boundary": 10,
    "CommittedAt": datetime.fromisoformat("2026-03-01T12:01:05Z"),
    "Copies": 2,
    "ProtectionState": "Degraded",
    "Reason": "rank 0 has 1.",
    "RecoveryOdds": [{"LostNodes": 1, "Probability": 0.5}],
    "Shards": [
        {
            "Rank": 0,
            "OwnerNodeId": "i-1",
            "CommittedStep": 9,
            "Bytes": 2048,
            "Holders": [{"NodeId": "i-1", "InView": True}, {"NodeId": "i-2", "InView": False}],
            "Reason": "silent",
        }
    ],
}


def body(content: bytes) -> dict:
    return {"Body": SimpleNamespace(iter_chunks=lambda *_: iter([content[:2], content[2:]]))}


PLAN = {
    "FleetName": "main",
    "NodeCount": 4,
    "RanksPerNode": 1,
    "WorldSize": 4,
    "Copies": 2,
    "SlotsPerNode": 4,
    "NodeMemoryBytes": 4 * 2**30,
    "LargestShardBytes": 2**30,
    "RecoveryOdds": [{"LostNodes": 1, "Probability": 1.0}, {"LostNodes": 2, "Probability": 2 / 3}],
    "CanStartNow": False,
    "QueuePosition": 2,
    "QueuedBehind": ["big"],
    "WaitsFor": "place 2 of 2 in the queue, behind big",
    "FreeNodeCount": 0,
    "NodesToLaunch": 0,
    "CostUsdPerHour": 393.28,
    "ExpectedMttfSeconds": 7200.0,
    "ExpectedRecoverySeconds": 147.0,
    "ExpectedEttrRatio": 0.98,
}


def planned(**request):
    """Return a dry run's answer to CreateTrainingJob."""
    made = {"TrainingJobName": request["TrainingJobName"]}
    return {**made, "Plan": PLAN} if request.get("DryRun") else {**made, "RunId": "r"}


SUBMIT = ("jobs", "submit", "--name", "gpt", "--source-dir", "code", "--entry-point", "train.py", "--node-count", "4")


def test_submit_as_the_readme_says(run):
    code, out, err, calls = run(
        *SUBMIT,
        *(
            "--ranks-per-node",
            "1",
            "--copies",
            "2",
            "--checkpoint-every-steps",
            "100",
            "--hyperparameter",
            "steps=200",
            "--hyperparameter",
            "seed=7",
        ),
        *("--checkpoint-max-count", "5", "--checkpoint-max-age-seconds", "3600"),
        *("--environment", "A=b=c", "--fleet", "main", "--priority", "3", "--tag", "team=x", "--max-slowdown", "0.05"),
        upload_source={"SourceId": "s"},
        create_training_job=planned,
    )
    assert code == 0
    assert out.splitlines()[-1] == "submitted gpt: 4 nodes × 1 rank"
    assert "everstep jobs wait gpt" in err
    (_, dry), (_, request) = calls[1:]
    assert dry == {**request, "DryRun": True}
    assert request["CheckpointConfig"] == {
        "EverySteps": 100,
        "MaxCount": 5,
        "MaxAgeInSeconds": 3600,
    }
    assert request["HyperParameters"] == {"steps": "200", "seed": "7"}
    assert (request["Environment"], request["Protection"], request["FleetName"], request["Priority"]) == (
        {"A": "b=c"},
        {"Copies": 2, "MaxSlowdown": 0.05},
        "main",
        3,
    )
    assert (request["CheckpointConfig"]["EverySteps"], request["Tags"], request["Source"]) == (
        100,
        {"team": "x"},
        {"SourceId": "s"},
    )


def test_submit_leaves_out_what_is_not_said(run):
    _, _, _, calls = run(*SUBMIT, upload_source={"SourceId": "s"}, create_training_job=planned)
    assert calls[-1][1].keys() == {"TrainingJobName", "Source", "EntryPoint", "NodeCount"}


def test_the_plan_is_shown_before_anything_is_started(run):
    code, out, err, calls = run(*SUBMIT, upload_source={"SourceId": "s"}, create_training_job=planned)
    assert code == 0
    assert "2 lost: 66.6667%" in out
    assert "later; it waits for place 2 of 2 in the queue, behind big" in out
    assert "$393.28 an hour" in out
    assert "98.00%: one failure per 2.0 hours, recovered in 2.5 minutes" in out
    assert "at most 1.0 GiB, each node has 4.0 GiB" in out
    code, out, err, calls = run(*SUBMIT, "--dry-run", upload_source={"SourceId": "s"}, create_training_job=planned)
    assert (code, [request.get("DryRun") for name, request in calls if name == "create_training_job"]) == (0, [True])
    assert "nothing was started" in err
    assert "submitted" not in out


def test_an_elastic_job_is_submitted_with_its_numbers_of_nodes_and_the_plan_shows_them(run):
    words = "may start and continue on 3 of 4 nodes after 30 s without capacity"
    elastic = ("--min-node-count", "3", "--max-node-count", "6", "--patience-seconds", "30")
    answer = {"TrainingJobName": "gpt", "RunId": "r", "Plan": {**PLAN, "Elasticity": words}}
    code, out, _, calls = run(*SUBMIT, *elastic, upload_source={"SourceId": "s"}, create_training_job=answer)
    assert code == 0
    assert calls[-1][1]["ElasticConfig"] == {"MinNodeCount": 3, "MaxNodeCount": 6, "PatienceInSeconds": 30}
    assert words in " ".join(out.split())


def test_a_job_with_parity_is_submitted_and_the_plan_shows_its_memory_beside_that_of_copies(run):
    parity = {"Copies": 1, "ParityGroupSize": 4, "MemoryRatio": 8 / 3, "CopiesMemoryRatio": 4.0}
    answer = {"TrainingJobName": "gpt", "RunId": "r", "Plan": {**PLAN, **parity}}
    options = (*SUBMIT, "--parity-group-size", "4")
    code, out, _, calls = run(*options, upload_source={"SourceId": "s"}, create_training_job=answer)
    assert code == 0
    assert calls[-1][1]["Protection"] == {"ParityGroupSize": 4}
    shown = " ".join(out.split())
    assert "parity: in each group of 4 nodes, one node can fail without the loss of a step" in shown
    assert "2.67 × the state of its ranks (two copies: 4.00 ×): at most 1.0 GiB" in shown


def test_a_plan_may_know_little(run):
    least_plan = {"TrainingJobName": "gpt", "Plan": least("TrainingJobPlan")}
    code, _, err, _ = run(*SUBMIT, upload_source={"SourceId": "s"}, create_training_job=least_plan)
    assert (code, "Traceback" in err) == (0, False)


def test_a_plan_that_is_refused_starts_nothing(run):
    refused = ServiceFailed("NodeCount: 9 nodes.", code="ValidationException")
    code, out, _, calls = run(*SUBMIT, upload_source={"SourceId": "s"}, create_training_job=refused)
    assert (code, out, len(calls)) == (2, "", 2)


def test_programs_get_the_services_own_answer(run):
    _, out, _, calls = run(
        *SUBMIT, "--output", "json", upload_source={"SourceId": "s"}, create_training_job={"RunId": "r"}
    )
    assert (json.loads(out), len(calls)) == ({"RunId": "r"}, 2)
    _, out, _, _ = run(*SUBMIT, "--dry-run", "-o", "json", upload_source={"SourceId": "s"}, create_training_job=planned)
    assert json.loads(out)["Plan"] == PLAN


def test_a_file_says_what_the_api_says_and_options_win(run, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(
        "TrainingJobName: from-file\nEntryPoint: train.py\nNodeCount: 2\nSource: {Directory: code}\n"
        "HyperParameters: {lr: 1e-3, steps: 200, on: yes}\nCheckpointConfig: {EverySteps: 10, ThirdSlot: true}\n"
    )
    options = (
        "--set",
        "NodeCount=3",
        "--set",
        "CheckpointConfig.EverySteps=20",
        "--set",
        "HyperParameters.a.b=0.10",
        "--priority",
        "7",
        "--max-uploads-in-flight",
        "2",
    )
    _, _, _, calls = run(
        "jobs", "submit", "-f", str(file), *options, upload_source={"SourceId": "s"}, create_training_job=planned
    )
    assert calls[0] == ("upload_source", {"Directory": str(tmp_path / "code")})
    assert calls[-1][1] == {
        "TrainingJobName": "from-file",
        "EntryPoint": "train.py",
        "NodeCount": 3,
        "Source": {"SourceId": "s"},
        "HyperParameters": {"lr": "1e-3", "steps": "200", "on": "yes", "a.b": "0.10"},
        "CheckpointConfig": {"EverySteps": 20, "ThirdSlot": True, "MaxUploadsInFlight": 2},
        "Priority": 7,
    }


@pytest.mark.parametrize(
    ("words", "program", "arguments"),
    [
        (
            ["python", "train.py", "--fp16", "data/", "lr=1e-4", "-1"],
            {"EntryPoint": "train.py"},
            ["--fp16", "data/", "lr=1e-4", "-1"],
        ),
        (["/usr/bin/python3.11", "-u", "src/train.py"], {"EntryPoint": "src/train.py"}, []),
        (["train.py", "--", "--name", "a b"], {"EntryPoint": "train.py"}, ["--", "--name", "a b"]),
        (["python3", "-m", "package.train", "-m", "x"], {"Module": "package.train"}, ["-m", "x"]),
    ],
)
def test_submit_takes_a_command_line_as_it_is(run, words, program, arguments):
    source = ("jobs", "submit", "--name", "gpt", "--source-dir", "code", "--node-count", "1")
    code, _, err, calls = run(*source, "--", *words, upload_source={"SourceId": "s"}, create_training_job=planned)
    assert code == 0, err
    request = calls[-1][1]
    assert {name: request[name] for name in ("EntryPoint", "Module") if name in request} == program
    assert request["Arguments"] == arguments


def test_submit_keeps_files_by_pattern(run):
    words = ("jobs", "submit", "--source-dir", "code", "--entry-point", "train.py", "--node-count", "1")
    for kept in (("--keep", "runs/*,*.pt"), ("--keep", "runs/*", "--keep", "*.pt")):
        code, _, err, calls = run(*words, *kept, upload_source={"SourceId": "s"}, create_training_job=planned)
        assert code == 0, err
        assert calls[-1][1]["OutputDataConfig"] == {"Keep": ["runs/*", "*.pt"]}


@pytest.mark.parametrize(
    "words",
    [
        ["torchrun", "train.py"],
        ["python", "-m", "torch.distributed.run", "train.py"],
        ["accelerate", "launch"],
        ["python", "-m"],
        ["python", "-c", "pass"],
    ],
)
def test_submit_refuses_a_launcher(run, words):
    code, _, err, calls = run("jobs", "submit", "--source-dir", "code", "--", *words)
    assert code == 2
    assert "is neither a Python file nor a module of yours" in err
    assert not calls


def test_submit_names_what_it_does_not_upload(run, tmp_path):
    """The user sees what .gitignore excludes, because the script may read one of these files."""
    source = ("jobs", "submit", "--source-dir", "code", "--entry-point", "train.py", "--node-count", "1")
    for name in ("train.py", ".env", "data/x.bin"):
        (tmp_path / "code" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "code" / name).write_text("12")
    (tmp_path / "code" / ".gitignore").write_text("# mine\ndata/\n")
    code, _, err, _ = run(*source, upload_source={"SourceId": "s"}, create_training_job=planned)
    assert code == 0, err
    assert "left out: .env (may contain secrets), data/ (.gitignore: data/)." in err
    code, out, err, calls = run(*source, "--list-source")
    assert (code, calls) == (0, []), err
    assert re.search(r"^train\.py +2 B$", out, re.MULTILINE)
    assert re.search(r"^data/ +\.gitignore: data/$", out, re.MULTILINE)
    code, out, _, _ = run(*source, "--list-source", "--output", "json")
    assert {"Path": ".env", "Reason": "may contain secrets"} in json.loads(out)["LeftOut"]
    code, _, err, _ = run("jobs", "submit", "--list-source")
    assert (code, "needs --source-dir" in err) == (2, True)


@pytest.mark.parametrize(("written", "mode"), [("On", "On"), ("Off", "Off"), ("Auto", "Auto")])
def test_submit_accepts_the_documented_mode_of_rehearsals(run, tmp_path, written, mode):
    words = ("jobs", "submit", "--source-dir", "code", "--entry-point", "train.py", "--node-count", "1")
    (tmp_path / "job.yaml").write_text(f"Rehearsal: {{Mode: {written}, AtStep: 3}}\n")
    for options, more in ((("--set", f"Rehearsal.Mode={written}"), {}), (("--file", "job.yaml"), {"AtStep": 3})):
        code, _, err, calls = run(*words, *options, upload_source={"SourceId": "s"}, create_training_job=planned)
        assert code == 0, err
        assert calls[-1][1]["Rehearsal"] == {"Mode": mode, **more}


def test_submit_names_options_that_everstep_refuses(run, tmp_path):
    (tmp_path / "code" / "train.py").write_text("import everstep.training\nTrainingArguments(ignore_data_skip=True)\n")
    words = ("jobs", "submit", "--source-dir", "code", "--entry-point", "train.py", "--node-count", "1")
    options = ("--hyperparameter", "auto_find_batch_size=true")
    code, _, err, calls = run(*words, *options, upload_source={"SourceId": "s"}, create_training_job=planned)
    assert code == 0, err
    assert "train.py:2: Everstep refuses ignore_data_skip when training begins: a resumed run would repeat" in err
    assert "arguments: Everstep refuses auto_find_batch_size when training begins: " in err
    assert [name for name, _ in calls][-1] == "create_training_job", "a warning stops nothing"


def series(name: str, *values: float) -> dict:
    steps = list(range(len(values)))
    return {"MetricName": name, "Steps": steps, "LastSteps": steps, "Means": list(values), "LastValues": list(values)}


def test_metrics_shows_the_newest_value_and_a_plot(run):
    found = [
        series("loss", 4.0, 2.5, float("nan"), 0.5),
        series("lr", 1e-4, 1e-4),
        series("wide", -1.7e308, 1.7e308),
        series("everstep/blocked_seconds", 0.1),
        series("empty"),
    ]
    code, out, err, calls = run("jobs", "metrics", "gpt", get_metric_data={"MetricDataResults": found})
    assert code == 0, err
    rows = [line.split() for line in out.splitlines()[1:]]
    assert rows == [["loss", "3", "0.5", "█▅×▁"], ["lr", "1", "0.0001", "▁▁"], ["wide", "1", "1.7e+308", "▁█"]]
    own = ("--metric", "everstep/blocked_seconds")
    code, out, _, calls = run("jobs", "metrics", "gpt", *own, get_metric_data={"MetricDataResults": found[3:4]})
    assert ("everstep/blocked_seconds" in out, calls[0][1]["MetricName"]) == (True, own[1])
    _, _, err, _ = run("jobs", "metrics", "gpt", get_metric_data={"MetricDataResults": []})
    assert "has logged no values yet" in err


JSON_JOB = """{
\t"TrainingJobName": "from-json", "EntryPoint": "train.py", "NodeCount": 2, "Source": {"Directory": "code"},
\t"HyperParameters": {"lr": 1e-3, "steps": 200, "on": true, "text": "0.10"}, "Protection": {"MaxSlowdown": 1e-2}
}"""


MERGED = """x-defaults: &common {lr: 1e-4, seed: 7, on: yes}
.base: &base {EntryPoint: train.py, NodeCount: 1}
<<: *base
TrainingJobName: a
HyperParameters: {<<: *common, seed: 8}
Tags: {<<: [*common], team: 1_000}
Environment: {}
"""


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_job_file_may_merge_values_and_come_from_another_system(tmp_path, ends, mark):
    (tmp_path / "job.yaml").write_text(mark + MERGED, encoding="utf-8", newline=ends)
    assert submission.from_file(tmp_path / "job.yaml") == {
        "EntryPoint": "train.py",
        "NodeCount": 1,
        "TrainingJobName": "a",
        "HyperParameters": {"lr": "1e-4", "seed": "8", "on": "yes"},
        "Tags": {"lr": "1e-4", "seed": "7", "on": "yes", "team": "1_000"},
        "Environment": {},
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("NodeCount: 1\nTags: {}\nNodeCount: 2\n", "sets NodeCount twice, in lines 1 and 3"),
        ("Tags:\n  a: 1\n  b: [{c: 1,\n c: 2}]\n", "sets c twice, in lines 3 and 4"),
        ('{"NodeCount": 1,\n "Tags": {"a": 1,\n  "a": 2}}', "sets a twice, in lines 2 and 3"),
    ],
)
def test_a_job_file_that_sets_a_name_twice_is_refused_with_both_lines(tmp_path, text, message):
    (tmp_path / "job").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        submission.from_file(tmp_path / "job")


@pytest.mark.parametrize("is_piped", [False, True])
def test_a_file_may_be_json_as_programs_write_it_and_come_through_a_pipe(run, tmp_path, monkeypatch, is_piped):
    (tmp_path / "job.json").write_text(JSON_JOB)
    monkeypatch.setattr("sys.stdin", io.StringIO(JSON_JOB))
    monkeypatch.chdir(tmp_path)
    file = "-" if is_piped else "job.json"
    options = ("--set", "Protection.MaxSlowdown=2e-2")
    code, _, _, calls = run(
        "jobs", "submit", "-f", file, *options, upload_source={"SourceId": "s"}, create_training_job=planned
    )
    assert (code, calls[0]) == (0, ("upload_source", {"Directory": "code"}))
    assert calls[-1][1] == {
        "TrainingJobName": "from-json",
        "EntryPoint": "train.py",
        "NodeCount": 2,
        "Source": {"SourceId": "s"},
        "HyperParameters": {"lr": "1e-3", "steps": "200", "on": "true", "text": "0.10"},
        "Protection": {"MaxSlowdown": 0.02},
    }


def test_a_pipe_that_says_nothing_is_told_by_its_name(run, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO(""))
    code, _, err, calls = run("jobs", "submit", "-f", "-", create_training_job=planned)
    assert (code, calls) == (2, [])
    assert "stdin is not a job" in err


def test_secrets_role_inputs_and_requirements_have_options(run, tmp_path):
    file = tmp_path / "job.yaml"
    written = (
        "[{ChannelName: a, DataSource: {S3DataSource: {S3Uri: s3://old/a}}}, {ChannelName: b, DataSource: "
        "{S3DataSource: {S3Uri: s3://old/b}}}]"
    )
    file.write_text(
        f"EntryPoint: train.py\nNodeCount: 2\nSource: {{SourceId: s}}\nSecrets: {{OLD: "
        f"ssm:old}}\nInputDataConfig: {written}\n"
    )
    options = (
        "--secret",
        "KEY=secretsmanager:prod/key=1",
        "--role-arn",
        "arn:aws:iam::123456789012:role/train",
        "--requirements",
        "deps/requirements.txt",
    )
    inputs = ("--input", "a=s3://new/a=1/", "--input", "shared=/mnt/data")
    _, _, _, calls = run("jobs", "submit", "-f", str(file), *options, *inputs, create_training_job=planned)
    request = calls[-1][1]
    assert request["Secrets"] == {"OLD": "ssm:old", "KEY": "secretsmanager:prod/key=1"}
    assert (request["RoleArn"], request["Requirements"]) == (
        "arn:aws:iam::123456789012:role/train",
        "deps/requirements.txt",
    )
    assert request["InputDataConfig"] == [
        {"ChannelName": "b", "DataSource": {"S3DataSource": {"S3Uri": "s3://old/b"}}},
        {"ChannelName": "a", "DataSource": {"S3DataSource": {"S3Uri": "s3://new/a=1/"}}},
        {"ChannelName": "shared", "DataSource": {"FileSystemDataSource": {"DirectoryPath": "/mnt/data"}}},
    ]


def test_a_source_that_is_there_already_is_not_uploaded_and_a_name_is_made_up(run, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text("EntryPoint: my_train.v2.py\nNodeCount: 2\nSource: {SourceId: s}\n")
    _, _, _, calls = run("jobs", "submit", "-f", str(file), create_training_job=planned)
    (_, dry), (_, request) = calls
    assert re.fullmatch(r"my-train-v2-\d{8}-\d{6}-[0-9a-f]{4}", request["TrainingJobName"])
    assert dry["TrainingJobName"] == request["TrainingJobName"]
    assert (request["Source"], re.fullmatch(NAME_PATTERN, request["TrainingJobName"]) is not None) == (
        {"SourceId": "s"},
        True,
    )


CHANGED = {"Revision": 2, "Changes": [{"Field": "Priority", "Before": "0", "After": "5", "Applies": "Now"}]}


def test_an_update_of_one_tag_keeps_the_others(run):
    job = {**JOB, "Tags": {"a": "1", "b": "2"}}
    code, _, _, calls = run(
        "jobs", "update", "gpt", "--set", "Tags.a=3", describe_training_job=job, update_training_job=CHANGED
    )
    assert code == 0
    assert calls[-1] == ("update_training_job", {"TrainingJobName": "gpt", "Tags": {"a": "3", "b": "2"}})


def test_a_request_for_a_dry_run_starts_nothing_and_says_so(run):
    code, out, err, calls = run(
        *SUBMIT, "--set", "DryRun=true", upload_source={"SourceId": "s"}, create_training_job=planned
    )
    assert code == 0
    assert "submitted" not in out + err
    assert [request["DryRun"] for name, request in calls if name == "create_training_job"] == [True]


def test_an_update_sends_what_differs(run, tmp_path):
    file = tmp_path / "job.yaml"
    file.write_text(
        "TrainingJobName: gpt\nEntryPoint: train.py\nSource: {Directory: .}\nHyperParameters: {steps: 200}\n"
        "CheckpointConfig: {EverySteps: 50, ThirdSlot: false}\nStoppingCondition: {MaxRuntimeInSeconds: 0}\n"
    )
    code, out, _, calls = run(
        "jobs",
        "update",
        "gpt",
        "-f",
        str(file),
        "--set",
        "Priority=5",
        describe_training_job=JOB,
        update_training_job=CHANGED,
    )
    assert (code, out.splitlines()[0]) == (0, "gpt has revision 2")
    assert calls[-1] == (
        "update_training_job",
        {"TrainingJobName": "gpt", "Priority": 5, "CheckpointConfig": {"EverySteps": 50}},
    )
    _, out, _, calls = run(
        "jobs",
        "update",
        "gpt",
        "--set",
        "NodeCount=8",
        describe_training_job=JOB,
        update_training_job={"Revision": 1, "Changes": []},
    )
    assert calls[-1][1] == {"TrainingJobName": "gpt", "NodeCount": 8}, "the service says that it cannot be changed"
    assert out == "gpt already has these values: revision 1\n"


def test_a_diff_shows_what_was_changed_or_would_be(run, tmp_path):
    revisions = {
        "Revisions": [
            {"Revision": 1, "Time": JOB["CreationTime"], "Changes": []},
            {**CHANGED, "Time": JOB["CreationTime"]},
        ]
    }
    _, out, _, _ = run("jobs", "diff", "gpt", list_training_job_revisions=revisions)
    assert out.splitlines()[1].split() == ["2", "2026-03-01", "12:00:00", "Priority", "0", "5", "Now"]
    file = tmp_path / "job.yaml"
    file.write_text("EntryPoint: train.py\nPriority: 5\nCheckpointConfig: {EverySteps: 50}\nNodeCount: 8\n")
    _, out, _, calls = run("jobs", "diff", "gpt", "-f", str(file), describe_training_job=JOB)
    assert [line.split() for line in out.splitlines()[1:]] == [
        ["Priority", "0", "5"],
        ["CheckpointConfig.EverySteps", "100", "50"],
        ["NodeCount", "4", "8"],
    ]
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("text", "options", "said"),
    [
        ("- a\n", (), "is not a job"),
        ("a: [", (), "is neither JSON nor YAML"),
        ("NodeCount: 1\n", ("--set", "NodeCount"), "not of the form Field=value"),
        ("NodeCount: 1\n", ("--set", ".x=1"), "not of the form Field=value"),
        (None, (), "cannot be read"),
    ],
)
def test_a_file_that_says_nothing_is_wrong_usage(run, tmp_path, text, options, said):
    file = tmp_path / "job.yaml"
    if text is not None:
        file.write_text(text)
    code, out, err, calls = run("jobs", "submit", "-f", str(file), *options, create_training_job=planned)
    assert (code, out, calls) == (2, "", [])
    assert said in err


@pytest.mark.parametrize(
    "bad",
    [
        ("--hyperparameter", "steps"),
        ("--secret", "KEY"),
        ("--input", "a=/x", "--input", "a=/y"),
        ("--tag", "=x"),
        ("--environment", "A=1", "--environment", "A=2"),
        ("--node-count", "x"),
    ],
)
def test_a_wrong_option_is_wrong_usage(run, bad):
    code, out, err, _ = run(*SUBMIT, *bad, upload_source={"SourceId": "s"}, create_training_job={})
    assert (code, out) == (2, "")
    assert bad[0] in err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (
            ServiceFailed(
                "NodeCount: 9 nodes.",
                hint="Fewer.",
                code="ValidationException",
                fields=[FieldError("NodeCount", "9 nodes")],
            ),
            2,
        ),
        (SourceRefused("a is a link."), 2),
        (
            ServiceFailed("There is no training job named 'gpt'.", code="ResourceNotFoundException", request_id="r-1"),
            254,
        ),
        (ServiceFailed("No.", code="AccessDeniedException"), 254),
        (ServiceFailed("Nobody answers.", code="ServiceUnavailableException"), 254),
        (ServiceFailed("It failed [inside].", code="InternalServerException", request_id="r-9"), 254),
        (WaitFailed("It cannot come."), 1),
        (WaitTimedOut("Not in time."), 255),
    ],
)
def test_errors_are_one_line_with_a_hint_and_an_exit_code(run, error, code):
    ended, out, err, _ = run("jobs", "describe", "gpt", describe_training_job=error)
    assert (ended, out) == (code, "")
    named = f" ({error.code})" if isinstance(error, ServiceFailed) else ""
    assert err.startswith(f"error: {error.message}{named}\n")
    assert "Traceback" not in err
    assert ("hint: Fewer." in err) == bool(error.hint)
    assert ("request id" in err) == ("inside" in error.message), "only where the service's log says more"


@pytest.mark.parametrize(
    ("arguments", "answers", "words"),
    [
        (
            ("jobs", "describe", "gpt"),
            {"describe_training_job": JOB},
            [
                "Completed",
                "step 200",
                "committed step",
                "Waiting [its] turn.",
                "0.750",
                "train 100.0 s",
                "8.2 s, which",
            ],
        ),
        (
            ("jobs", "describe", "gpt"),
            {"describe_training_job": {**JOB, "RehearsalResult": PROVEN, "IsRehearsalPending": True}},
            ["Resume proven at step 20 (12 s); a rehearsal is pending"],
        ),
        (
            ("jobs", "describe", "gpt"),
            {"describe_training_job": {**JOB, "RehearsalResult": {**PROVEN, **DIFFERENCE, "Verdict": "Differs"}}},
            ["rank 3 differs after step 20: the loss differs. Register it."],
        ),
        (
            ("jobs", "describe", "gpt"),
            {"describe_training_job": {**JOB, "RehearsalResult": {**PROVEN, **DIFFERENCE, "Verdict": "Unproven"}}},
            ["rank 3 repeats its steps and loses values after step 20: the loss differs."],
        ),
        (
            ("jobs", "describe", "gpt"),
            {"describe_training_job": {**JOB, "RehearsalResult": {**PROVEN, **DIFFERENCE, "Verdict": "Refused"}}},
            ["rank 3 cannot rehearse at step 20: the loss differs. Register it."],
        ),
        (
            ("jobs", "describe", "gpt"),
            {"describe_training_job": {**JOB, "RehearsalResult": {**PROVEN, "Verdict": "Refused", "Message": "late"}}},
            ["not rehearsed until step 20: late"],
        ),
        (("jobs", "list"), {"list_training_jobs": {"TrainingJobSummaries": [JOB]}}, ["gpt", "199", "NAME"]),
        (("jobs", "stop", "gpt"), {"stop_training_job": {"TrainingJobStatus": "Stopping"}}, ["gpt is Stopping"]),
        (
            ("protection", "describe", "gpt"),
            {"describe_protection": PROTECTION},
            ["Degraded: rank 0 has 1.", "1 lost: 50.0000%", "i-1, i-2 (out of view)", "2.0 KiB", "2 copies of every"],
        ),
        (
            ("protection", "describe", "gpt"),
            {"describe_protection": {**PROTECTION, "Copies": 1, "ParityGroupSize": 4}},
            ["parity: in each group of 4 nodes, one node can fail without the loss of a step"],
        ),
        (
            ("jobs", "describe", "gpt"),
            {"describe_training_job": {**JOB, "Protection": {"Copies": 1, "ParityGroupSize": 3}}},
            ["parity: in each group of 3 nodes, one node can fail without the loss of a step"],
        ),
        (("incidents", "list"), {"list_incidents": {"Incidents": [INCIDENT]}}, ["inc-1", "peer", "120"]),
        (
            ("incidents", "describe", "inc-1"),
            {"describe_incident": INCIDENT},
            [
                "a spare takes over",
                "2 → 3",
                "detect 1.0 s, replace 0.5 s",
                "local (ranks 0-2), peer (rank 3)",
                "$0.0125",
            ],
        ),
        (
            ("incidents", "describe", "inc-1"),
            {"describe_incident": {**INCIDENT, "StacksEventId": 42}},
            ["in event 42: everstep events list --job gpt --after 41 --max-items 1"],
        ),
    ],
)
def test_what_a_person_asks_for_is_shown_and_a_program_gets_json(run, arguments, answers, words):
    code, out, _, _ = run(*arguments, **answers)
    assert code == 0
    assert [word for word in words if word not in out] == []
    code, out, _, _ = run(*arguments, "--output", "json", **answers)
    assert code == 0
    assert isinstance(json.loads(out), dict)


@pytest.mark.parametrize(
    ("arguments", "answers"),
    [
        (("jobs", "list"), {"list_training_jobs": {"TrainingJobSummaries": []}}),
        (("incidents", "list"), {"list_incidents": {"Incidents": []}}),
        (("events", "list"), {"list_events": {"Events": []}}),
        (("nodes", "list"), {"list_nodes": {"Nodes": []}}),
        (("fleets", "list"), {"list_fleets": {"Fleets": []}}),
    ],
)
def test_an_empty_list_says_so_and_prints_nothing(run, arguments, answers):
    code, out, err, _ = run(*arguments, **answers)
    assert (code, out) == (0, "")
    assert err.startswith("No ")


MODEL = json.loads((DATA / "everstep/2026-01-01/service-2.json").read_text())


def least(name: str) -> object:
    """Return the smallest valid answer with this shape, without its optional fields."""
    shape = MODEL["shapes"][name]
    if shape["type"] == "structure":
        # A shape without required fields describes a part of a request. The service returns such parts with all fields.
        return {field: least(shape["members"][field]["shape"]) for field in shape.get("required", shape["members"])}
    if shape["type"] in ("list", "map"):
        return [least(shape["member"]["shape"])] if shape["type"] == "list" else {"any": least(shape["value"]["shape"])}
    plain = {"string": "any", "timestamp": JOB["CreationTime"], "boolean": False}
    return shape["enum"][0] if "enum" in shape else plain.get(shape["type"], 1)


@pytest.mark.parametrize(
    ("arguments", "operation", "shape"),
    [
        (("jobs", "describe", "gpt"), "describe_training_job", "TrainingJob"),
        (("jobs", "list"), "list_training_jobs", "ListTrainingJobsResponse"),
        (("jobs", "pause", "gpt"), "pause_training_job", "TrainingJobSummary"),
        (("jobs", "resume", "gpt"), "resume_training_job", "TrainingJobSummary"),
        (("jobs", "rehearse", "gpt"), "rehearse_training_job", "TrainingJobSummary"),
        (("jobs", "delete", "gpt", "--yes"), "delete_training_job", "DeleteTrainingJobResponse"),
        (("jobs", "undelete", "gpt"), "undelete_training_job", "TrainingJobSummary"),
        (("jobs", "stop", "gpt"), "stop_training_job", "TrainingJob"),
        (("checkpoints", "list", "gpt"), "list_checkpoints", "ListCheckpointsResponse"),
        (("checkpoints", "describe", "gpt", "8"), "describe_checkpoint", "Checkpoint"),
        (("checkpoints", "create", "gpt"), "create_checkpoint", "CreateCheckpointResponse"),
        (("checkpoints", "verify", "gpt", "8"), "verify_checkpoint", "Checkpoint"),
        (("checkpoints", "pin", "gpt", "8"), "pin_checkpoint", "Checkpoint"),
        (("checkpoints", "unpin", "gpt", "8"), "unpin_checkpoint", "Checkpoint"),
        (("checkpoints", "undelete", "gpt", "8"), "undelete_checkpoint", "Checkpoint"),
        (("checkpoints", "delete", "gpt", "8", "--generation", "2", "--yes"), "delete_checkpoint", "Checkpoint"),
        (("automation", "describe"), "describe_automation", "Automation"),
        (("automation", "pause", "--reason", "an incident at AWS", "--yes"), "pause_automation", "Automation"),
        (("automation", "resume"), "resume_automation", "Automation"),
        (("audit", "list"), "list_audit_entries", "ListAuditEntriesResponse"),
        (("quotas", "list"), "list_project_quotas", "ListProjectQuotasResponse"),
        (("quotas", "set", "speech", "--max-node-count", "4"), "put_project_quota", "ProjectQuota"),
        (("quotas", "delete", "speech"), "delete_project_quota", "ProjectQuota"),
        (("protection", "describe", "gpt"), "describe_protection", "DescribeProtectionResponse"),
        (("incidents", "describe", "any"), "describe_incident", "Incident"),
        (("incidents", "list"), "list_incidents", "ListIncidentsResponse"),
        (("events", "list"), "list_events", "ListEventsResponse"),
        (("nodes", "describe", "any"), "describe_node", "Node"),
        (("nodes", "list"), "list_nodes", "ListNodesResponse"),
        (("fleets", "describe", "any"), "describe_fleet", "Fleet"),
        (("fleets", "list"), "list_fleets", "ListFleetsResponse"),
        (("fleets", "join-token", "any"), "create_join_token", "CreateJoinTokenResponse"),
        (
            ("fleets", "create", "--name", "f", "--auto-scaling-group", "g", "--yes", "--dry-run"),
            "create_fleet",
            "CreateFleetResponse",
        ),
    ],
)
def test_what_may_be_absent_is_not_missed(run, arguments, operation, shape):
    code, _, err, _ = run(*arguments, upload_source={"SourceId": "s"}, **{operation: least(shape)})
    assert (code, "Traceback" in err) == (0, False)


def test_incidents_of_which_little_is_known_are_told():
    incident = least("Incident")
    assert incident_line(incident).startswith("! notice: any")
    assert (
        incident_line({**incident, "ClosedAt": JOB["CreationTime"]})
        == "✗ notice: the job ended before training ran again, 0.0 s after the failure"
    )
    recovered = {**incident, "RestoredAt": JOB["CreationTime"], "ClosedAt": JOB["CreationTime"]}
    assert incident_line(recovered) == "✓ notice: training again from step - (nothing), 0 steps lost, 0.0 s"


CHANGE = {
    "Setting": "SuspendedProcesses",
    "After": "AZRebalance",
    "Reason": "g does not suspend AZRebalance.",
    "Applies": "Now",
}
CREATE = ("fleets", "create", "--name", "main", "--auto-scaling-group", "g")


def creating(*changes: dict) -> tuple[Callable[..., dict], list[bool]]:
    """Return a fake `create_fleet` that reports these changes, and a list for the `DryRun` flag of each call."""
    asked: list[bool] = []

    def create(DryRun=False, ExpectedChanges=None, **_):
        asked.append(DryRun)
        assert ExpectedChanges == (list(changes) if asked == [True, False] else None), (
            "what was shown is what may be done"
        )
        made = {} if DryRun else {"Fleet": {**least("Fleet"), "FleetName": "main"}}
        return {
            "FleetName": "main",
            "Checks": [{"Setting": "Status", "Message": "g is not being deleted."}],
            "Changes": list(changes),
            **made,
        }

    return create, asked


def at_terminal(monkeypatch, answer: str) -> None:
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True, readline=lambda: answer))
    monkeypatch.setattr(confirm, "sys", SimpleNamespace(stdin=sys.stdin, stderr=SimpleNamespace(isatty=lambda: True)))


@pytest.mark.parametrize(("answer", "asked", "code"), [("y\n", [True, False], 0), ("n\n", [True], 1), ("", [True], 1)])
def test_what_a_fleet_changes_of_its_group_is_shown_and_asked_for_first(run, monkeypatch, answer, asked, code):
    create, calls = creating(CHANGE)
    at_terminal(monkeypatch, answer)
    ended, out, err, _ = run(*CREATE, create_fleet=create)
    assert (ended, calls) == (code, asked)
    assert "SuspendedProcesses: none → AZRebalance (now). g does not suspend AZRebalance." in err
    assert "Change these settings of g" in err
    assert ("main" in out) == (code == 0)


@pytest.mark.parametrize(
    ("changes", "options", "asked", "code"),
    [
        ((CHANGE,), (), [True], 2),
        ((CHANGE,), ("--yes",), [True, False], 0),
        ((CHANGE,), ("--yes", "--output", "json"), [False], 0),
        ((CHANGE,), ("--output", "json"), [True], 2),
        ((), (), [True, False], 0),
        ((CHANGE,), ("--dry-run",), [True], 0),
    ],
)
def test_a_fleet_is_made_where_nothing_is_changed_or_somebody_said_yes(run, changes, options, asked, code):
    create, calls = creating(*changes)
    ended, out, err, _ = run(*CREATE, *options, create_fleet=create)
    assert (ended, calls) == (code, asked)
    assert ("stdin is not a terminal" in err) == (code == 2)
    if "json" in options and code == 0:
        assert json.loads(out)["Changes"] == [CHANGE]
    if "--dry-run" in options:
        assert "SuspendedProcesses" in out
        assert "g is not being deleted." in out


def test_wait_shows_the_way_and_ends_well(run):
    looks = iter(
        [
            {
                **JOB,
                "TrainingJobStatus": "InProgress",
                "SecondaryStatus": "Training",
                "Boundary": 50,
                "CommittedStep": 49,
            },
            JOB,
        ]
    )
    answers = {"describe_training_job": lambda **_: next(looks), "list_incidents": {"Incidents": [INCIDENT]}}
    code, out, err, _ = run("jobs", "wait", "gpt", **answers)
    assert code == 0
    assert "gpt is Completed at step 200, 1 incident" in out
    assert "step 50, committed 49" in err
    assert err.count("✓ instance_terminated: training again from step 120 (peer), 1 step lost, 4.0 s") == 1


def test_wait_has_an_exit_code_for_an_older_checkpoint(run):
    job = {**JOB, "SecondaryStatus": "CompletedWithOlderCheckpoint", "FinalCheckpointStep": 49, "IncidentCount": 0}
    code, out, _, _ = run("jobs", "wait", "gpt", describe_training_job=job)
    assert code == 3
    assert "gpt is Completed at step 200" in out
    assert "Its final checkpoint is older: step 49" in out


def test_wait_ends_badly_with_the_reason(run):
    failed = {**JOB, "TrainingJobStatus": "Failed", "Reason": "rank 0: boom", "IncidentCount": 0}
    code, out, err, _ = run("jobs", "wait", "gpt", describe_training_job=failed)
    assert (code, out) == (1, "")
    assert "error: gpt is Failed: rank 0: boom" in err
    assert "hint: everstep jobs logs gpt" in err


@pytest.mark.parametrize(
    ("messages", "sessions", "words"),
    [(2, 0, "2 messages, by the control plane"), (0, 1, "1 sessions, by its agent"), (0, 0, None)],
)
def test_a_node_shows_what_was_refused(run, messages, sessions, words):
    names = (
        "NodeId",
        "FleetName",
        "NodeStatus",
        "AgentVersion",
        "TrainingJobName",
        "Address",
        "InstanceType",
        "AvailabilityZone",
        "Reason",
    )
    node = {
        **dict.fromkeys(names, "x"),
        "Connected": True,
        "Warm": True,
        "MemoryBytes": 1,
        "CreationTime": datetime.fromisoformat("2026-03-01T12:00:00Z"),
        "Incidents": [],
    }
    node |= {"RefusedMessageCount": messages, "RefusedSessionCount": sessions}
    _, out, _, _ = run("nodes", "describe", "i-1", describe_node=node)
    assert ("refused" in out) is (words is not None)
    assert (words or "") in out
    assert "exposed" not in out
    _, out, _, _ = run("nodes", "describe", "i-1", describe_node={**node, "Exposure": "ranks run as the agent's user"})
    assert "ranks run as the agent's user" in out


def test_a_node_shows_its_memory_and_that_of_its_ranks(run):
    names = (
        "NodeId",
        "FleetName",
        "NodeStatus",
        "AgentVersion",
        "TrainingJobName",
        "Address",
        "InstanceType",
        "AvailabilityZone",
        "Reason",
    )
    node = {
        **dict.fromkeys(names, "x"),
        **{
            "Connected": True,
            "Warm": True,
            "MemoryBytes": 1,
            "Incidents": [],
            "RefusedMessageCount": 0,
            "RefusedSessionCount": 0,
        },
        "CreationTime": datetime.fromisoformat("2026-03-01T12:00:00Z"),
    }
    assert "memory of ranks" not in run("nodes", "describe", "i-1", describe_node=node)[1]
    ranks = [{"Rank": 3, "ResidentBytes": 2**30, "PeakResidentBytes": 2**31}]
    memory = {"UsedBytes": 3 * 2**30, "AvailableBytes": 2**30, "TotalBytes": 4 * 2**30, "Ranks": ranks}
    _, out, _, _ = run("nodes", "describe", "i-1", describe_node={**node, "Memory": memory})
    assert "3.0 GiB used of 4.0 GiB; 1.0 GiB available" in out
    assert "rank 3: 1.0 GiB, peak 2.0 GiB" in out
    _, out, _, _ = run(
        "nodes", "describe", "i-1", describe_node={**node, "Memory": {**memory, "CgroupLimitBytes": 4 * 2**30}}
    )
    assert "the limit of its cgroup" in out
    conditions = [
        {"Type": "disk_full", "Message": "/state is full", "NodeId": "i-1"},
        {"Type": "disk_full", "Message": "the service's, too"},
    ]
    _, out, _, _ = run("nodes", "describe", "i-1", describe_node={**node, "Conditions": conditions})
    assert "disk_full on i-1: /state is full" in out
    assert "disk_full: the service's, too" in out


def test_a_node_and_its_fleet_show_the_age_of_their_image(run):
    created = datetime.now(UTC) - timedelta(days=41, hours=1)
    node = {**least("Node"), "ImageId": "ami-1"}
    assert re.search(r"image +ami-1 *$", run("nodes", "describe", "i-1", describe_node=node)[1], re.M)
    _, out, _, _ = run("nodes", "describe", "i-1", describe_node={**node, "ImageCreationTime": created})
    assert re.search(r"image +ami-1, 41 days old *$", out, re.M)
    assert "image" not in run("nodes", "describe", "i-1", describe_node=least("Node"))[1]
    fleet = least("Fleet")
    assert "oldest image" not in run("fleets", "describe", "f", describe_fleet=fleet)[1]
    _, out, _, _ = run("fleets", "describe", "f", describe_fleet={**fleet, "OldestImageTime": created})
    assert re.search(r"oldest image +41 days old *$", out, re.M)


def test_nodes_show_their_place_in_the_network(run):
    nodes = [least("Node"), {**least("Node"), "FailureDomain": "nn-1"}]
    assert re.search(r"network node +nn-1 *$", run("nodes", "describe", "i-1", describe_node=nodes[1])[1], re.M)
    assert "network node" not in run("nodes", "describe", "i-1", describe_node=nodes[0])[1]
    _, out, _, _ = run("nodes", "list", list_nodes={"Nodes": nodes})
    assert re.search(r"NETWORK NODE.*\n.* any +- .*\n.* any +nn-1 ", out)


def test_outputs_are_downloaded(run, tmp_path):
    outputs = [{"Generation": 2, "Path": "rank=0/model.bin", "Key": "k", "Bytes": 3}]
    unstored = {"UnstoredOutputs": [{"Path": "rank=0/latest", "Cause": "Outside"}], "UnstoredOutputCount": 3}
    answers = {
        "list_outputs": {"Outputs": outputs},
        "get_output": lambda TrainingJobName, Key: body(b"abc"),
        "describe_training_job": {**JOB, **unstored},
    }
    code, out, err, _ = run("jobs", "output", "gpt", "--to", str(tmp_path / "out"), **answers)
    assert (code, out) == (0, f"1 file, 3 B, in {tmp_path / 'out'}\n")
    assert "not in S3: rank=0/latest (Outside)\nnot in S3: 2 more" in err
    assert (tmp_path / "out/rank=0/model.bin").read_bytes() == b"abc"


@pytest.mark.parametrize(
    ("command", "module", "extra"), [("server", "control_plane", "server"), ("agent", "worker", "worker")]
)
def test_programs_are_run_without_the_working_directory_on_the_path(run, monkeypatch, command, module, extra):
    became: list[list[str]] = []
    monkeypatch.setattr(programs.os, "execv", lambda _path, arguments: became.append(arguments))
    run(command, "--help", "--port", "0")
    assert became == [[sys.executable, "-P", "-m", module, "--help", "--port", "0"]]
    monkeypatch.setattr(programs.importlib.util, "find_spec", lambda _name: None)
    code, _, err, _ = run(command)
    assert code == 2
    assert f"pip install 'everstep[{extra}]'" in err
    assert len(became) == 1


def test_nothing_configured_says_what_to_do(monkeypatch, capsys, tmp_path):
    for name in ("EVERSTEP_ENDPOINT_URL", "EVERSTEP_TOKEN", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr(sys, "argv", ["everstep", "jobs", "list"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert "everstep local env" in capsys.readouterr().err


def test_a_line_on_a_job_that_waits_has_its_reason():
    waiting = {**JOB, "SecondaryStatus": "Pending", "Boundary": -1, "Reason": "Waiting for 2 nodes."}
    assert line_of(waiting) == "gpt: Pending: Waiting for 2 nodes."


def test_a_line_on_an_open_incident_has_its_evidence():
    assert (
        incident_line({name: value for name, value in INCIDENT.items() if name != "ClosedAt"})
        == "! instance_terminated: EC2 reports i-1 as terminated → a spare takes over"
    )


@pytest.mark.parametrize(
    ("arguments", "operation", "items"),
    [
        (("jobs", "list"), "list_training_jobs", "TrainingJobSummaries"),
        (("incidents", "list"), "list_incidents", "Incidents"),
        (("events", "list"), "list_events", "Events"),
    ],
)
def test_a_limited_list_is_as_long_as_asked_for_in_pages_that_the_service_gives(run, arguments, operation, items):
    def rows(first: int, end: int):
        return [{"Project": "default", "Number": number} for number in range(first, end)]

    def page(MaxResults: int, NextToken: str = "0", **_filters):
        first = int(NextToken)
        return {items: rows(first, first + MaxResults), "NextToken": str(first + MaxResults)}

    code, out, _, calls = run(*arguments, "--max-items", "1500", "--output", "json", **{operation: page})
    assert code == 0
    assert json.loads(out) == {items: rows(0, 1500), "NextToken": "more"}
    assert [request["MaxResults"] for _, request in calls] == [1000, 1000]
    _, out, _, calls = run(*arguments, "--max-items", "3", "--output", "json", **{operation: page})
    assert json.loads(out)[items] == rows(0, 3)
    assert [request["MaxResults"] for _, request in calls] == [3]
    _, out, _, calls = run(
        *arguments, "--page-size", "2", "--max-items", "4", "--starting-token", "10", "-o", "json", **{operation: page}
    )
    assert json.loads(out)[items] == rows(10, 14)
    assert [request["MaxResults"] for _, request in calls] == [2, 2]


@pytest.mark.parametrize(("projects", "is_shown"), [(["vision", "vision"], False), (["vision", "speech"], True)])
def test_a_list_of_jobs_names_their_projects_if_there_are_several(run, projects, is_shown):
    found = [{**JOB, "Project": project} for project in projects]
    _, out, _, _ = run("jobs", "list", list_training_jobs={"TrainingJobSummaries": found})
    assert [word in out for word in ("PROJECT", *projects)] == [is_shown] * 3


def test_people_see_some_screens_of_a_list_and_programs_get_more_of_it(run):
    def page(MaxResults: int, **_filters):
        return {"TrainingJobSummaries": [JOB] * MaxResults, "NextToken": "t"}

    _, out, err, calls = run("jobs", "list", list_training_jobs=page)
    assert len(out.splitlines()) == 1 + 100
    assert "--starting-token" in err
    _, out, _, more = run("jobs", "list", "--output", "json", list_training_jobs=page)
    assert len(json.loads(out)["TrainingJobSummaries"]) == 1000
    assert [request["MaxResults"] for _, request in (*calls, *more)] == [100, 1000]


def test_one_page_is_the_services_own_answer(run):
    answer = {"Incidents": [1, 2], "NextToken": "t"}
    _, out, _, calls = run(
        "incidents", "list", "--no-paginate", "--starting-token", "s", "-o", "json", list_incidents=answer
    )
    assert json.loads(out) == answer
    assert calls == [("list_incidents", {"MaxResults": 1000, "NextToken": "s"})]


def test_a_list_that_is_cut_short_says_how_to_go_on(run):
    _, out, err, _ = run("jobs", "list", "--max-items", "1", list_training_jobs={"TrainingJobSummaries": [JOB, JOB]})
    assert len(out.splitlines()) == 2
    assert "--starting-token more" in err


# Tests of commands that wait for a job


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []

    def __call__(self) -> float:
        return self.now

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds


GONE = ServiceFailed("Nobody answers.", code="ServiceUnavailableException")


def wait(*looks: object, timeout_seconds: float | None = None) -> tuple[Clock, list[str], dict]:
    """Wait for a job whose polls return these statuses in turn.

    Later polls return the last status.
    """
    clock, seen, left = Clock(), [], list(looks)

    def look(**_):
        now = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(now, Exception):
            raise now
        return {"TrainingJobStatus": now}

    job = ended(
        Client({"describe_training_job": look}),
        "gpt",
        show=lambda job: seen.append(job["TrainingJobStatus"]),
        interval_seconds=2,
        timeout_seconds=timeout_seconds,
        pause=clock.pause,
        monotonic=clock,
    )
    return clock, seen, job


def test_waiting_looks_until_the_job_has_ended():
    clock, seen, job = wait("InProgress", "Stopping", "Stopped")
    assert (seen, clock.pauses, job) == (
        ["InProgress", "Stopping", "Stopped"],
        [2, 2],
        {"TrainingJobStatus": "Stopped"},
    )


def test_waiting_gives_up_in_time():
    with pytest.raises(WaitTimedOut, match="within 5 s"):
        wait("InProgress", timeout_seconds=5)


def test_waiting_sits_out_a_restart_of_the_control_plane():
    assert wait(*[GONE] * 20, "Completed")[1] == ["Completed"]


def test_waiting_does_not_wait_for_a_control_plane_for_ever():
    with pytest.raises(ServiceFailed, match="Nobody answers"):
        wait("InProgress", *[GONE] * (int(UNANSWERED_SECONDS) // 2 + 1), "Completed")


def test_waiting_ends_where_the_service_refuses():
    with pytest.raises(ServiceFailed, match="none of that name"):
        wait(ServiceFailed("There is none of that name.", code="ResourceNotFoundException"), "Completed")


def test_a_deletion_names_the_command_that_undoes_it(run):
    gone = {**least("DeleteTrainingJobResponse"), "IsDeleted": False, "HasMoreObjects": False}
    until = {"PurgeTime": JOB["CreationTime"]}
    arguments = ("jobs", "delete", "gpt", "--delete-objects", "--yes")
    code, out, err, _ = run(*arguments, delete_training_job={**gone, **until})
    assert (code, "gpt is in the trash until" in out) == (0, True)
    assert "everstep jobs undelete gpt" in out + err
    described = {**least("TrainingJob"), **until}
    assert "in the trash until" in run("jobs", "describe", "gpt", describe_training_job=described)[1]


@pytest.mark.parametrize(("options", "words"), [((), "more in the trash: add --trash"), (("--trash",), "in the trash")])
def test_the_list_of_checkpoints_says_how_much_is_in_the_trash(run, options, words):
    listed = {**least("ListCheckpointsResponse"), "TrashBytes": 3 * 2**30}
    code, out, err, _ = run("checkpoints", "list", "gpt", *options, list_checkpoints=listed)
    assert (code, f"3.0 GiB {words}" in (out + err)) == (0, True), (out, err)
