"""Where the client finds the service and its token.

    1. what is passed to `client()`; a profile that is named there wins over the environment
    2. EVERSTEP_ENDPOINT_URL, EVERSTEP_TOKEN, EVERSTEP_CA_BUNDLE
    3. $XDG_CONFIG_HOME/everstep/config.toml (~/.config/everstep/config.toml), as `everstep configure` writes it:

        endpoint_url = "…"          the profile "default"
        token = "…"
        ca_bundle = "…"             where the authority is your own

        [profiles.staging]          others; EVERSTEP_PROFILE names the one that counts
        endpoint_url = "…"
        token = "…"

Invariant: a token never leaves this machine unencrypted, is never read from a file that others can read, and one from
the file goes to the endpoint that it was written down with and to no other.
"""

from __future__ import annotations

import json
import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from everstep.errors import ConfigurationError
from everstep.protocol.loopback import is_this_machine, url_host

DEFAULT_PROFILE: Final = "default"
_PROFILE_PATTERN: Final = r"[A-Za-z0-9_-]{1,63}"


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """Whom to call, as whom."""

    endpoint_url: str
    token: str = field(repr=False)
    ca_bundle: str | None = None
    """PEM file with the authorities that the service's certificate may come from; None: those that everybody knows."""


def load(
    endpoint_url: str | None = None,
    token: str | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    ca_bundle: str | None = None,
    profile: str | None = None,
) -> ClientConfig:
    """Return the configuration that counts.

    Args:
        endpoint_url: of the service; wins over all else.
        token: wins over all else.
        environment: the process's.
        ca_bundle: wins over all else.
        profile: of the user's file; where it is named, the environment says nothing.

    Returns:
        Where to call, and the token to send.

    Raises:
        ConfigurationError: something is missing, the endpoint is not a URL, or the token would be at risk.
    """
    said = environment if profile is None else {}
    name = profile or environment.get("EVERSTEP_PROFILE") or DEFAULT_PROFILE
    filed = _profile(_path(environment), name) if not (endpoint_url and token) else {}
    url = endpoint_url or said.get("EVERSTEP_ENDPOINT_URL") or filed.get("endpoint_url")
    secret = token or said.get("EVERSTEP_TOKEN")
    hint = (
        'Local cloud: eval "$(everstep local env)". Otherwise: everstep configure, or set '
        "EVERSTEP_ENDPOINT_URL and EVERSTEP_TOKEN."
    )
    if not url:
        raise ConfigurationError("No endpoint is configured.", hint=hint)
    checked = checked_endpoint(url)
    is_filed = checked == (filed.get("endpoint_url") or checked).rstrip("/")
    ca_bundle = ca_bundle or said.get("EVERSTEP_CA_BUNDLE") or (filed.get("ca_bundle") if is_filed else None)
    if ca_bundle and not Path(ca_bundle).is_file():
        raise ConfigurationError(f"The CA bundle {ca_bundle} is not a file.")
    if not secret and filed.get("token"):
        if not is_filed:
            raise ConfigurationError(
                f"The token of the profile {name!r} is for {filed['endpoint_url']}; it is not sent to {checked}.",
                hint="Set EVERSTEP_TOKEN for it.",
            )
        secret = filed["token"]
    if not secret:
        raise ConfigurationError(f"No token is configured for {url}.", hint=hint)
    return ClientConfig(checked, secret.strip(), ca_bundle or None)


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
            f"The endpoint {url} is plain http to another machine: the token would cross the network in the clear.",
            hint="Use its https endpoint.",
        )
    return url.rstrip("/")


def write(
    configuration: ClientConfig, environment: Mapping[str, str] = os.environ, *, profile: str = DEFAULT_PROFILE
) -> Path:
    """Write one profile of the user's configuration; called by `everstep configure`.

    Args:
        configuration: what counts from now on, unless the environment says otherwise.
        environment: the process's.
        profile: its name; what the file says of others stays.

    Returns:
        The file, readable by its owner alone.

    Raises:
        ConfigurationError: the profile cannot have this name, or the file that is there cannot be read.
    """
    if not re.fullmatch(_PROFILE_PATTERN, profile):
        raise ConfigurationError(f"A profile cannot be called {profile!r}: letters, digits, - and _, 63 at most.")
    path = _path(environment)
    profiles = {**_read_file(path), profile: _written(configuration)}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        for name in sorted(profiles, key=lambda name: (name != DEFAULT_PROFILE, name)):
            file.write("" if name == DEFAULT_PROFILE else f"\n[profiles.{name}]\n")
            # A JSON string is a TOML string, too.
            file.writelines(f"{setting} = {json.dumps(value)}\n" for setting, value in profiles[name].items())
    draft.replace(path)
    return path


def profiles(environment: Mapping[str, str] = os.environ) -> dict[str, ClientConfig]:
    """Return every profile of the user's file that has an endpoint and a token, by name."""
    found = _read_file(_path(environment))
    return {
        name: ClientConfig(values["endpoint_url"].rstrip("/"), values["token"], values.get("ca_bundle"))
        for name, values in found.items()
        if values.get("endpoint_url") and values.get("token")
    }


def _written(configuration: ClientConfig) -> dict[str, str]:
    bundle = {} if configuration.ca_bundle is None else {"ca_bundle": str(Path(configuration.ca_bundle).resolve())}
    return {"endpoint_url": configuration.endpoint_url, "token": configuration.token, **bundle}


def _path(environment: Mapping[str, str]) -> Path:
    home = environment.get("XDG_CONFIG_HOME") or Path(environment.get("HOME", "~")).expanduser() / ".config"
    return Path(home) / "everstep" / "config.toml"


def _profile(path: Path, name: str) -> dict[str, str]:
    found = _read_file(path)
    if name not in found and name != DEFAULT_PROFILE:
        others = ", ".join(sorted(found)) or "none"
        raise ConfigurationError(
            f"{path} has no profile {name!r}; it has: {others}.", hint=f"everstep configure --profile {name}"
        )
    return found.get(name, {})


def _read_file(path: Path) -> dict[str, dict[str, str]]:
    """Return the settings of each profile."""
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
    named = values.pop("profiles", {})
    if not isinstance(named, dict) or not all(isinstance(settings, dict) for settings in named.values()):
        raise ConfigurationError(f"{path}: profiles must be tables, as [profiles.staging].")
    profiles: dict[str, dict[str, str]] = {**named, **({DEFAULT_PROFILE: values} if values else {})}
    for settings in profiles.values():
        _check(path, settings, mode)
    return profiles


def _check(path: Path, settings: Mapping[str, object], mode: int) -> None:
    unknown = sorted(settings.keys() - {"endpoint_url", "token", "ca_bundle"})
    if unknown:
        raise ConfigurationError(
            f"{path} has settings that are not known: {', '.join(unknown)}.",
            hint="It may have endpoint_url, token, ca_bundle and profiles with these.",
        )
    wrong = sorted(name for name, value in settings.items() if not isinstance(value, str))
    if wrong:
        raise ConfigurationError(f"{path}: {', '.join(wrong)} must be text.")
    if "token" in settings and mode & 0o077:
        raise ConfigurationError(f"{path} holds a token and can be read by others.", hint=f"chmod 600 {path}")
