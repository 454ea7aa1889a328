"""One sentence for each cause of an incident, which says what happened. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from control_plane.core.observed.nodes import Cause

_NAMED_NODES = 3
_OCCURRENCES: Mapping[Cause, str] = {
    Cause.NOTICE: "AWS announced the end of {node}",
    Cause.REQUESTED: "a person requested {node}",
    Cause.GROWN: "the job stopped to continue on more nodes",
    Cause.RETURNED: "the job stopped to return nodes to its fleet",
    Cause.PAUSE_FAILED: "the job could not be paused",
    Cause.DRILL: "a drill caused a fault{on}",
    Cause.LOAD_FAILED: "a shard could not be loaded{on}",
    Cause.RANK_EXIT: "a training process failed{on}",
    Cause.HANG: "the ranks hung",
    Cause.AGENT_LOST: "an agent lost its state of the job{on}",
    Cause.NODE_UNREACHABLE: "{node} became unreachable",
    Cause.NODE_FAULT: "{node} reported a fault",
    Cause.INSTANCE_TERMINATED: "{instance} {was} terminated",
    Cause.SHRUNK: "lost nodes were not replaced",
    Cause.GROUP_LOST: "all nodes that held a shard were lost",
}
"""Ids of nodes replace `{node}` and `{instance}`. `{on}` becomes ` on` and the ids."""


def occurrence(cause: Cause, nodes: Sequence[str] = ()) -> str:
    """Return what happened in an incident, as a sentence without its full stop."""
    ids = listed(nodes)
    return capital(
        _OCCURRENCES[cause].format(
            node=ids or "a node",
            instance=ids or "an instance",
            on=f" on {ids}" if ids else "",
            was="were" if len(nodes) > 1 else "was",
        )
    )


def brief_occurrence(cause: Cause, nodes: Sequence[str]) -> str:
    """Return `occurrence` with the id of the failed node, if one node failed as a whole."""
    is_of_one_node = len(nodes) == 1 and "{on}" not in _OCCURRENCES[cause]
    return occurrence(cause, nodes if is_of_one_node else ())


def listed(names: Iterable[str]) -> str:
    """Return names as text: `a, b and c`. Names after the third are only counted."""
    every = tuple(names)
    shown, more = every[:_NAMED_NODES], len(every) - _NAMED_NODES
    if more > 0:
        return f"{', '.join(shown)} and {more} more"
    return " and ".join((", ".join(shown[:-1]), shown[-1])) if len(shown) > 1 else "".join(shown)


def capital(text: str) -> str:
    """Return a text with a capital first letter, unless the text begins with an instance id."""
    return text if text.startswith("i-") else text[:1].upper() + text[1:]
