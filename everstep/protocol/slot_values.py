"""Defines the content of the field `values` in a slot's index. Pure.

Programs that read checkpoints use only `pretrained` and `files`.
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
    """msgpack of facts about models and optimizers. Its digest is the slot's layout hash."""
    adapters: bytes
    """Plain values of models and optimizers (`state_tree.encode`), which a restore decodes first."""
    others: bytes
    """All other plain values, such as data positions and random generators (`state_tree.encode`)."""
    pretrained: dict[str, str] = {}
    """`config.json` of each model of Hugging Face's transformers, by the model's path within the names of parameters.
    The path is empty if the script registered the model itself. Slots of earlier versions have no such field.
    """
    files: dict[str, bytes] = {}
    """Further files for an export, compressed by zlib, by the model's path, a colon and the file's name. Only on rank
    0. They are `ADAPTER_FILE`, `BASE_FILE`, `GENERATION_FILE` and the files of the tokenizer. Slots of earlier versions
    have no such field.
    """


_decoder = msgspec.msgpack.Decoder(SlotValues)


def values_of(values: bytes) -> SlotValues:
    """Decode `SlotValues`. The result has no configurations and no files if the values do not decode."""
    try:
        return _decoder.decode(values)
    except UNDECODABLE:
        return SlotValues(b"", b"", b"")
