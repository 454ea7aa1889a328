"""`everstep aws-conformance` observes AWS's behaviour, stores the answers, and removes the resources that it created.

A *question* is a behaviour of AWS that AWS's documentation leaves open. The command finds the answers by calls in an
account. In these tests, the account is one of the local cloud.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import boto3
import msgspec
import pytest
from botocore.config import Config
from typer.testing import CliRunner

from infra.aws_conformance import __main__ as command
from infra.aws_conformance.account import Account, Place, clean
from infra.aws_conformance.questions import QUESTIONS, Answer, Question
from infra.aws_conformance.run import ask, merged
from infra.local_cloud import aws_answers
from infra.local_cloud.aws_answers import AwsAnswers, UnusableAnswers
from infra.local_cloud.environment import aws_variables
from infra.local_cloud.faults import Conditions
from tests.aws_page import QUESTIONS as SECTION
from tests.aws_page import blocks_to_run
from tests.unit.local_cloud.served import ServedAws, eventually, served_aws

IMAGE = "ami-12c6146b"
PLACE = Place(zone="us-east-1a", instance_type="t3.nano", image=IMAGE)
WRONG = ("DescribeInstanceStatus", "DescribeInstances", "SetInstanceProtection")


@pytest.fixture
def aws(tmp_path: Path) -> Iterator[ServedAws]:
    """Yield a local cloud that throttles, boots slowly and shows changes late."""
    with served_aws(tmp_path, Conditions(boot_delay_seconds=0.6, visibility_seconds=0.5, api_rate_share=2.0)) as aws:
        yield aws


@pytest.fixture
def single_attempt(aws: ServedAws) -> Iterator[Callable[[str], Any]]:
    """Yield a function that returns clients without retries."""
    made: list[Any] = []

    def client(service: str) -> Any:
        made.append(
            boto3.client(
                service,
                endpoint_url=aws.url,
                region_name="us-east-1",
                aws_access_key_id=aws.keys.access_key_id,
                aws_secret_access_key=aws.keys.secret_access_key,
                config=Config(retries={"total_max_attempts": 1}),
            )
        )
        return made[-1]

    yield client
    for each in made:
        each.close()


def account_of(aws: ServedAws, single_attempt: Callable[[str], Any]) -> Account:
    return Account(
        client=aws.client,
        single_attempt=single_attempt,
        run="test",
        monotonic=time.monotonic,
        pause=command.pause,
        patience_seconds=30.0,
        watch_seconds=2.0,
        poll_seconds=0.25,
        refill_seconds=1.0,
    )


def left_over(aws: ServedAws) -> list[Any]:
    """Return all resources in the account that have a type of the resources that a conformance run creates."""
    return [
        *aws.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"],
        *aws.client("ec2").describe_launch_templates()["LaunchTemplates"],
        *aws.client("events").list_rules()["Rules"],
        *aws.client("sqs").list_queues().get("QueueUrls", ()),
        *aws.pids(),
    ]


def forget_planted_calls(aws: ServedAws, undocumented_calls: list[str]) -> None:
    """Forget the undocumented calls that an experiment of the run sends on purpose, to record how AWS refuses them."""
    assert {words.partition(": ")[0] for words in aws.take_wrong_calls()} == {*WRONG}
    undocumented_calls.clear()


def test_a_run_answers_every_question_and_the_local_cloud_replays_the_answers(
    aws: ServedAws,
    single_attempt: Callable[[str], Any],
    undocumented_calls: list[str],
    tmp_path: Path,
) -> None:
    said: list[str] = []
    recorded = ask(
        account_of(aws, single_attempt),
        PLACE,
        QUESTIONS,
        region="us-east-1",
        now=datetime(2026, 1, 1, tzinfo=UTC),
        report=said.append,
    )
    forget_planted_calls(aws, undocumented_calls)
    assert recorded.unanswered == {}
    assert all(question.sentence in said for question in QUESTIONS)
    answers = recorded.answers
    # The local cloud behaves as the defaults of `AwsAnswers` say, so the run's answers equal these defaults, except for
    # the two measured values.
    assert msgspec.structs.replace(
        answers, visibility_seconds=10.0, auto_scaling_rate=AwsAnswers().auto_scaling_rate
    ) == (AwsAnswers())
    assert 0.5 <= answers.visibility_seconds < 30
    assert 100 <= answers.auto_scaling_rate.burst < 600, "twice the rate of AWS, and the refill meanwhile"
    assert answers.auto_scaling_rate.per_second >= 10
    assert recorded.observed["pending-protection"]["Code"] == "ValidationError"
    assert recorded.observed["refusals"]["FilterValues201"]["Code"] == "FilterLimitExceeded"
    assert {"Described", "Unhealthy", "Event"} <= recorded.observed["ended-member"]["SecondsUntil"].keys()
    eventually(lambda: not left_over(aws))

    path = tmp_path / "answers.json"
    path.write_bytes(aws_answers.encode(recorded))
    assert aws_answers.read(path) == answers


def test_a_run_finds_what_differs_from_the_assumptions(tmp_path: Path) -> None:
    different = AwsAnswers(
        pending_member_shows_protection=True,
        pending_member_is_protectable=True,
        protection_is_all_or_nothing=False,
        protection_set_at="service",
        ended_member_stays=True,
        hook_holds_ended_member=False,
        unknown_ids_named="all",
        topology_layers=4,
    )
    with served_aws(tmp_path, Conditions(boot_delay_seconds=0.6), answers=different) as other:
        account = account_of(other, other.client)
        questions = [question for question in QUESTIONS if question.name not in ("auto-scaling-rate", "refusals")]
        recorded = ask(account, PLACE, questions, region="us-east-1", now=datetime.now(UTC), report=lambda _: None)
        assert recorded.unanswered == {}
        assert msgspec.structs.replace(recorded.answers, visibility_seconds=10.0) == different


def test_a_question_without_an_answer_leaves_the_assumption_and_the_run_continues(
    aws: ServedAws, single_attempt: Callable[[str], Any]
) -> None:
    def fail(account: Account) -> Answer:
        account.client("autoscaling").set_desired_capacity(AutoScalingGroupName=account.name, DesiredCapacity=9)
        raise AssertionError

    questions = (Question("refused", "Is it refused?", fail), QUESTIONS[0])
    recorded = ask(
        account_of(aws, single_attempt),
        PLACE,
        questions,
        region="us-east-1",
        now=datetime.now(UTC),
        report=lambda _: None,
    )
    assert "9 is above max value 3" in recorded.unanswered["refused"]
    assert recorded.observed["pending-protection"]["LifecycleState"].startswith("Pending")
    eventually(lambda: not left_over(aws))


def test_an_interrupted_run_removes_its_resources(aws: ServedAws, single_attempt: Callable[[str], Any]) -> None:
    def interrupt(account: Account) -> Answer:
        account.set_desired(1)
        account.until("a member", account.members)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        ask(
            account_of(aws, single_attempt),
            PLACE,
            (Question("interrupted", "Does the user wait?", interrupt),),
            region="us-east-1",
            now=datetime.now(UTC),
            report=lambda _: None,
        )
    eventually(lambda: not left_over(aws))


def test_clean_removes_what_a_crashed_run_left_and_nothing_else(
    aws: ServedAws, single_attempt: Callable[[str], Any]
) -> None:
    theirs = aws.make_group(desired=1)
    account = account_of(aws, single_attempt)
    account.create(PLACE)
    account.set_desired(1)
    account.until("a member", account.members)
    said = clean(aws.client, command.pause)
    assert len(said) == 4
    assert all("everstep-conformance-test" in sentence for sentence in said)
    assert aws.in_service(theirs, 1)
    (template,) = aws.client("ec2").describe_launch_templates()["LaunchTemplates"]
    assert template["LaunchTemplateName"] == theirs
    assert clean(aws.client, command.pause) == []


def test_the_longer_of_two_durations_counts() -> None:
    answers = [Answer({"visibility_seconds": 3.0}), Answer({"visibility_seconds": 1.0, "topology_layers": 2})]
    assert merged(answers) == {"visibility_seconds": 3.0, "topology_layers": 2}


# The command `everstep aws-conformance`


@pytest.fixture
def environment(aws: ServedAws, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in aws_variables(aws.url, aws.keys).items():
        monkeypatch.setenv(name, value)


def test_the_command_says_what_it_costs_and_starts_nothing_without_a_confirmation(
    aws: ServedAws, environment: None
) -> None:
    assert command.cost_words("t3.nano") == (
        "The run launches 3 instances of type t3.nano for about 1 hour, and reaches the rate limit of Auto Scaling for "
        "some seconds. It costs about 0.03 USD at the prices of us-east-1."
    )
    assert "USD" not in command.cost_words("p5.48xlarge")
    result = CliRunner().invoke(command.app, [], input="n\n")
    assert result.exit_code == 2, result.output
    assert "0.03 USD" in result.output.replace("\n", " ")
    assert left_over(aws) == []
    result = CliRunner().invoke(command.app, ["--clean"])
    assert result.exit_code == 0
    assert "nothing to delete" in result.output


def test_a_question_that_does_not_exist_is_refused() -> None:
    result = CliRunner().invoke(command.app, ["--question", "weather"])
    assert result.exit_code == 2
    assert QUESTIONS[0].name in result.output


def test_the_command_stores_the_answers(aws: ServedAws, environment: None, tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    words = ["--yes", "--image", IMAGE, "--out", str(path), "--question", QUESTIONS[0].name]
    result = CliRunner().invoke(command.app, words)
    assert result.exit_code == 0, result.output
    assert QUESTIONS[0].sentence in result.output.replace("\n", " ")
    assert aws_answers.read(path) == AwsAnswers()
    eventually(lambda: not left_over(aws))


def test_the_command_removes_its_resources_after_sigterm(aws: ServedAws, tmp_path: Path) -> None:
    # The experiment `ended-member` observes a group's member for minutes, so the run cannot end before the signal.
    words = ["--yes", "--image", IMAGE, "--out", str(tmp_path / "answers.json"), "--question", "ended-member"]
    process = subprocess.Popen(
        [str(Path(sys.executable).with_name("everstep")), "aws-conformance", *words],
        env={**os.environ, **aws_variables(aws.url, aws.keys)},
        stderr=subprocess.DEVNULL,
    )
    try:
        eventually(lambda: left_over(aws) or process.poll() is not None)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.wait()
    eventually(lambda: not left_over(aws))
    assert not (tmp_path / "answers.json").exists()


def test_the_command_prints_the_lines_of_the_page_and_asks(aws: ServedAws) -> None:
    """The command prints the lines that docs/aws.md shows. It starts no instances, because the test answers no."""
    (block,) = blocks_to_run(SECTION)
    command_line, _, lines = block.text.partition("\n")
    program, *words = command_line.removeprefix("$ ").split()
    done = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *words],
        env={**os.environ, **aws_variables(aws.url, aws.keys)},
        input="n\n",
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.split()) == (2, lines.split())
    assert left_over(aws) == []


def test_a_file_without_answers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.json"
    with pytest.raises(UnusableAnswers, match=r"answers\.json"):
        aws_answers.read(path)
    path.write_text('{"asked_at": "", "region": "", "instance_type": "", "answers": {"speed": 1}}')
    with pytest.raises(UnusableAnswers, match="speed"):
        aws_answers.read(path)
