"""A routing rule that blocks the ranks' users from the instance's metadata, which contains the role's credentials.

    ip rule add pref 1 uidrange <first uid>-<last uid> to 169.254.169.254 prohibit

The rule needs no firewall, and remains when the agent ends, because ranks outlive the agent. The agent also verifies
the effect: as one of these users, it connects a socket without sending data.

Invariant: the agent reports the metadata as unreachable only after it has verified the effect. Source: ip-rule(8);
Amazon EC2 User Guide, `Limit access to the Instance Metadata Service`; systemd.network(5),
ManageForeignRoutingPolicyRules=.
"""

from __future__ import annotations

import asyncio
import logging
import subprocess
from collections.abc import Callable
from typing import Final
from urllib.parse import urlsplit

from worker.node.rank_user import RankUser, run_as

log = logging.getLogger(__name__)

ADDRESSES: Final = {"-4": "169.254.169.254", "-6": "fd00:ec2::254"}
AGAIN_SECONDS: Final = 30.0
"""Pause between two checks of the rule, which a restart of the network may remove."""
_COMMAND_SECONDS: Final = 10.0
_TRY = """
import errno, socket, sys
for address in sys.argv[1:]:
    try:
        with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_DGRAM) as line:
            line.connect((address, 80))
            print(address, "can be reached", end="; ")
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EAFNOSUPPORT):
            print(address, error.strerror, end="; ")
"""
"""Python program that runs as the ranks' user, and prints each metadata address that this user can reach.

A missing route is not enough, because the route may appear later. Without IPv6, its address counts as unreachable.
"""


def is_covered(endpoint: str | None) -> bool:
    """Return whether the routing rule for ranks blocks packets to the host of this metadata endpoint. Pure."""
    return endpoint is not None and urlsplit(endpoint).hostname in ADDRESSES.values()


def keep_away(user: RankUser) -> str:
    """Add the rule if it is missing, and return why the users still reach the metadata, or an empty string."""
    errors = []
    uids = f"{user.uid}-{user.uid + user.uid_count - 1}"
    for family, address in ADDRESSES.items():
        # systemd-networkd removes other programs' rules, but not kernel rules.
        words = [
            "ip",
            family,
            "rule",
            "add",
            "pref",
            "1",
            "uidrange",
            uids,
            "to",
            address,
            "prohibit",
            "protocol",
            "kernel",
        ]
        try:
            done = subprocess.run(words, capture_output=True, text=True, timeout=_COMMAND_SECONDS, check=False)
        except (OSError, subprocess.SubprocessError) as error:
            errors.append(f"ip: {error}")
            continue
        if done.returncode and "File exists" not in done.stderr:
            errors.append(f"{' '.join(words[:4])}: {done.stderr.strip()}")
    try:
        tried = run_as(user, _TRY, *ADDRESSES.values())
    except (OSError, subprocess.SubprocessError) as error:
        return f"the rule cannot be verified: {error}"
    if tried.returncode:
        return f"the rule cannot be verified: {tried.stderr.strip()[-200:]}"
    return f"{tried.stdout}{'; '.join(errors) or 'in spite of the rule'}" if tried.stdout else ""


async def keep_on(
    user: RankUser, reported: str, on_change: Callable[[str], None], seconds: float = AGAIN_SECONDS
) -> None:
    """Add the routing rule again whenever it is missing, until cancelled.

    `reported` is the sentence that the agent reports now. `on_change` receives each new sentence; an empty one means
    that the ranks cannot reach the metadata.
    """
    while True:
        await asyncio.sleep(seconds)
        exposure = exposure_of(await asyncio.to_thread(keep_away, user))
        if exposure != reported:
            reported = exposure
            log.warning("%s", exposure or "ranks no longer reach this instance's metadata")
            on_change(exposure)


def exposure_of(reason: str) -> str:
    """Return the sentence with which the agent reports a result of `keep_away`; empty for an empty reason. Pure."""
    return f"ranks can reach this instance's metadata, and with it the keys of its role: {reason}" if reason else ""
