"""`everstep doctor` collects facts without changing anything, and derives findings from them."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.exceptions import ClientError
from botocore.parsers import ResponseParserError
from botocore.stub import Stubber
from typer.testing import CliRunner

from everstep.cli.main import app
from everstep.doctor import checks
from everstep.doctor import facts as doctor_facts
from everstep.doctor.bucket_checks import BucketFacts, Rule
from everstep.doctor.checks import GIB, AwsFacts, AwsQuota, DoctorFacts, ServiceFacts, is_wrong, judge
from everstep.doctor.findings import Level

NOW = datetime(2026, 3, 1, tzinfo=UTC)
SERVICE = ServiceFacts(
    endpoint="https://x", version="0.1.0", role="submitter", project="speech", skew_seconds=0.5, uncertainty_seconds=1.0
)
AWS = AwsFacts(caller="arn:aws:iam::1:role/x", region="eu-west-1", permissions={"s3:GetObject": True})
GOOD = DoctorFacts(
    now=NOW,
    is_node=True,
    machine="x86_64",
    python=(3, 11),
    version="0.1.0",
    packages={"torch": "2.9.0", "py-spy": "0.4"},
    service=SERVICE,
    shared_memory_free=8 * GIB,
    shared_memory_total=16 * GIB,
    can_write_shared_memory=True,
    memory_total=32 * GIB,
    memory_available=16 * GIB,
    local_ports=(32_768, 60_999),
    gpus=("NVIDIA H100",),
    is_root=True,
    aws=AWS,
)


def test_a_good_node_has_nothing_wrong_and_everything_was_looked_at() -> None:
    findings = judge(GOOD)
    assert {finding.level for finding in findings} == {Level.OK}
    checks = {finding.check for finding in findings}
    machine = {
        "python",
        "version",
        "packages",
        "processor",
        "clock",
        "memory",
        "tmpfs",
        "ports",
        "gpu",
        "isolation",
        "builds",
    }
    assert checks == machine | {"endpoint", "token", "aws", "permissions"}
    assert not is_wrong(findings)


def test_a_node_at_its_boot_passes_without_the_service() -> None:
    findings = judge(replace(GOOD, service=None))
    assert {"endpoint", "token", "clock"}.isdisjoint(finding.check for finding in findings)
    assert {finding.level for finding in findings} == {Level.OK}


@pytest.mark.parametrize(
    ("text", "environment", "found"),
    [
        ("", {}, ""),
        ("", {"EVERSTEP_ALLOW_BUILDS": "1"}, "1"),
        ("EVERSTEP_ALLOW_BUILDS=0\n", {"EVERSTEP_ALLOW_BUILDS": "1"}, "0"),
        ("EVERSTEP_ALLOW_BUILDS='1'\n", {}, "1"),
    ],
)
def test_a_setting_of_the_agent_is_read_as_its_unit_passes_it(
    tmp_path: Path, text: str, environment: dict[str, str], found: str
) -> None:
    file = tmp_path / "agent.env"
    if text:
        file.write_text(text)
    read = doctor_facts.setting("EVERSTEP_ALLOW_BUILDS", file=file, environment=environment)
    assert read == found


def service(**changes: Any) -> dict[str, Any]:
    return {"service": replace(SERVICE, **changes)}


def aws(**changes: Any) -> dict[str, Any]:
    return {"aws": replace(AWS, **changes)}


QUOTA = AwsQuota(name="P instances", limit=384, needed=768, instance_type="p5.48xlarge", node_count=4)


@pytest.mark.parametrize(
    ("changes", "check", "level", "words"),
    [
        ({"python": (3, 10)}, "python", Level.WRONG, "3.10 is too old"),
        ({"machine": "aarch64"}, "processor", Level.WRONG, "nodes need x86_64 processors; this node has aarch64"),
        (service(version="0.2.0"), "version", Level.WARNING, "0.1.0 here, 0.2.0 at the service"),
        ({"packages": {"py-spy": "1"}}, "packages", Level.WRONG, "torch is not installed"),
        ({"packages": {"torch": "1"}}, "packages", Level.WARNING, "py-spy is not installed"),
        (service(error="The service does not respond"), "endpoint", Level.WRONG, "does not respond"),
        (service(error="The token is unknown", is_refused=True), "token", Level.WRONG, "token is unknown"),
        (service(expires_at=NOW + timedelta(days=6)), "token", Level.WARNING, "expires at 2026-03-07"),
        (service(skew_seconds=3.1), "clock", Level.WARNING, "2.1 s ahead of"),
        (service(skew_seconds=-62.0), "clock", Level.WRONG, "61.0 s behind"),
        ({"memory_available": GIB}, "memory", Level.WRONG, "1.0 GiB of 32.0 GiB"),
        ({"shared_memory_free": None}, "tmpfs", Level.WRONG, "not a tmpfs"),
        ({"shared_memory_free": GIB // 2}, "tmpfs", Level.WRONG, "0.5 GiB free"),
        ({"can_write_shared_memory": False}, "tmpfs", Level.WRONG, "cannot write"),
        ({"listen_error": "Permission denied"}, "ports", Level.WRONG, "Permission denied"),
        ({"local_ports": (10_000, 65_000)}, "ports", Level.WARNING, "10000 to 65000"),
        ({"gpu_error": "nvidia-smi: no devices"}, "gpu", Level.WRONG, "no devices"),
        ({"is_root": False}, "isolation", Level.WARNING, "the code of a job can read the agent's files"),
        (
            {"is_root": False, "is_ec2": True},
            "isolation",
            Level.WARNING,
            "and can read the credentials of the instance's role",
        ),
        ({"closed_folder": "/root"}, "isolation", Level.WRONG, "/root denies them access"),
        ({"is_ec2": True, "has_ip": False}, "isolation", Level.WARNING, "read the credentials of the instance's role"),
        ({"allows_builds": True}, "builds", Level.WARNING, "pip may build packages for jobs"),
        (aws(error="no credentials"), "aws", Level.WRONG, "no credentials"),
        (
            aws(permissions={"s3:PutObject": False, "s3:GetObject": True}),
            "permissions",
            Level.WRONG,
            "not allowed: s3:PutObject",
        ),
        (
            aws(permissions={"ssm:GetParameter": False, "s3:GetObject": True}),
            "permissions",
            Level.WARNING,
            "not allowed: ssm:GetParameter (Secrets)",
        ),
        (aws(permissions={"s3:PutObject": None}), "permissions", Level.WARNING, "could not determine"),
        (aws(quota=QUOTA), "quota", Level.WRONG, "4 × p5.48xlarge need 768 vCPUs; the quota is 384"),
        (aws(zones=(), region="eu-west-1"), "offering", Level.WRONG, "no availability zone of eu-west-1 offers"),
        (aws(zones_error="denied"), "offering", Level.WARNING, "unknown: denied"),
        (aws(quota_error="denied"), "quota", Level.WARNING, "unknown: denied"),
    ],
)
def test_what_is_wrong_is_told_with_what_to_do(changes: dict[str, Any], check: str, level: Level, words: str) -> None:
    findings = [finding for finding in judge(replace(GOOD, **changes)) if finding.level is not Level.OK]
    assert [(finding.check, finding.level) for finding in findings] == [(check, level)]
    assert words in findings[0].message
    assert findings[0].advice
    assert is_wrong(tuple(findings)) is (level is Level.WRONG)


def test_what_only_a_node_needs_is_not_asked_of_a_laptop() -> None:
    laptop = replace(
        GOOD,
        is_node=False,
        packages={},
        shared_memory_free=None,
        local_ports=(10_000, 65_000),
        memory_available=GIB // 2,
    )
    assert not is_wrong(judge(laptop))


def test_the_zones_that_offer_a_type_are_named() -> None:
    found = judge(replace(GOOD, aws=replace(AWS, instance_type="p5.48xlarge", zones=("b", "c"))))
    (offering,) = [finding for finding in found if finding.check == "offering"]
    assert offering.level is Level.OK
    assert "p5.48xlarge is offered in b, c: the group's subnets must be in these zones" in offering.message


def test_a_quota_that_suffices_is_fine() -> None:
    assert not is_wrong(judge(replace(GOOD, aws=replace(AWS, quota=replace(QUOTA, limit=768.0)))))


# Tests of collecting facts


class Answers:
    """A fake AWS client. It returns the test's answers and records the calls."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[str, dict[str, Any]]] = []

    def __getattr__(self, name: str) -> Any:
        def call(**arguments: Any) -> Any:
            self.asked.append((name, arguments))
            answer = self.answers[name]
            if isinstance(answer, Exception):
                raise answer
            if isinstance(answer, str):
                raise ClientError({"Error": {"Code": answer, "Message": answer}}, name)
            return answer

        return call


def test_permissions_come_from_dry_runs_and_simulations_alone() -> None:
    ec2 = Answers(
        describe_instances="DryRunOperation",
        describe_instance_status="UnauthorizedOperation",
        describe_instance_topology="InvalidAction",
    )
    results = [
        {"EvalActionName": "ec2:DescribeInstanceTopology", "EvalDecision": "allowed"},
        {"EvalActionName": "autoscaling:DescribePolicies", "EvalDecision": "implicitDeny"},
        # A policy may allow this action for one bucket only, so an implicit denial without a bucket proves nothing.
        {"EvalActionName": "s3:PutObject", "EvalDecision": "implicitDeny"},
        {"EvalActionName": "s3:GetObject", "EvalDecision": "explicitDeny"},
    ]
    iam = Answers(simulate_principal_policy={"EvaluationResults": results})
    of_iam = tuple(result["EvalActionName"] for result in results)
    actions = ("ec2:DescribeInstances", "ec2:DescribeInstanceStatus", *of_iam)
    found = doctor_facts.permissions_of("arn:aws:sts::123456789012:assumed-role/server/i-1", ec2, iam, actions)
    assert list(found.values()) == [True, False, True, False, None, False]
    assert all(arguments == {"DryRun": True} for _, arguments in ec2.asked)
    ((_, asked),) = iam.asked
    assert asked == {"PolicySourceArn": "arn:aws:iam::123456789012:role/server", "ActionNames": list(of_iam)}


@pytest.mark.parametrize("answer", ["AccessDenied", ResponseParserError("a page of HTML")])
def test_what_may_not_be_simulated_is_not_known(answer: str | Exception) -> None:
    iam = Answers(simulate_principal_policy=answer)
    assert doctor_facts.permissions_of("arn:aws:iam::1:user/x", Answers(), iam, ("s3:PutObject",)) == {
        "s3:PutObject": None
    }


FAMILIES = {
    "p5.48xlarge": "L-417A185B",
    "g6.xlarge": "L-DB2E81BA",
    "c7i.large": "L-1216C47A",
    "trn1.2xlarge": "L-2C3B7624",
}


@pytest.mark.parametrize(("kind", "code"), FAMILIES.items())
def test_the_quota_is_that_of_the_family(kind: str, code: str) -> None:
    ec2 = Answers(describe_instance_types={"InstanceTypes": [{"VCpuInfo": {"DefaultVCpus": 192}}]})
    quotas = Answers(get_service_quota={"Quota": {"QuotaName": "name", "Value": 384.0}})
    assert doctor_facts.quota_of(ec2, quotas, kind, 4).needed == 768
    assert quotas.asked == [("get_service_quota", {"ServiceCode": "ec2", "QuotaCode": code})]
    with pytest.raises(LookupError, match="has no instance type"):
        doctor_facts.quota_of(Answers(describe_instance_types={"InstanceTypes": []}), quotas, kind, 1)


def test_the_zones_that_offer_a_type_are_read_from_all_pages() -> None:
    client: Any = boto3.client("ec2", region_name="eu-west-1", aws_access_key_id="a", aws_secret_access_key="s")
    asked = {
        "LocationType": "availability-zone",
        "Filters": [{"Name": "instance-type", "Values": ["p5.48xlarge"]}],
    }
    with Stubber(client) as stubbed:
        for zone, token in (("eu-west-1b", "more"), ("eu-west-1a", None)):
            page = {"InstanceTypeOfferings": [{"InstanceType": "p5.48xlarge", "Location": zone}]}
            stubbed.add_response(
                "describe_instance_type_offerings", page | ({"NextToken": token} if token else {}), asked
            )
            asked = asked | {"NextToken": "more"}
        assert doctor_facts.zones_of(client, "p5.48xlarge") == ("eu-west-1a", "eu-west-1b")
        stubbed.assert_no_pending_responses()


def test_this_machine_has_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    # The client refuses this endpoint before it sends anything.
    monkeypatch.setenv("EVERSTEP_ENDPOINT_URL", "http://10.0.0.1")
    monkeypatch.setenv("EVERSTEP_TOKEN", "t")
    facts = doctor_facts.gather(is_node=False, with_aws=False)
    assert facts.memory_total >= facts.memory_available > 0
    assert facts.python >= (3, 11)
    assert facts.aws is None


@pytest.mark.parametrize(
    ("facts", "code"), [(GOOD, 0), (replace(GOOD, python=(3, 10)), 1), (replace(GOOD, packages={"torch": "1"}), 0)]
)
def test_the_exit_code_says_whether_anything_is_wrong(
    monkeypatch: pytest.MonkeyPatch, facts: DoctorFacts, code: int
) -> None:
    monkeypatch.setattr(doctor_facts, "gather", lambda **_: facts)
    done = CliRunner().invoke(app, ["doctor", "--node", "--output", "json"])
    assert done.exit_code == code
    said = json.loads(done.stdout)
    assert said["IsWrong"] is bool(code)
    assert len(said["Findings"]) == len(checks.judge(facts))
    advised = [finding.advice for finding in checks.judge(facts) if finding.advice]
    assert re.findall("to do: (.*)", CliRunner().invoke(app, ["doctor"]).stdout) == advised


def test_a_service_that_does_not_answer_is_a_fact(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EVERSTEP_ENDPOINT_URL", "http://10.0.0.1")
    monkeypatch.setenv("EVERSTEP_TOKEN", "t")
    facts = doctor_facts.service_facts()
    assert "unencrypted" in facts.error
    assert not facts.is_refused


@pytest.mark.parametrize(
    ("options", "is_asked"), [([], False), (["--node"], True), (["--aws"], True), (["--node", "--no-aws"], False)]
)
def test_aws_is_asked_of_a_node_unless_said(
    monkeypatch: pytest.MonkeyPatch, options: list[str], is_asked: bool
) -> None:
    asked: list[bool] = []

    def gather(*, with_aws: bool, **_: object) -> DoctorFacts:
        asked.append(with_aws)
        return GOOD

    monkeypatch.setattr(doctor_facts, "gather", gather)
    CliRunner().invoke(app, ["doctor", *options])
    assert asked == [is_asked]


def test_a_folder_above_python_that_is_closed_to_others_is_found(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o700)
    found = Path(doctor_facts.closed_folder(Path("/usr/bin/python3"), tmp_path / "closed" / "python"))
    assert found in (tmp_path / "closed", *tmp_path.parents, tmp_path)
    assert not found.stat().st_mode & 0o001
    assert doctor_facts.closed_folder(Path("/usr/bin/python3")) == ""


def test_a_bucket_is_checked_by_its_name_or_its_uri(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def bucket(name: str, region: str | None) -> BucketFacts:
        asked.append((name, region))
        return BucketFacts(name=name, rules=(Rule(name="month", covers_all=True, expires_current=True),))

    monkeypatch.setattr(doctor_facts, "gather", lambda **_: GOOD)
    monkeypatch.setattr(doctor_facts, "bucket", bucket)
    for given in ("jobs", "s3://jobs/"):
        done = CliRunner().invoke(app, ["doctor", "--bucket", given, "--region", "eu-west-1"])
        assert done.exit_code == 1
        assert "wrong   bucket: the lifecycle rule month of jobs deletes objects by their age" in done.stdout
    assert asked == [("jobs", "eu-west-1")] * 2
