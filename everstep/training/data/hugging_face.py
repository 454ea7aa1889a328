"""Decides whether the state of a streaming dataset of Hugging Face `datasets` restores its position exactly.

The state is not exact for shuffle buffers, for a `map` or `filter` over tables, and for batched functions and
generators that draw random numbers. The session then reads the epoch again from its beginning.

Source: `IterableDataset.state_dict` and the classes of `datasets.iterable_dataset`, version 4.7. The decision reads
private attributes; a dataset in which they are missing counts as inexact.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import xxhash

from everstep.training.adapters.base import qualified_name
from everstep.training.versions import check_version

EXACT = {
    "ArrowExamplesIterable",
    "ExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "MappedExamplesIterable",
    "RepeatExamplesIterable",
    "SelectColumnsIterable",
    "SkipExamplesIterable",
    "StepExamplesIterable",
    "TakeExamplesIterable",
}
"""Classes whose state restores the position exactly, as tests show."""


def inexact_part(thing: object) -> str | None:
    """Describe the part of a streaming dataset whose state is inexact, or return None. Raises UnsupportedVersion if
    Everstep is not tested with the installed major version of `datasets`.
    """
    parts = list(_parts(thing))
    if parts:
        check_version("datasets")
    for part in parts:
        kind = type(part).__name__
        if kind == "BufferShuffledExamplesIterable":
            return "a shuffle buffer, whose content its state does not hold"
        if "MultiSources" in kind:
            return "several datasets in one, which are read ahead"
        if kind not in EXACT:
            return f"a part of the class {kind}"
        if kind == "ExamplesIterable" and not _is_file_reader(part):
            return "a Python generator, which runs again from the beginning of its shard and may draw random numbers"
        if kind == "FormattedExamplesIterable" and getattr(getattr(part, "ex_iterable", None), "iter_arrow", True):
            return "a map or filter over tables, which counts all rows of a table as read"
        if getattr(part, "batched", False):
            return "a batched map or filter, which runs its function again"
    return None


def _is_file_reader(part: object) -> bool:
    """Return whether the library's own code reads the examples, and no generator function of the user."""
    reader = type(getattr(getattr(part, "generate_examples_fn", None), "__self__", None))
    return reader.__module__.startswith("datasets.packaged_modules.") and reader.__name__ != "Generator"


def fingerprint(thing: object) -> str | None:
    """Return a digest of the generators that shuffle a streaming dataset; None without such a dataset. A restore
    rejects another digest: without a seed, each process would read the files in another order.
    """
    found = [getattr(part, "generator", None) for part in _parts(thing)]
    states = [each.bit_generator.state for each in found if isinstance(each, np.random.Generator)]
    return xxhash.xxh3_64_hexdigest(repr(states).encode()) if found else None


def _parts(thing: object) -> Iterator[object]:
    """Yield the iterable that produces a streaming dataset's examples, and all iterables inside it."""
    while thing is not None and not _is_streaming(thing):
        thing = getattr(thing, "dataset", None)
    waiting = [] if thing is None else [getattr(thing, "_ex_iterable", thing)]
    while waiting:
        part = waiting.pop()
        yield part
        waiting += [inner for inner in [getattr(part, "ex_iterable", None)] if inner is not None]
        waiting += getattr(part, "ex_iterables", ())


def _is_streaming(thing: object) -> bool:
    return any(qualified_name(kind) == "datasets.iterable_dataset.IterableDataset" for kind in type(thing).__mro__)
