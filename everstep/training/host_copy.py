"""Copies saved tensors into live tensors in host memory, in pieces of the fastest size.

Up to the size of a core's second-level cache, glibc's `memmove` uses `rep movsb`, which does not read the target's old
content. For larger copies on AMD processors, glibc reads the target first, as torch does for any size.
"""

from __future__ import annotations

import ctypes
from itertools import groupby

import torch

from everstep.training.copier import Copies, copy_now
from everstep.training.state_tree import PLAIN_CLASSES

PIECE_BYTES = 512 * 1024
"""Half the size of the smallest common second-level cache."""


def copy_into_live(copies: Copies) -> None:
    """Copy each source to its target of equal shape, and mark the targets as changed for autograd."""
    has_threads = torch.get_num_threads() > 1  # With several threads, torch copies faster than memmove.
    pairs = zip(copies.sources, copies.targets, strict=True)
    for is_plain, run in groupby(pairs, lambda pair: not has_threads and _are_equal_bytes(*pair)):
        sources, targets = zip(*run, strict=True)
        if not is_plain:
            with torch.inference_mode():
                # Use inference mode, because torch forbids writes to inference tensors (for example a teacher's
                # weights) outside of it.
                copy_now(Copies(sources, targets))
            continue
        for source, target in zip(sources, targets, strict=True):
            _move(target.data_ptr(), source.data_ptr(), target.nbytes)
        torch.autograd.graph.increment_version(targets)


def _are_equal_bytes(source: torch.Tensor, target: torch.Tensor) -> bool:
    """Return whether a copy stays within host memory and needs no conversion."""
    return (
        type(source) in PLAIN_CLASSES
        and type(target) in PLAIN_CLASSES
        and source.is_cpu
        and target.is_cpu
        and source.dtype == target.dtype
        and source.shape == target.shape
        and source.is_contiguous()
        and target.is_contiguous()
        and not (source.is_conj() or source.is_neg() or target.is_conj() or target.is_neg())
    )


def _move(to: int, of: int, size: int) -> None:
    for begin in range(0, size, PIECE_BYTES):
        ctypes.memmove(to + begin, of + begin, min(PIECE_BYTES, size - begin))
