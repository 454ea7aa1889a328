"""`everstep doctor --aws` asks the local cloud for its account, permissions and quota."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from botocore.exceptions import ClientError
from typer.testing import CliRunner

from everstep.cli.main import app
from everstep.doctor.facts import DRY_RUNS
from infra.local_cloud.environment import aws_variables
from tests.unit.local_cloud.served import ServedAws, served_aws


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as served:
        yield served


@pytest.mark.parametrize("method", DRY_RUNS.values())
def test_a_dry_run_changes_nothing_and_says_that_the_caller_may(aws: ServedAws, method: str) -> None:
    with pytest.raises(ClientError) as raised:
        getattr(aws.client("ec2"), method)(DryRun=True)
    assert raised.value.response["Error"]["Code"] == "DryRunOperation"
    getattr(aws.client("ec2"), method)(DryRun=False)


@pytest.mark.parametrize(("count", "code", "level"), [(20, 0, "ok"), (21, 1, "wrong")])
def test_the_command_checks_permissions_and_the_quota(
    aws: ServedAws, monkeypatch: pytest.MonkeyPatch, count: int, code: int, level: str
) -> None:
    for name, value in aws_variables(aws.url, aws.keys).items():
        monkeypatch.setenv(name, value)
    arguments = ["doctor", "--aws", "--no-service", "--instance-type", "p5.48xlarge", "--node-count", str(count)]
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, done.exception is None or code == 1) == (code, True), done.output
    findings = dict(line.split(": ", 1) for line in done.output.splitlines() if ": " in line)
    assert findings["ok      permissions"].endswith("actions are allowed")
    needs = f"{count} × p5.48xlarge need {count * 192} vCPUs; the quota is 3840 (Running On-Demand P instances)"
    assert findings[f"{level:<8}quota"] == needs
    done = CliRunner().invoke(app, [*arguments, "--capacity-block"])
    assert (done.exit_code, "quota" in done.output) == (0, False), done.output
