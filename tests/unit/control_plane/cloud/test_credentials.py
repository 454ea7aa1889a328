"""A server that starts without AWS credentials uses credentials as soon as they exist."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from botocore.credentials import Credentials
from botocore.exceptions import NoCredentialsError

from control_plane.__main__ import EXIT_REFUSED, main
from control_plane.cloud.connection import CloudMode, CloudSettings, Connection
from control_plane.cloud.credentials import SEARCH_SECONDS, LateCredentials
from control_plane.cloud.errors import NoCredentials
from control_plane.cloud.objects import SignedUpload
from control_plane.cloud.s3 import S3ServiceStore
from everstep.protocol.plan import ObjectReference

KEYS = Credentials("AKIDLATE", "secret", None, method="env")


@pytest.fixture(autouse=True)
def no_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Remove every source of AWS credentials from the environment."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


def signed(store: S3ServiceStore) -> SignedUpload:
    """Return a presigned upload. botocore needs credentials for it, and sends no request."""
    found = store.sign_upload(ObjectReference(bucket="b", key="k"), sha256="00" * 32, size_bytes=1, seconds=60)
    assert found is not None
    return found


@pytest.mark.parametrize("source", ["environment", "file"])
def test_clients_made_without_credentials_use_them_once_they_are_there(
    source: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    settings = CloudSettings(mode=CloudMode.AWS, region="eu-west-1")
    store = S3ServiceStore(Connection(settings, search_pause=0.0))
    with pytest.raises(NoCredentials, match="Unable to locate credentials"):
        signed(store)
    if source == "environment":
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIDLATE")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    else:
        (tmp_path / "credentials").write_text(
            "[default]\naws_access_key_id = AKIDLATE\naws_secret_access_key = secret\n"
        )
    with caplog.at_level(logging.INFO):
        assert "X-Amz-Credential=AKIDLATE" in signed(store).url
        assert "X-Amz-Credential=AKIDLATE" in signed(store).url
    assert [record.message for record in caplog.records if "found AWS" in record.message] == [
        "found AWS credentials (env)" if source == "environment" else "found AWS credentials (shared-credentials-file)"
    ]


def test_the_search_has_a_shortest_pause_and_ends_when_it_succeeds() -> None:
    clock, answers, searched_at = [0.0], iter([None, None, KEYS]), list[float]()

    def search() -> Credentials | None:
        searched_at.append(clock[0])
        return next(answers)

    late = LateCredentials(search, monotonic=lambda: clock[0])
    for clock[0] in (0.0, 1.0, SEARCH_SECONDS - 0.1, SEARCH_SECONDS):
        with pytest.raises(NoCredentialsError):
            late.get_frozen_credentials()
    for clock[0] in (2 * SEARCH_SECONDS, 9 * SEARCH_SECONDS):
        assert late.get_frozen_credentials().access_key == "AKIDLATE"
        assert (late.access_key, late.secret_key, late.token) == ("AKIDLATE", "secret", None)
    assert searched_at == [0.0, SEARCH_SECONDS, 2 * SEARCH_SECONDS]


@pytest.mark.usefixtures("restored_umask")
def test_the_server_does_not_end_for_lack_of_credentials(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The start continues up to the next check, the schema of a database that does not exist."""
    arguments = ["--mode", "aws", "--region", "eu-west-1", "--bucket", "b", "--state-dir", str(tmp_path / "state")]
    with caplog.at_level(logging.WARNING):
        assert main(arguments) == EXIT_REFUSED
    warning, error = (record.message for record in caplog.records if record.name == "control_plane")
    assert "The server starts, and looks for AWS credentials until they are there" in warning
    assert "has no Everstep tables" in error
