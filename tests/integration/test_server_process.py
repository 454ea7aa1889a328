"""The server as a process: it starts, refuses to start, answers requests and stops.

A socket that answers one request replaces the cloud.
"""

from __future__ import annotations

import http.server
import json
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

import httpx
import pytest
from botocore.exceptions import ClientError

from control_plane.__main__ import listening
from everstep import sdk

pytestmark = pytest.mark.integration

IDENTITY = b"""<GetCallerIdentityResponse xmlns="https://sts.amazonaws.com/doc/2011-06-15/"><GetCallerIdentityResult>
<Arn>arn:aws:iam::123456789012:user/x</Arn><UserId>x</UserId><Account>123456789012</Account>
</GetCallerIdentityResult><ResponseMetadata><RequestId>r</RequestId></ResponseMetadata></GetCallerIdentityResponse>"""


class Sts(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-type", "text/xml")
        self.send_header("content-length", str(len(IDENTITY)))
        self.end_headers()
        self.wfile.write(IDENTITY)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def cloud():
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sts) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


OF_THE_TESTS = (sys.executable, "-P", "-m", "control_plane")


def command(directory: Path, cloud: str, *more: str, program: Sequence[str] = OF_THE_TESTS) -> list[str]:
    return [
        *(
            *program,
            "--state-dir",
            str(directory / "state"),
            "--mode",
            "local",
            "--aws-endpoint-url",
            cloud,
        ),
        *("--bucket", "b", "--port", "0", "--ready-file", str(directory / "ready.json"), *more),
    ]


def start(
    directory: Path, cloud: str, *more: str, program: Sequence[str] = OF_THE_TESTS
) -> tuple[subprocess.Popen[str], dict[str, str]]:
    """Start a server and read its log until the server announces its port.

    Return it with the content of its ready file. `program` contains the first words of the server's command.
    """
    (directory / "ready.json").unlink(missing_ok=True)
    words = command(directory, cloud, *more, program=program)
    process = subprocess.Popen(words, cwd=directory, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    seen: list[str] = []
    for line in process.stderr:
        seen.append(line)
        if "listening on" in line:
            threading.Thread(target=process.stderr.read, daemon=True).start()
            break
    else:
        raise AssertionError("".join(seen))
    return process, json.loads((directory / "ready.json").read_text())


def stop(process: subprocess.Popen[str], number: int = signal.SIGTERM) -> int:
    process.send_signal(number)
    code = process.wait(30)
    assert process.stderr is not None
    process.stderr.close()
    return code


def test_a_server_starts_answers_restarts_and_stops(tmp_path, cloud):
    process, ready = start(tmp_path, cloud, "--migrate")
    try:
        token = Path(ready["admin_token_path"])
        assert ready["pid"] == process.pid
        assert {
            stat.S_IMODE(path.stat().st_mode)
            for path in (token, token.with_name("server_secret"), token.with_name("everstep.db"))
        } == {0o600}
        assert httpx.get(f"{ready['url']}/v1/health", trust_env=False, timeout=30).status_code == 200
        headers = {"authorization": f"Bearer {token.read_text().strip()}"}
        assert httpx.get(f"{ready['url']}/v1/fleets", headers=headers, trust_env=False, timeout=30).json() == {
            "Fleets": []
        }
    finally:
        assert stop(process) == 0
    secrets = {name: token.with_name(name).read_text() for name in ("admin_token", "server_secret")}
    process, ready = start(tmp_path, cloud)
    try:
        assert {name: token.with_name(name).read_text() for name in secrets} == secrets
        assert httpx.get(f"{ready['url']}/v1/fleets", headers=headers, trust_env=False, timeout=30).status_code == 200
    finally:
        assert stop(process, signal.SIGINT) == 0


ADMIN = "est_" + "a" * 43


def test_secrets_of_the_environment_are_in_no_file_and_are_rotated(tmp_path, cloud, monkeypatch):
    """A new server secret changes neither the server's id nor tokens. A rotated administrator's token stays rotated."""
    monkeypatch.setenv("EVERSTEP_ADMIN_TOKEN", ADMIN)
    monkeypatch.setenv("EVERSTEP_SERVER_SECRET", "ab" * 32)
    state = tmp_path / "state"
    process, ready = start(tmp_path, cloud, "--migrate")
    try:
        assert ready["admin_token_path"] == "the variable EVERSTEP_ADMIN_TOKEN"
        assert not (state / "server_secret").exists()
        assert not (state / "admin_token").exists()
        first = sdk.client(ready["url"], ADMIN)
        own = first.get_caller_identity()["TokenId"]
        other = first.create_token(Role="admin", Description="rotated")["Secret"]
        public_id = (state / "server_id").read_text()
    finally:
        assert stop(process) == 0

    monkeypatch.setenv("EVERSTEP_SERVER_SECRET", "cd" * 32)
    process, ready = start(tmp_path, cloud)
    try:
        assert (state / "server_id").read_text() == public_id, "agents keep their settings"
        second = sdk.client(ready["url"], other)
        second.revoke_token(TokenId=own)
    finally:
        assert stop(process) == 0

    # The environment still has the revoked token, as it does until somebody updates the unit.
    process, ready = start(tmp_path, cloud)
    try:
        with pytest.raises(ClientError) as refused:
            sdk.client(ready["url"], ADMIN).list_fleets()
        assert refused.value.response["ResponseMetadata"]["HTTPStatusCode"] == 401
        assert sdk.client(ready["url"], other).list_fleets()["Fleets"] == []
    finally:
        assert stop(process) == 0


def test_an_answer_does_not_wait_until_its_head_is_acknowledged():
    with listening("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()[:2]):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_crashed_loop_ends_the_process(tmp_path, cloud):
    crash = """import sys
from control_plane.__main__ import main
from control_plane.loop.cloud_watch import CloudWatch
async def run(self, stop): raise RuntimeError("this loop crashes")
CloudWatch.run = run
sys.exit(main())"""
    arguments = command(tmp_path, cloud, "--migrate")
    ended = subprocess.run(
        [sys.executable, "-P", "-c", crash, *arguments[4:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == 1
    assert "this loop crashes" in ended.stderr


@pytest.mark.parametrize(
    ("url", "code", "words"),
    [
        ("", 2, "start once with --migrate"),
        ("mysql://db/everstep", 2, "not started: the database URL begins with 'mysql'"),
        ("postgresql://user:geheim@127.0.0.1:1/everstep", 1, "not started: the database does not answer: "),
    ],
)
def test_a_server_does_not_start_on_a_database_it_cannot_use_and_says_why(tmp_path, cloud, url, code, words):
    ended = subprocess.run(
        command(tmp_path, cloud, "--database-url", url),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )
    assert ended.returncode == code
    assert words in ended.stderr
    assert "geheim" not in ended.stderr
    assert "Traceback" not in ended.stderr
    assert not (tmp_path / "ready.json").exists()


def test_files_of_the_working_directory_shadow_nothing(tmp_path, cloud):
    for name in ("control_plane", "alembic", "uvicorn"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('shadowed')")
    process, _ = start(tmp_path, cloud, "--migrate")
    assert stop(process) == 0
    assert os.listdir(tmp_path / "state/spool") == []


def test_timeouts_are_explained_and_nothing_is_touched(tmp_path: Path) -> None:
    done = subprocess.run(
        [*command(tmp_path, "http://127.0.0.1:9", "--print-timeouts", "--detection-seconds", "2")],
        capture_output=True,
        text=True,
        check=True,
    )
    assert "2.0 s  detection_seconds" in done.stdout
    assert "80.0 s  blind_wait" in done.stdout
    assert list(tmp_path.iterdir()) == []


def test_every_line_is_json_where_that_is_asked_for(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "control_plane",
        "--state-dir",
        str(tmp_path),
        "--bucket",
        "b",
        "--log-format",
        "json",
    ]
    local = ["--mode", "local", "--aws-endpoint-url", "http://127.0.0.1:1", "--detection-seconds", "0"]
    done = subprocess.run([*command, *local], capture_output=True, text=True, check=False, timeout=50)
    assert done.returncode == 2
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert (lines[-1]["level"], lines[-1]["logger"]) == ("error", "control_plane")
    assert lines[-1]["message"].startswith("not started: ")
