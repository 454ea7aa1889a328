"""Chooses how the chunks of replicas travel between nodes: over TCP, or over NIXL with an RDMA device.

The agent uses the choice when it starts. `everstep doctor --node` shows the same choice before that.

Invariant: pure. NIXL is chosen only with an RDMA device. Without one, UCX would serve RDMA requests in software on an
unauthenticated TCP port, and any machine that reaches the port could write to the agent's memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal, get_args

TransportSetting = Literal["auto", "tcp", "nixl"]
TRANSPORT_SETTINGS: tuple[TransportSetting, ...] = get_args(TransportSetting)
NIXL_MODULE: Final = "nixl_cu12._bindings"
"""Private module of the wheel nixl-cu12, with which the agent opens NIXL.

The agent does not use the wheel's public API, because that API cannot set the delay of NIXL's progress thread. Without
a delay, this thread polls without a pause and occupies a core.
"""


class ReplicaTransport(StrEnum):
    """Names the way in which a node exchanges the chunks of replicas with other nodes.

    - NIXL: by RDMA, with each node that uses NIXL too. A generation with TLS between nodes uses TCP.
    - TCP: over TCP connections only.
    """

    NIXL = "nixl"
    TCP = "tcp"


@dataclass(frozen=True, slots=True)
class TransportChoice:
    """The transport that an agent tries first, with the reason for its log."""

    uses_nixl: bool
    reason: str
    is_warning: bool = False
    """True if the operator requested NIXL and does not get it."""


def choose_transport(setting: TransportSetting, devices: Sequence[str]) -> TransportChoice:
    """Return the transport for the chunks of replicas.

    Args:
        setting: the agent's option `--replica-transport`.
        devices: names of this node's RDMA devices (EFA, InfiniBand or RoCE).

    Returns:
        The choice. The agent still uses TCP if it cannot open NIXL on the devices.
    """
    if setting == "tcp":
        return TransportChoice(uses_nixl=False, reason="--replica-transport is tcp")
    if devices:
        return TransportChoice(uses_nixl=True, reason=f"found {', '.join(devices)}")
    return TransportChoice(
        uses_nixl=False, reason="this node has no EFA or InfiniBand device", is_warning=setting == "nixl"
    )
