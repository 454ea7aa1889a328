"""Facts of incidents, and a reason of a failed job, for the tests of their sentences."""

from __future__ import annotations

from control_plane.core.observed.facts import ControlPlaneAbsent, Faulty, InstanceEnded, NodeFaulty, RankEnded
from control_plane.core.observed.incidents import FailureRecord, Repeated
from control_plane.core.observed.reasons import GaveUp
from everstep.protocol.agent_messages import ExitClass
from everstep.protocol.ids import Generation, NodeId, Rank, Step

NODE = NodeId("i-1")
ABSENT = ControlPlaneAbsent(seconds=172, until=1_772_356_794.0)
CRASHED = RankEnded(rank=Rank(3), node_id=NODE, exit_class=ExitClass.CRASHED, code=-11)
EXITED = RankEnded(rank=Rank(3), node_id=NODE, exit_class=ExitClass.ERROR, code=1)
XID = NodeFaulty(node_id=NODE, fault=Faulty(code="gpu_xid", text="gpu 5: Xid 79", xid=79, device="gpu 5"))


def ended(text: str = "", *, code: str = "", state: str = "terminated") -> InstanceEnded:
    return InstanceEnded(node_id=NODE, state=state, code=code, text=f"{code}: {text}" if code else text)


def gave_up(error: str | None = "KeyError: 'labels'", *, count: int = 4, place: str | None = None) -> GaveUp:
    failure = FailureRecord(
        generation=Generation(1),
        step=Step(7),
        exit_class=ExitClass.ERROR,
        code=1,
        at=90.0,
        max_boundary=Step(1132),
        error=error,
        error_place=place,
    )
    return GaveUp(because=Repeated(count=count, failure=failure))
