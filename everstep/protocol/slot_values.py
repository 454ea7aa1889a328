"""Defines the content of the field `values` in a slot's index. Pure.

The training hooks write these values for each snapshot and read them when they restore it. Programs that read
checkpoints use only `pretrained` and `files`.
"""

from __future__ import annotations

from typing import Final

import msgspec

from everstep.protocol.errors import UNDECODABLE

ADAPTER_FILE: Final = "adapter_config.json"
"""Configuration of PEFT's adapters of a model."""
BASE_FILE: Final = "base_config.json"
"""`config.json` of the model inside PEFT's adapters."""
GENERATION_FILE: Final = "generation_config.json"


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
    files: dict[str, bytes] = {}
    """Further files for an export, compressed by zlib. The key is the path of the model, a colon and the file's name.

    They are `ADAPTER_FILE`, `BASE_FILE`, `GENERATION_FILE` and the files of the tokenizer. Only rank 0 has them. Slots
    of earlier versions have no such field.
    """


_decoder = msgspec.msgpack.Decoder(SlotValues)


def values_of(values: bytes) -> SlotValues:
    """Decode `SlotValues`. The result has no configurations and no files if the values do not decode."""
    try:
        return _decoder.decode(values)
    except UNDECODABLE:
        return SlotValues(b"", b"", b"")
