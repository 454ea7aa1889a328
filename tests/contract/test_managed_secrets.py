"""The server's secrets in AWS Secrets Manager, against the local cloud."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from control_plane.cloud.errors import NotFound
from control_plane.cloud.secrets import ManagedSecrets
from control_plane.secrets import server_secret
from tests.unit.local_cloud.served import ServedAws, served_aws

_numbers = itertools.count()


@pytest.fixture(scope="module")
def aws(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedAws]:
    with served_aws(tmp_path_factory.mktemp("aws")) as served:
        yield served


@pytest.fixture
def prefix(aws: ServedAws) -> str:
    prefix = f"everstep-{next(_numbers)}/"
    aws.client("secretsmanager").create_secret(Name=f"{prefix}server-secret")
    return prefix


def test_the_first_server_stores_the_value_and_all_others_read_it(aws: ServedAws, prefix: str) -> None:
    first, second = (ManagedSecrets(aws.connection(), prefix) for _ in range(2))
    assert first.kept("server_secret", lambda: "first") == "first"
    assert second.kept("server_secret", lambda: "second") == "first"


def test_servers_that_start_together_read_one_value(aws: ServedAws, prefix: str) -> None:
    with ThreadPoolExecutor(8) as threads:
        found = {
            each.result()
            for each in [
                threads.submit(ManagedSecrets(aws.connection(), prefix).kept, "server_secret", f"value {n}".strip)
                for n in range(8)
            ]
        }
    assert len(found) == 1


def test_a_value_that_a_person_stores_replaces_the_first_one(aws: ServedAws, prefix: str) -> None:
    stored = ManagedSecrets(aws.connection(), prefix)
    before = server_secret(stored)
    aws.client("secretsmanager").put_secret_value(SecretId=f"{prefix}server-secret", SecretString="ab" * 32)
    assert server_secret(stored) == bytes.fromhex("ab" * 32) != before


def test_a_secret_that_nobody_has_created_is_an_error(aws: ServedAws) -> None:
    with pytest.raises(NotFound):
        ManagedSecrets(aws.connection(), "nobody/").kept("server_secret", lambda: "value")
