"""Multiplies matrices with a known product on each GPU: `python -P -m everstep.training.gpu_matmul`.

The agent runs it on a node without ranks (`worker.node.burn_in`). The integers from -8 to 8 have sums below 2^24, so
tensor cores with TF32 compute the product exactly, in any order of additions.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from collections.abc import Mapping
from typing import Final

import torch

SIZE: Final = 4096
DIGESTS: Final[Mapping[int, str]] = {
    256: "ad80e0a92140b6e13f91549d7a75a888b91da846f01077b83e0d2681a6acb360",
    4096: "ca77f476397a7f84797cbea01b6c6fa92af2fc48cb98552f6488df6e1538e32f",
}
"""SHA-256 of the product by matrix size, as little-endian integers of 4 bytes."""
REPEATS: Final = 200
"""About 0.1 s on an H100 and 1 s on an A10G."""


def measure(device: torch.device, size: int = SIZE, repeats: int = REPEATS) -> tuple[bool, float]:
    """Return whether all products are right, and the floating-point operations per second."""
    row = torch.arange(size, device=device)[:, None]
    column = torch.arange(size, device=device)[None, :]
    matrix = ((row * 31 + column * 17 + row * column % 101) % 17 - 8).float()
    product = first = matrix @ matrix
    _synchronize(device)
    begun = time.perf_counter()
    for _ in range(repeats):
        product = matrix @ matrix
    _synchronize(device)
    seconds = time.perf_counter() - begun
    data = first.to("cpu", torch.int32).numpy().tobytes()
    is_right = hashlib.sha256(data).hexdigest() == DIGESTS[size] and torch.equal(first, product)
    return is_right, 2 * size**3 * repeats / seconds


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    """Measure all GPUs of this node, one after the other, and print JSON."""
    torch.backends.cuda.matmul.allow_tf32 = True
    results = []
    for gpu in range(torch.cuda.device_count()):
        is_right, rate = measure(torch.device("cuda", gpu))
        results.append({"gpu": gpu, "is_right": is_right, "rate": rate})
    sys.stdout.write(json.dumps(results))


if __name__ == "__main__":
    main()
