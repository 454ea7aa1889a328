"""Where the client finds the service and its token.

    1. what is passed to `client()`
    2. EVERSTEP_ENDPOINT_URL, EVERSTEP_TOKEN, EVERSTEP_CA_BUNDLE
    3. $XDG_CONFIG_HOME/everstep/config.toml (~/.config/everstep/config.toml): endpoint_url = "…", token = "…", ca_bundle = "…"

Invariant: a token never leaves this machine unencrypted, and is never read from a file that others can read.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from everstep.errors import ConfigurationError
from everstep.protocol.loopback import is_this_machine, url_host


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Whom to call, as whom."""

    endpoint_url: str
    token: str = field(repr=False)
    ca_bundle: str | None = None
    """PEM file with the authorities that the service's certificate may come from; None: those that everybody knows."""


def load(
    endpoint_url: str | None = None, token: str | None = None, environment: Mapping[str, str] = os.environ, *, ca_bundle: str | None = None
) -> ClientConfig:
    """Return the configuration that counts.

    Args:
        endpoint_url: of the service; wins over all else.
        token: wins over all else.
        environment: the process's.
        ca_bundle: wins over all else.

    Returns:
        Where to call, and the token to send.

    Raises:
        ConfigurationError: something is missing, the endpoint is not a URL, or the token would be at risk.
    """
    filed = _read_file(_path(environment)) if not (endpoint_url and token) else {}
    ca_bundle = ca_bundle or environment.get("EVERSTEP_CA_BUNDLE") or filed.get("ca_bundle")
    if ca_bundle and not Path(ca_bundle).is_file():
        raise ConfigurationError(f"The CA bundle {ca_bundle} is not a file.")
    url = endpoint_url or environment.get("EVERSTEP_ENDPOINT_URL") or filed.get("endpoint_url")
    secret = token or environment.get("EVERSTEP_TOKEN") or filed.get("token")
    hint = 'Local cloud: eval "$(everstep local env)". Otherwise: everstep configure, or set EVERSTEP_ENDPOINT_URL and EVERSTEP_TOKEN.'
    if not url:
        raise ConfigurationError("No endpoint is configured.", hint=hint)
    if not secret:
        raise ConfigurationError(f"No token is configured for {url}.", hint=hint)
    return ClientConfig(checked_endpoint(url), secret.strip(), ca_bundle or None)


def checked_endpoint(url: str) -> str:
    """Return the endpoint without a trailing slash.

    Args:
        url: of the service.

    Returns:
        The same URL, as paths are appended to it.

    Raises:
        ConfigurationError: it is not an http(s) URL, or is plain http to another machine.
    """
    host = url_host(url)
    if not host:
        raise ConfigurationError(f"The endpoint {url!r} is not an http or https URL.")
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ConfigurationError("The endpoint holds a user name or a password.", hint="Set EVERSTEP_TOKEN instead.")
    if parts.scheme == "http" and not is_this_machine(host):
        raise ConfigurationError(
            f"The endpoint {url} is plain http to another machine: the token would cross the network in the clear.", hint="Use its https endpoint."
        )
    return url.rstrip("/")


def write(configuration: ClientConfig, environment: Mapping[str, str] = os.environ) -> Path:
    """Write the user's configuration; called by `everstep configure`.

    Args:
        configuration: what counts from now on, unless the environment says otherwise.
        environment: the process's.

    Returns:
        The file, readable by its owner alone.
    """
    path = _path(environment)
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        # A JSON string is a TOML string, too.
        file.write(f"endpoint_url = {json.dumps(configuration.endpoint_url)}\ntoken = {json.dumps(configuration.token)}\n")
        if configuration.ca_bundle is not None:
            file.write(f"ca_bundle = {json.dumps(str(Path(configuration.ca_bundle).resolve()))}\n")
    draft.replace(path)
    return path


def _path(environment: Mapping[str, str]) -> Path:
    home = environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".config"
    return Path(home) / "everstep" / "config.toml"


def _read_file(path: Path) -> dict[str, str]:
    try:
        text = path.read_text()
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be read: {error.strerror}.") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigurationError(f"{path} is not TOML: {error}.") from error
    unknown = sorted(values.keys() - {"endpoint_url", "token", "ca_bundle"})
    if unknown:
        raise ConfigurationError(
            f"{path} has settings that are not known: {', '.join(unknown)}.", hint="It may have endpoint_url, token and ca_bundle."
        )
    wrong = sorted(name for name, value in values.items() if not isinstance(value, str))
    if wrong:
        raise ConfigurationError(f"{path}: {', '.join(wrong)} must be text.")
    if "token" in values and mode & 0o077:
        raise ConfigurationError(f"{path} holds a token and can be read by others.", hint=f"chmod 600 {path}")
    return values
