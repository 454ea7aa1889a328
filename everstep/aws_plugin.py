"""A plugin of the AWS CLI: `aws everstep` sends the token of EVERSTEP_TOKEN.

The endpoint rules that `everstep configure` installs hold a token and cannot read the environment. The user names this
module in `[plugins]` of ~/.aws/config. Every `aws` command imports it then, so it imports the standard library and
`everstep.config` alone.

The precedence is the SDK's: EVERSTEP_TOKEN wins over the token of the default profile; a named profile wins over the
environment.

Invariant: the token goes to the endpoint that the rules chose and that EVERSTEP_ENDPOINT_URL, where it is set, names;
over https or to this machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Final

from everstep.config import checked_endpoint

NAMED_PROFILES: Final = "everstep-"
"""Begins the AWS profile of each named profile of Everstep."""


def awscli_initialize(hooks: Any) -> None:
    """Register the plugin. The AWS CLI calls this once, before it reads its arguments.

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
    """Return whether the token of the environment may go to a URL.

    Args:
        url: of a request.
        environment: the process's.

    Returns:
        False where EVERSTEP_ENDPOINT_URL names another endpoint: its token is not sent here.

    Raises:
        ConfigurationError: the token would cross a network in the clear.
    """
    checked_endpoint(url)
    endpoint = environment.get("EVERSTEP_ENDPOINT_URL", "").rstrip("/")
    return not endpoint or url.startswith(f"{endpoint}/")
