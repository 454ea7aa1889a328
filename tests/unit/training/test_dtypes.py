"""The dtype table of the wire format covers torch's dtypes."""

from __future__ import annotations

import torch

from everstep.protocol.dtypes import ITEM_BYTES
from everstep.training.state_tree import dtype_name


def test_every_dtype_of_torch_has_its_size_on_the_wire() -> None:
    known = {dtype_name(dtype): dtype.itemsize for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
    assert known == {name: item_bytes for name, item_bytes in ITEM_BYTES.items() if hasattr(torch, name)}
