"""Keeps the user of ranks from the instance's metadata: whoever reaches it gets the keys of the instance's role.

A routing rule, which takes no firewall and no module: packets of that uid to those addresses are prohibited, in either
family.

    ip rule add pref 1 uidrange <first uid>-<last uid> to 169.254.169.254 prohibit

What counts is not that the rule was made but that it holds: it is tried as that user, by a socket that is connected and
sends nothing. The rule stays when the agent ends, for ranks outlive it; it goes with the instance. It is marked as the
kernel's, because systemd-networkd removes strangers' rules.

Invariant: the agent says that metadata is out of reach only after it has seen that.
Source: ip-rule(8); Amazon EC2 User Guide, `Limit access to the Instance Metadata Service`; systemd.network(5),
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
"""Between two looks whether the rule is still there: who restarts the network may have removed it."""
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
"""Only a refusal counts: what has no route now may have one later. A machine without IPv6 cannot reach it there."""


def is_covered(endpoint: str | None) -> bool:
    """Say whether a metadata endpoint is one that the rule is about. Pure."""
    return endpoint is not None and urlsplit(endpoint).hostname in ADDRESSES.values()


def keep_away(user: RankUser) -> str:
    """Make the rule, where it is not there, and try it. Blocks for some 0.1 s.

    Args:
        user: of the ranks.

    Returns:
        Why this user can reach the instance's metadata all the same; empty when it cannot.
    """
    told = []
    uids = f"{user.uid}-{user.uid + user.uid_count - 1}"
    for family, address in ADDRESSES.items():
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
            told.append(f"ip: {error}")
            continue
        if done.returncode and "File exists" not in done.stderr:
            told.append(f"{' '.join(words[:4])}: {done.stderr.strip()}")
    try:
        tried = run_as(user, _TRY, *ADDRESSES.values())
    except (OSError, subprocess.SubprocessError) as error:
        return f"it could not be tried: {error}"
    if tried.returncode:
        return f"it could not be tried: {tried.stderr.strip()[-200:]}"
    return f"{tried.stdout}{'; '.join(told) or 'in spite of the rule'}" if tried.stdout else ""


async def keep_on(user: RankUser, told: str, on_change: Callable[[str], None], seconds: float = AGAIN_SECONDS) -> None:
    """Make the rule again where it has gone; until cancelled. One task of the agent.

    Args:
        user: of the ranks.
        told: the exposure that is known.
        on_change: takes another one, or that there is none any more.
        seconds: between two looks.
    """
    while True:
        await asyncio.sleep(seconds)
        exposure = exposure_of(await asyncio.to_thread(keep_away, user))
        if exposure != told:
            told = exposure
            log.warning("%s", exposure or "ranks no longer reach this instance's metadata")
            on_change(exposure)


def exposure_of(reason: str) -> str:
    """Say what is told of a node. Pure.

    Args:
        reason: what `keep_away` has returned.

    Returns:
        A sentence; empty where ranks are kept away.
    """
    return f"ranks can reach this instance's metadata, and with it the keys of its role: {reason}" if reason else ""
