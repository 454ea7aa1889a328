"""Defines the content of the field `values` in a slot's index. Pure.

The training hooks write these values for each snapshot and read them when they restore it. Programs that read
checkpoints use only `pretrained`.
"""

from __future__ import annotations

import msgspec

from everstep.protocol.errors import UNDECODABLE


class SlotValues(msgspec.Struct, frozen=True, array_like=True):
    """All values of one rank's snapshot that are not tensors."""

    facts: bytes
    """Facts about models and optimizers, encoded as msgpack. Their digest is the layout hash of the slot.

    If the layout hash of a slot differs from that of a launch, an error message lists the facts that differ.
    """
    adapters: bytes
    """Plain values of models and optimizers, encoded by `state_tree.encode`. A restore decodes them before all other
    values."""
    others: bytes
    """All other plain values, such as data positions and random generators, encoded by `state_tree.encode`."""
    pretrained: dict[str, str] = {}
    """Content of `config.json` of each registered model from Hugging Face's transformers.

    The key is the path of the model within the names of parameters. The path is empty if the script registered the
    model itself. Slots of earlier versions have no such field.
    """


_decoder = msgspec.msgpack.Decoder(SlotValues)


def pretrained_of(values: bytes) -> dict[str, str]:
    """Return the field `pretrained` of encoded `SlotValues`. Empty if the values do not decode."""
    try:
        return _decoder.decode(values).pretrained
    except UNDECODABLE:
        return {}
