"""Plugin of the AWS CLI that makes `aws everstep` send the token in EVERSTEP_TOKEN.

The endpoint rules that `everstep configure` installs contain a token and cannot read the environment. The user lists
this module under `[plugins]` in ~/.aws/config. Every `aws` command then imports the module, so it imports only the
standard library and `everstep.config`.

EVERSTEP_TOKEN overrides the token of the default profile. A named profile overrides the environment.

Invariant: the token is sent only to the endpoint that the rules chose, over https or to this machine. If
EVERSTEP_ENDPOINT_URL is set, the rules must have chosen the endpoint that it names.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from everstep.config import checked_endpoint

NAMED_PROFILES: Final = "everstep-"
"""Prefix of the AWS profiles that `everstep configure` creates for Everstep's named profiles."""


def awscli_initialize(hooks: Any) -> None:
    """Register the plugin. The AWS CLI calls it once, before it parses its arguments.

    Args:
        hooks: the event hooks of the AWS CLI's session.
    """
    hooks.register("session-initialized", _add_token)


def _add_token(session: Any, **_: Any) -> None:
    profile = session.get_config_variable("profile") or ""
    if os.environ.get("EVERSTEP_TOKEN", "").strip() and not profile.startswith(NAMED_PROFILES):
        session.register("before-sign.everstep", _sign)


def _sign(request: Any, **_: Any) -> None:
    if is_for(request.url, os.environ):
        request.headers["Authorization"] = f"Bearer {os.environ['EVERSTEP_TOKEN'].strip()}"


def is_for(url: str, environment: Mapping[str, str]) -> bool:
    """Return whether the token of the environment may be sent to a URL.

    Args:
        url: full URL of the request, with its path.
        environment: environment variables of the process; read for EVERSTEP_ENDPOINT_URL.

    Returns:
        False if EVERSTEP_ENDPOINT_URL names a different endpoint.

    Raises:
        ConfigurationError: the token would cross a network unencrypted.
    """
    checked_endpoint(url)
    endpoint = environment.get("EVERSTEP_ENDPOINT_URL", "").rstrip("/")
    return not endpoint or url.startswith(f"{endpoint}/")
