"""Collects the current faults of one generation on this node, for the node's reports to the control plane."""

from __future__ import annotations

from collections.abc import Callable

from everstep.protocol.agent_messages import NodeFault, OutputFailure
from everstep.protocol.ids import Rank
from everstep.protocol.limits import MAX_FAULTS, MAX_TEXT_CHARACTERS, cut

MAX_FAULTS_CHARACTERS = 64 * 1024
"""Total length of the messages above which a further message is cut to `SHORT_CHARACTERS`."""
SHORT_CHARACTERS = 200


class ReportedFaults:
    """The current faults of one generation on this node."""

    def __init__(self, on_change: Callable[[], None]) -> None:
        """Create the object. `on_change` is called after each report or withdrawal of a fault."""
        self._faults: dict[str, NodeFault] = {}
        self._on_change = on_change

    @property
    def present(self) -> tuple[NodeFault, ...]:
        """The reported faults, oldest first."""
        return tuple(self._faults.values())

    def report(
        self,
        code: str,
        message: str,
        *,
        is_permanent: bool = False,
        subject: str | None = None,
        shard: Rank | None = None,
        output: OutputFailure | None = None,
    ) -> None:
        """Report a fault of this node or of a rank to the control plane.

        Args:
            code: type of the fault, part of the protocol.
            message: a sentence for the user.
            is_permanent: True if a retry would have the same result.
            subject: a newer fault with the same code and subject replaces the fault. None for a fault that stays.
            shard: the owner of a shard that this node cannot load, in the launch that captured it; otherwise None.
            output: the output file that is not in S3; otherwise None.
        """
        key = f"{code} {cut(message) if subject is None else subject}"
        if key not in self._faults and len(self._faults) >= MAX_FAULTS:
            return  # A rank keeps sending different errors. The oldest errors suffice.
        spent = sum(len(fault.message) for other, fault in self._faults.items() if other != key)
        message = cut(message, MAX_TEXT_CHARACTERS if spent < MAX_FAULTS_CHARACTERS else SHORT_CHARACTERS)
        self._faults[key] = NodeFault(code=code, message=message, is_permanent=is_permanent, shard=shard, output=output)
        self._on_change()

    def withdraw(self, code: str, subject: str) -> None:
        """Remove the fault with this code and subject, if it is present."""
        if self._faults.pop(f"{code} {subject}", None) is not None:
            self._on_change()
