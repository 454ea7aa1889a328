"""A proof that a node knows its generation's key is valid only for one role in one session of that generation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import msgspec
import pytest

from everstep.protocol.ids import Generation, JobName, NodeId, Rank, RunId
from everstep.protocol.peer_messages import Open, session_mac

OPEN = Open(
    run=RunId("ab" * 16),
    generation=Generation(3),
    kind="replica",
    node_id=NodeId("i-a"),
    owner_rank=Rank(1),
    nonce=b"a" * 32,
)


LISTENER = NodeId("i-b")
JOB = JobName("gpt")


@dataclass(frozen=True)
class Proof:
    """All inputs of a proof."""

    key: bytes = b"k" * 32
    role: Literal["dialler", "listener"] = "dialler"
    opened: Open = OPEN
    nonce: bytes = b"b" * 32
    listener: NodeId = LISTENER
    job: JobName = JOB

    def mac(self) -> bytes:
        return session_mac(self.key, self.role, self.opened, self.nonce, self.listener, self.job)


def other(**fields: object) -> Open:
    """Return the first message of a session with other values in the given fields."""
    return msgspec.structs.replace(OPEN, **fields)


OTHERS = [
    Proof(key=b"K" * 32),
    Proof(role="listener"),
    Proof(nonce=b"c" * 32),
    Proof(listener=NodeId("i-c")),
    Proof(job=JobName("gpt2")),
    Proof(opened=other(run=RunId("cd" * 16))),
    Proof(opened=other(generation=Generation(4))),
    Proof(opened=other(kind="fetch")),
    Proof(opened=other(node_id=NodeId("i-x"))),
    Proof(opened=other(owner_rank=Rank(2))),
    Proof(opened=other(nonce=b"z" * 32)),
    # The rank and the node id contain the same characters in total, but divided differently.
    Proof(opened=other(node_id=NodeId("i-a1"), owner_rank=Rank(0)), listener=NodeId("i-b")),
]


def test_the_same_proof_twice_is_the_same() -> None:
    assert Proof().mac() == replace(Proof()).mac()
    assert len(Proof().mac()) == 32


@pytest.mark.parametrize("changed", OTHERS)
def test_any_difference_makes_another_proof(changed: Proof) -> None:
    assert changed.mac() != Proof().mac()


def test_fields_are_told_apart_by_their_lengths() -> None:
    left = Proof(job=JobName("ab"), opened=other(run=RunId("c")))
    right = Proof(job=JobName("a"), opened=other(run=RunId("bc")))
    assert left.mac() != right.mac()
