"""Decides whether the state of a streaming dataset of Hugging Face `datasets` restores its position exactly.

A restore from the library's own state loses the content of shuffle buffers. A `map` or `filter` over tables counts all
rows of a table as read, so a restore loses the table's remaining rows. A restore also runs batched functions and
generators again, so they draw other random numbers. For such datasets, the session does not use the state, but reads
the epoch again from its beginning.

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
"""Classes of the library whose state restores the position exactly.

Tests resume datasets that consist of these classes.
"""


def inexact_part(thing: object) -> str | None:
    """Return the part of a streaming dataset whose state does not restore the position exactly.

    Args:
        thing: a dataset or a loader, which may contain a streaming dataset.

    Returns:
        A description of the part. None if the state is exact, or if there is no streaming dataset.

    Raises:
        UnsupportedVersion: Everstep is not tested with the installed major version of `datasets`.
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
    """Return whether the library's own code reads the examples.

    False if a generator function of the user yields them.
    """
    reader = type(getattr(getattr(part, "generate_examples_fn", None), "__self__", None))
    return reader.__module__.startswith("datasets.packaged_modules.") and reader.__name__ != "Generator"


def fingerprint(thing: object) -> str | None:
    """Return a digest of the states of the generators that shuffle and interleave a streaming dataset.

    Snapshots contain the digest. Without a seed, each process seeds these generators differently, so a restarted
    process would read the files in another order. A restore rejects a snapshot with a different digest.

    Args:
        thing: a dataset or a loader, which may contain a streaming dataset.

    Returns:
        The digest, or None if there is no streaming dataset.
    """
    found = [getattr(part, "generator", None) for part in _parts(thing)]
    states = [each.bit_generator.state for each in found if isinstance(each, np.random.Generator)]
    return xxhash.xxh3_64_hexdigest(repr(states).encode()) if found else None


def _parts(thing: object) -> Iterator[object]:
    """Yield the iterable that produces a streaming dataset's examples, and all iterables inside this iterable.

    `thing` is the streaming dataset, or an object that contains it as `dataset`.
    """
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
