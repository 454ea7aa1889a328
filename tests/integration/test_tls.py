"""A server with a TLS certificate.

Every client verifies it, and no client sends a token unencrypted to another machine.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
import ssl
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import closing, contextmanager, nullcontext, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

import everstep
from control_plane.app import server_config
from control_plane.certificates import ServerAuthority
from control_plane.gate import Gate
from control_plane.settings import InvalidSettings, Settings
from everstep import config, failures
from everstep.errors import ConfigurationError, EverstepError
from everstep.protocol.agent_messages import AgentReport, Hello
from everstep.protocol.ids import NodeId
from tests.sqlite import make_migrated
from tests.unit.control_plane.api.conftest import PromptServer, Service
from worker.__main__ import settings as agent_settings
from worker.agent.control_client import ControlClient

pytestmark = pytest.mark.integration


def certificate(directory: Path) -> tuple[Path, Path]:
    """Write a self-signed certificate of 127.0.0.1 and its private key; return their paths."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "everstep test")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(minutes=5))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .sign(key, hashes.SHA256())
    )
    files = directory / "certificate.pem", directory / "key.pem"
    files[0].write_bytes(made.public_bytes(serialization.Encoding.PEM))
    files[1].write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return files


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(tmp_path_factory, files):
    """Start the real server with a certificate, and yield the content of its ready file."""
    tls = ["--tls-certificate", str(files[0]), "--tls-key", str(files[1])]
    with started(tmp_path_factory.mktemp("server"), *tls) as found:
        yield found


@contextmanager
def started(directory: Path, *tls: str) -> Iterator[dict[str, Any]]:
    ready = directory / "ready.json"
    state = directory / "state"
    state.mkdir(mode=0o700)
    make_migrated(state / "everstep.db")
    arguments = ["--state-dir", str(state), "--port", "0", "--bucket", "b", "--ready-file", str(ready)]
    arguments += ["--region", "us-east-1"]
    program = (
        "import sys, control_plane.__main__ as program\n"
        "from tests.fakes.cloud import FakeOperator, MemoryObjectStore\n"
        "make = program.create_app\n"
        "program._announce = lambda settings: None\n"
        "program.create_app = lambda settings, **more: make(settings, operator=FakeOperator(), "
        "objects=MemoryObjectStore('b'), loops=lambda *_: (),"
        " **more)\n"
        "sys.exit(program.main())\n"
    )
    process = subprocess.Popen([sys.executable, "-c", program, *arguments, *tls], stderr=subprocess.PIPE, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if "listening on" in line:
                break
        yield msgspec.json.decode(ready.read_bytes())
    finally:
        process.terminate()
        process.communicate(timeout=30)


def test_the_client_verifies_the_servers_certificate(server, files) -> None:
    token = Path(server["admin_token_path"]).read_text().strip()
    assert server["url"].startswith("https://")
    with closing(everstep.client(server["url"], token, ca_bundle=str(files[0]))) as client:
        assert client.get_caller_identity()["Role"] == "admin"
    refused = pytest.raises(EverstepError, match="CERTIFICATE_VERIFY_FAILED")
    with closing(everstep.client(server["url"], token)) as stranger, refused, failures.translated():
        stranger.get_caller_identity()


def test_another_authority_is_none(server, tmp_path) -> None:
    other, _ = certificate(tmp_path)
    with (
        closing(everstep.client(server["url"], "t", ca_bundle=str(other))) as client,
        pytest.raises(EverstepError, match="CERTIFICATE_VERIFY_FAILED"),
        failures.translated(),
    ):
        client.get_caller_identity()


@pytest.mark.parametrize("is_known", [True, False])
async def test_an_agent_verifies_the_servers_certificate_before_it_sends_its_token(
    server, files, tmp_path, is_known, caplog
) -> None:
    tls = ssl.create_default_context(cafile=files[0]) if is_known else None
    client = ControlClient(
        [server["url"]],
        join_token="est_none",
        token_path=tmp_path / "token",
        tls=tls,
        hello=lambda: Hello(
            node_id=NodeId("i-1"), agent_id="a", address="127.0.0.2", peer_port=1, memory_bytes=1, version="0"
        ),
        report=lambda: AgentReport(node_id=NodeId("i-1"), sequence=1, member=None),
        command=lambda _: None,
        welcomed=lambda _: None,
    )
    running = asyncio.create_task(client.run())
    async with asyncio.timeout(20):
        # the agent only logs that it could not verify the certificate
        while "no connection to the control plane" not in caplog.text:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    running.cancel()
    with suppress(asyncio.CancelledError):
        await running
    assert ("HTTP 403" in caplog.text) is is_known  # the server has received the token and rejects it
    assert ("CERTIFICATE_VERIFY_FAILED" in caplog.text) is not is_known


# Settings that the agent rejects before it sends any request


def test_a_server_that_others_reach_needs_a_certificate(tmp_path, files) -> None:
    base = {"state_directory": tmp_path, "bucket": "b", "host": "0.0.0.0", "region": "us-east-1"}
    with pytest.raises(InvalidSettings, match="--tls-certificate"):
        Settings(**base)
    assert Settings(**base, tls_certificate=files[0], tls_key=files[1]).has_tls
    assert not Settings(**base, is_other_host_allowed=True).has_tls
    with pytest.raises(InvalidSettings, match="must be set together"):
        Settings(**base, tls_certificate=files[0])


def agent_arguments(folder: Path, url: str) -> list[str]:
    """Return the command-line arguments without which an agent does not start."""
    words = {"--control-plane-url": url, "--instance-id": "i-1", "--address": "127.0.0.2"}
    return [word for pair in words.items() for word in pair] + ["--state-dir", str(folder / "s")]


@pytest.mark.parametrize("url", ["http://10.0.0.1:8443", "http://control.example"])
def test_an_agent_sends_no_token_in_the_clear_to_another_machine(tmp_path, url, capsys) -> None:
    given = [*agent_arguments(tmp_path, url), "--memory-bytes", "9"]
    with pytest.raises(SystemExit):
        agent_settings(given)
    assert "unencrypted" in capsys.readouterr().err
    assert agent_settings([*given, "--allow-non-loopback"]).control_plane_urls == (url,)


def test_a_bundle_that_is_none_is_told(tmp_path, capsys) -> None:
    with pytest.raises(ConfigurationError, match="is not a file"):
        config.load("https://x", "t", {}, ca_bundle=str(tmp_path / "none"))
    given = agent_arguments(tmp_path, "https://x")
    with pytest.raises(SystemExit):
        agent_settings([*given, "--ca-bundle", str(tmp_path / "none")])
    assert "contains no certificates" in capsys.readouterr().err


def test_the_bundle_is_kept_with_the_endpoint(tmp_path, files) -> None:
    environment = {"XDG_CONFIG_HOME": str(tmp_path)}
    config.write(config.ClientConfig("https://x", "t", str(files[0])), environment)
    assert config.load(environment=environment).ca_bundle == str(files[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--fleet", "main"], "are all needed"),
        (["--server-id", "0" * 32], "are all needed"),
        (["--fleet", "main", "--server-id", "x", "--region", "eu-west-1"], "is not a server id"),
    ],
)
def test_joining_by_a_role_takes_all_that_is_signed(tmp_path, options, words, capsys, monkeypatch) -> None:
    monkeypatch.delenv("AWS_REGION", raising=False)
    given = agent_arguments(tmp_path, "https://x")
    with pytest.raises(SystemExit):
        agent_settings([*given, *options])
    assert words in capsys.readouterr().err


def test_a_server_has_a_second_address_with_a_certificate_that_its_installation_trusts(tmp_path: Path) -> None:
    with started(tmp_path, "--tls-host", "127.0.0.2") as server:
        assert server["url"].startswith("http://127.0.0.1:")
        url = server["url"].replace("http://127.0.0.1", "https://127.0.0.2")
        token = Path(server["admin_token_path"]).read_text().strip()
        bundle = tmp_path / "authority.pem"
        for secret, is_trusted in ((tmp_path / "state" / "server_secret").read_text(), True), ("0" * 64, False):
            bundle.write_text(ServerAuthority(bytes.fromhex(secret)).certificate)
            with closing(everstep.client(url, token, ca_bundle=str(bundle))) as client:
                if is_trusted:
                    assert client.get_caller_identity()["Role"] == "admin"
                    continue
                with pytest.raises(EverstepError, match="CERTIFICATE_VERIFY_FAILED"), failures.translated():
                    client.get_caller_identity()


@pytest.mark.parametrize(
    "options",
    [
        {"tls_host": "server.example"},
        {"tls_host": "0.0.0.0"},
        {"tls_host": "127.0.0.1"},
        {"tls_host": "10.0.0.1", "host": "0.0.0.0", "is_other_host_allowed": True},
        {"tls_host": "10.0.0.1", "tls_certificate": Path("c"), "tls_key": Path("k")},
    ],
    ids=["a name", "each address", "the same address", "a part of the addresses", "two certificates"],
)
def test_a_second_address_that_cannot_be_is_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    with pytest.raises(InvalidSettings, match="--tls-host"):
        Settings(state_directory=tmp_path, bucket="b", region="us-east-1", **options)


def test_connections_after_a_renewal_see_the_new_certificate(tmp_path: Path) -> None:
    trusts = ssl.create_default_context()
    trusts.verify_flags |= ssl.VERIFY_X509_STRICT  # Python 3.13 sets it
    with Service(tmp_path) as service:
        trusts.load_verify_locations(cadata=service.services.peers.authority.certificate)
        host, port = service.tls_address.split(":")
        seen = []
        for _ in range(2):
            with (
                socket.create_connection((host, int(port)), 10) as line,
                trusts.wrap_socket(line, server_hostname=host) as spoken,
            ):
                seen.append(spoken.getpeercert()["serialNumber"])  # type: ignore[index]
            service.certificate.renew()
    assert seen[0] != seen[1]


class TlsService(Service):
    """The application behind a real server with a certificate, in this process."""

    def __init__(self, directory: Path, files: tuple[Path, Path]) -> None:
        super().__init__(directory, gate=Gate(header_seconds=0.2))
        options = {"ssl_certfile": str(files[0]), "ssl_keyfile": str(files[1])}
        self._server = PromptServer(server_config(self.app, self.gate, **options), self.gate)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._listener]})


@pytest.mark.security
@pytest.mark.parametrize("sent", [b"", b"\x16\x03\x01\x02\x00"], ids=["nothing", "the start of a handshake"])
def test_a_handshake_that_does_not_end_ends_the_connection(tmp_path, files, sent) -> None:
    with TlsService(tmp_path, files) as service:
        host, port = service.address.split(":")
        with socket.create_connection((host, int(port)), 10) as silent:
            silent.sendall(sent)
            with suppress(ConnectionResetError):
                assert silent.recv(1) == b""


@pytest.mark.security
@pytest.mark.parametrize(
    ("version", "is_taken"),
    [(ssl.TLSVersion.TLSv1_1, False), (ssl.TLSVersion.TLSv1_2, True), (ssl.TLSVersion.TLSv1_3, True)],
)
def test_no_version_of_tls_before_1_2_is_spoken(server, files, version, is_taken) -> None:
    context = ssl.create_default_context(cafile=str(files[0]))
    context.set_ciphers("ALL:@SECLEVEL=0")  # the client offers the old TLS version only with this setting
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        context.minimum_version = context.maximum_version = version
    host, port = server["url"].removeprefix("https://").split(":")
    refused = (
        nullcontext()
        if is_taken
        else pytest.raises(OSError, match=r"(?i)alert.protocol.version|unexpected.eof|reset by peer")
    )
    with (
        socket.create_connection((host, int(port)), 10) as line,
        refused,
        context.wrap_socket(line, server_hostname=host) as spoken,
    ):
        assert spoken.version() == version.name.replace("_", ".")
