"""The commands of docs/aws.md run in order against the local cloud, from an empty account to a fleet and its end.

The local cloud does not install packages on its instances. A process that the test starts takes the place of the
installation's server, and user data starts this machine's `everstep agent` on nodes.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from infra.local_cloud.environment import aws_variables
from tests.aws_page import BEGIN, LARGE, SMALL, Terminal, blocks_to_run
from tests.deployer import PACKERS_CALLS, POLICIES, check_uses, enforced
from tests.policies import statements_for
from tests.terraform import IMAGE, MIRRORS, Terraform, needs_provider, needs_terraform, terraform_of
from tests.unit.local_cloud.served import ServedAws, eventually, served_aws

ROOT = Path(__file__).resolve().parents[2]
WHEEL = Path("dist") / "everstep-0.1.0-py3-none-any.whl"
COMMANDS = Path(sys.executable).parent
JOIN_TOKEN = ("fleets", "join-token", "everstep-main", "--output", "text", "--query", "JoinToken")
IDLE = "#!/bin/sh\nexec sleep 10000\n"
NODE_MEMORY_BYTES = 256 * 1024**2
START_SECONDS = 300.0

pytestmark = [pytest.mark.production, needs_terraform, needs_provider]


@pytest.fixture
def aws(tmp_path: Path) -> Iterator[ServedAws]:
    with served_aws(tmp_path) as served:
        yield served


def terminal(aws: ServedAws, folder: Path, directory: Path, *, name: str = "terminal", **variables: str) -> Terminal:
    """Return a terminal with administrator rights in the local cloud, in which Terraform asks for no confirmation.

    `variables` are variables of the root module that the page does not set.
    """
    unset = ("AWS_", "EVERSTEP_", "TF_")
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(unset)}
    answers = "-no-color -input=false -auto-approve -parallelism=30"
    return Terminal(
        directory,
        folder / f"{name}.sh",
        {
            **inherited,
            "PATH": f"{COMMANDS}{os.pathsep}{os.environ['PATH']}",
            **aws_variables(aws.url, aws.keys),
            "CHECKPOINT_DISABLE": "1",
            "TF_CLI_ARGS_init": " ".join(["-no-color -input=false", *(f"-plugin-dir={each}" for each in MIRRORS)]),
            "TF_CLI_ARGS_apply": answers,
            "TF_CLI_ARGS_destroy": answers,
            **{f"TF_VAR_{name}": value for name, value in variables.items()},
            "TF_VAR_node_user_data": f'#!/bin/sh\n. "{folder / "node.env"}"\n'
            f"export EVERSTEP_JOIN_TOKEN EVERSTEP_RANK_USER=$(id -u) EVERSTEP_NODE_MEMORY_BYTES={NODE_MEMORY_BYTES}\n"
            'exec everstep agent --control-plane-url "$SERVER"\n',
        },
    )


def checkout(root: str, aws: ServedAws, folder: Path) -> Terraform:
    """Create a checkout with a root module, examples and the wheel. The wheel is empty, so no server installs it."""
    terraform = terraform_of(root, aws.url, aws.keys, folder / "checkout" / "infra")
    shutil.copytree(ROOT / "examples", folder / "checkout" / "examples")
    wheel = folder / "checkout" / WHEEL
    wheel.parent.mkdir()
    wheel.write_bytes(b"a wheel")
    return terraform


@contextmanager
def server(terraform: Terraform, aws: ServedAws, folder: Path) -> Iterator[str]:
    """Run the server of an installation until the block ends, and yield its URL.

    Nodes read the server's address and a join token from the file `node.env`.
    """
    ready, log = folder / "server.json", folder / "server.log"
    resources = terraform.resources()
    words = ["--migrate", "--mode", "local", "--aws-endpoint-url", aws.url, "--port", "0", "--ready-file", str(ready)]
    words += ["--aws-keys-file", str(folder / "keys.json"), "--state-dir", str(folder / "server")]
    words += ["--bucket", resources["module.storage.aws_s3_bucket.this"]["bucket"], "--secrets-prefix", "everstep/"]
    words += ["--events-queue-url", resources["module.events.aws_sqs_queue.this"]["url"]]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "control_plane", *words], stdout=output, stderr=subprocess.STDOUT
        )
    try:
        eventually(lambda: ready.exists() or process.poll() is not None, timeout_seconds=START_SECONDS)
        assert process.poll() is None, log.read_text()
        url: str = json.loads(ready.read_text())["url"]
        secret = aws.client("secretsmanager").get_secret_value(SecretId="everstep/admin-token")["SecretString"]
        token = subprocess.run(
            [str(COMMANDS / "everstep"), *JOIN_TOKEN],
            env={**os.environ, "EVERSTEP_ENDPOINT_URL": url, "EVERSTEP_TOKEN": secret},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        (folder / "node.env").write_text(f"SERVER={url}\nEVERSTEP_JOIN_TOKEN={token}\n")
        yield url
    finally:
        process.terminate()
        process.wait(60)


@pytest.mark.timeout(900)
def test_the_commands_before_both_installations_run(aws: ServedAws, tmp_path: Path) -> None:
    reader = terminal(aws, tmp_path, ROOT)
    said = [reader.run(block.text) for block in blocks_to_run(BEGIN)]
    assert str(WHEEL) in said[0]
    assert json.loads(said[-1])["Account"] == "123456789012"


@pytest.mark.timeout(1800)
def test_the_small_installation_runs_a_job_and_ends(aws: ServedAws, tmp_path: Path) -> None:
    terraform = checkout("quickstart", aws, tmp_path)
    reader = terminal(aws, tmp_path, tmp_path / "checkout", image_id=IMAGE)
    install, *blocks, end = blocks_to_run(SMALL)
    reader.run(install.text)
    (session,) = (block for block in blocks if block.is_for_second_terminal)
    assert '"SessionId"' in terminal(aws, tmp_path, tmp_path / "checkout", name="second").run(session.text)
    use = [block for block in blocks if block != session]
    with server(terraform, aws, tmp_path) as url:
        said = [reader.run(block.text.replace("http://127.0.0.1:8443", url)) for block in use]
        assert "step 20 loss" in said[-1], "the log of rank 0"
        reader.run(end.text)
    assert not aws.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    assert not aws.client("s3").list_buckets()["Buckets"]


@pytest.mark.timeout(1800)
def test_the_installation_for_production_has_a_fleet_and_ends(aws: ServedAws, tmp_path: Path) -> None:
    terraform = checkout("production", aws, tmp_path)
    aws.client("route53").create_hosted_zone(Name="example.com", CallerReference="1")
    for role in ("server", "node"):
        create_image(aws, role)
    reader = terminal(aws, tmp_path, tmp_path / "checkout", server_user_data=IDLE)
    doctor, *before, session, use, end = blocks_to_run(LARGE)
    assert "16 × p5.48xlarge need 3072 vCPUs" in reader.run(doctor.text)
    assert session.is_for_second_terminal
    policy = POLICIES["preparation"]
    with enforced(aws, policy) as (url, made):
        reader.run(f"export AWS_ENDPOINT_URL={url}")
        for block in before:
            # moto has no placement groups, so the test creates the fleet without one.
            reader.run(block.text.replace('"is_clustered": true', '"is_clustered": false'))
        reader.run(f"export AWS_ENDPOINT_URL={aws.url}")
    assert [each for each in PACKERS_CALLS if not statements_for(policy, each)] == []
    check_uses(policy, [*made, *PACKERS_CALLS])
    names = {each["Name"] for each in records(aws)}
    assert {"everstep.example.com."} < names, "the records for the domain and for the certificate"
    servers = aws.in_service("everstep-servers", 2)
    second = terminal(aws, tmp_path, tmp_path / "checkout", name="second")
    said = second.run(session.text)
    assert '"SessionId"' in said
    assert any(f"--target {each} " in said for each in servers)
    with server(terraform, aws, tmp_path) as url:
        reader.run(use.text.replace("http://127.0.0.1:8443", url))
        (node,) = aws.in_service("everstep-main", 1)
        assert aws.instance(node)["InstanceType"] == "p5.48xlarge"
        reader.run(end.text)
    assert not aws.client("rds").describe_db_instances()["DBInstances"]
    assert not aws.client("elbv2").describe_load_balancers()["LoadBalancers"]


def test_the_certificates_block_ends_when_aws_refuses_a_call(aws: ServedAws, tmp_path: Path) -> None:
    (block,) = (block for block in blocks_to_run(LARGE) if "acm request-certificate" in block.text)
    aws.client("route53").create_hosted_zone(Name="example.com", CallerReference="1")
    reader = terminal(aws, tmp_path, tmp_path)
    reader.run(
        'aws() { [ "$2" != describe-certificate ] || { echo AccessDenied >&2; return 254; }; command aws "$@"; }'
    )
    with pytest.raises(AssertionError, match="AccessDenied"):
        reader.run(block.text)
    assert records(aws) == []


def create_image(aws: ServedAws, role: str) -> None:
    """Register an image with the tags that `infra/image/everstep.pkr.hcl` gives it."""
    ec2 = aws.client("ec2")
    image = ec2.register_image(Name=f"everstep-{role}", Architecture="x86_64", RootDeviceName="/dev/sda1")["ImageId"]
    ec2.create_tags(Resources=[image], Tags=[{"Key": "everstep:role", "Value": role}])


def records(aws: ServedAws) -> list[dict[str, str]]:
    """Return the CNAME records of the hosted zone."""
    (zone,) = aws.client("route53").list_hosted_zones()["HostedZones"]
    found = aws.client("route53").list_resource_record_sets(HostedZoneId=zone["Id"])["ResourceRecordSets"]
    return [each for each in found if each["Type"] == "CNAME"]
