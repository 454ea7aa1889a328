"""Writes tensors in the safetensors format: eight bytes of header length, a JSON header, then the tensors' bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path

import torch

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_safetensors(path: Path, tensors: Mapping[str, torch.Tensor]) -> None:
    """Write `tensors` to `path`, sorted by name."""
    header, pieces, end = {}, [], 0
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        data = tensor.reshape(-1).view(torch.uint8).numpy()
        header[name] = {
            "dtype": NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + data.nbytes],
        }
        pieces.append(data)
        end += data.nbytes
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for data in pieces:
            file.write(data)
