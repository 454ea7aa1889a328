"""Finds the service's endpoint and the client's token. It reads these sources in order and uses the first value:

    1. arguments of `client()`; if they name a profile, the environment is ignored
    2. EVERSTEP_ENDPOINT_URL, EVERSTEP_TOKEN, EVERSTEP_CA_BUNDLE
    3. $XDG_CONFIG_HOME/everstep/config.toml (~/.config/everstep/config.toml), written by `everstep configure`:

        endpoint_url = "…"          the profile "default"
        token = "…"
        ca_bundle = "…"             if the certificate authority is your own

        [profiles.staging]          more profiles; EVERSTEP_PROFILE selects one
        endpoint_url = "…"
        token = "…"

Invariant: a token never crosses a network unencrypted, and is never read from a file that other users can read. A token
from the file is sent only to the endpoint of the same profile.
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
from everstep.host.loopback import is_this_machine, url_host
from everstep.json_values import is_object

DEFAULT_PROFILE: Final = "default"
_PROFILE_PATTERN: Final = r"[A-Za-z0-9_-]{1,63}"


@dataclass(frozen=True, slots=True)
class ClientConfig:
    """The endpoint and the credentials of a client."""

    endpoint_url: str
    token: str = field(repr=False)
    ca_bundle: str | None = None
    """PEM file with the accepted certificate authorities.

    None: the public authorities.
    """


def load(
    endpoint_url: str | None = None,
    token: str | None = None,
    environment: Mapping[str, str] = os.environ,
    *,
    ca_bundle: str | None = None,
    profile: str | None = None,
) -> ClientConfig:
    """Return the effective configuration.

    Args:
        endpoint_url: URL of the service; None: the environment's, or else the profile's.
        token: bearer token; None: the environment's, or else the profile's.
        environment: variables of the process; read if `profile` is None.
        ca_bundle: PEM file of accepted certificate authorities; None: the environment's, or else the profile's.
        profile: name of a profile in the user's file. If set, the environment is ignored.

    Returns:
        The endpoint, the token and the certificate authorities.

    Raises:
        ConfigurationError: a setting is missing, the endpoint is not a URL, or the token would be exposed.
    """
    variables: Mapping[str, str] = environment if profile is None else {}
    name = profile or environment.get("EVERSTEP_PROFILE") or DEFAULT_PROFILE
    filed: Mapping[str, str] = _profile(_path(environment), name) if not (endpoint_url and token) else {}
    url = endpoint_url or variables.get("EVERSTEP_ENDPOINT_URL") or filed.get("endpoint_url")
    secret = token or variables.get("EVERSTEP_TOKEN")
    hint = (
        'Local cloud: eval "$(everstep local env)". Otherwise: everstep configure, or set '
        "EVERSTEP_ENDPOINT_URL and EVERSTEP_TOKEN."
    )
    if not url:
        raise ConfigurationError("No endpoint is configured.", hint=hint)
    checked = checked_endpoint(url)
    is_filed = checked == (filed.get("endpoint_url") or checked).rstrip("/")
    ca_bundle = ca_bundle or variables.get("EVERSTEP_CA_BUNDLE") or (filed.get("ca_bundle") if is_filed else None)
    if ca_bundle and not Path(ca_bundle).is_file():
        raise ConfigurationError(f"The CA bundle {ca_bundle} is not a file.")
    if not secret and filed.get("token"):
        if not is_filed:
            raise ConfigurationError(
                (
                    f"The token of the profile {name!r} is for {filed['endpoint_url']}; the client does not send "
                    f"it to {checked}."
                ),
                hint="Set EVERSTEP_TOKEN for this endpoint.",
            )
        secret = filed["token"]
    if not secret:
        raise ConfigurationError(f"No token is configured for {url}.", hint=hint)
    return ClientConfig(checked, secret.strip(), ca_bundle or None)


def checked_endpoint(url: str) -> str:
    """Check that a token may be sent to an endpoint, and return the endpoint's URL without a trailing slash.

    Args:
        url: URL of the service, as the user wrote it.

    Returns:
        The URL, to which callers append paths.

    Raises:
        ConfigurationError: the URL is not http or https, contains credentials, or is plain http to another machine.
    """
    host = url_host(url)
    if not host:
        raise ConfigurationError(f"The endpoint {url!r} is not an http or https URL.")
    parts = urlsplit(url)
    if parts.username or parts.password:
        raise ConfigurationError("The endpoint contains a user name or a password.", hint="Set EVERSTEP_TOKEN instead.")
    if parts.scheme == "http" and not is_this_machine(host):
        raise ConfigurationError(
            f"The endpoint {url} uses plain http to another machine: the token would cross the network unencrypted.",
            hint="Use an https endpoint.",
        )
    return url.rstrip("/")


def write(
    configuration: ClientConfig, environment: Mapping[str, str] = os.environ, *, profile: str = DEFAULT_PROFILE
) -> Path:
    """Write one profile to the user's configuration file. `everstep configure` calls it.

    Args:
        configuration: the new content of the profile.
        environment: variables of the process, which determine the path of the configuration file.
        profile: name of the profile. Other profiles in the file remain unchanged.

    Returns:
        The file, readable by its owner only.

    Raises:
        ConfigurationError: the profile name is invalid, or the existing file is unreadable.
    """
    if not re.fullmatch(_PROFILE_PATTERN, profile):
        raise ConfigurationError(
            f"A profile cannot have the name {profile!r}. Use at most 63 letters, digits, - and _."
        )
    path = _path(environment)
    profiles = {**_read_file(path), profile: _written(configuration)}
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        for name in sorted(profiles, key=lambda name: (name != DEFAULT_PROFILE, name)):
            file.write("" if name == DEFAULT_PROFILE else f"\n[profiles.{name}]\n")
            # Every JSON string is also a TOML string.
            file.writelines(f"{setting} = {json.dumps(value)}\n" for setting, value in profiles[name].items())
    draft.replace(path)
    return path


def profiles(environment: Mapping[str, str] = os.environ) -> dict[str, ClientConfig]:
    """Return the profiles in the user's file that have an endpoint and a token, by name."""
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
            f"{path} has no profile {name!r}; its profiles: {others}.", hint=f"everstep configure --profile {name}"
        )
    return found.get(name, {})


def _read_file(path: Path) -> dict[str, dict[str, str]]:
    """Return the settings of each profile. Without a file, return no profiles."""
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
    if not is_object(named) or not all(is_object(settings) for settings in named.values()):
        raise ConfigurationError(f"{path}: profiles must be tables, such as [profiles.staging].")
    profiles: dict[str, dict[str, str]] = {**named, **({DEFAULT_PROFILE: values} if values else {})}
    for settings in profiles.values():
        _check(path, settings, mode)
    return profiles


def _check(path: Path, settings: Mapping[str, object], mode: int) -> None:
    unknown = sorted(settings.keys() - {"endpoint_url", "token", "ca_bundle"})
    if unknown:
        raise ConfigurationError(
            f"{path} has unknown settings: {', '.join(unknown)}.",
            hint="Allowed settings: endpoint_url, token, ca_bundle and profiles that contain them.",
        )
    wrong = sorted(name for name, value in settings.items() if not isinstance(value, str))
    if wrong:
        raise ConfigurationError(f"{path}: {', '.join(wrong)} must be text.")
    if "token" in settings and mode & 0o077:
        raise ConfigurationError(
            f"{path} contains a token, and other users can read the file.", hint=f"chmod 600 {path}"
        )
