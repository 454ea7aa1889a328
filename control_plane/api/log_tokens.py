"""Encodes and decodes page tokens of a job's log. A token names a position in the log of one generation.

    token = page token of [is_back, generation, one line number per planned node, ...]

`is_back` means towards older lines. Line numbers have the order of the generation's plan, because node ids would make
the largest token too long for a URL. `decode` therefore needs the stored plan.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from control_plane.api import page_tokens
from control_plane.loop.log_reader import Cursor, GenerationFacts
from everstep.protocol.ids import NodeId

MAX_CHARACTERS: Final = 32_768
"""Limit of a token's length, because the token is part of the URL."""


def encode(cursor: Cursor, generations: Iterable[GenerationFacts], *, is_back: bool = False) -> str:
    """Return the URL-safe token of a position. `generations` has all generations of the job, with their plans."""
    planned = _planned(generations, cursor.generation)
    positions = [cursor.positions.get(node, 0) for node in planned]
    reported = sum(1 << place for place, node in enumerate(planned) if node in cursor.reported_gaps)
    unplanned = {node: number for node, number in sorted(cursor.positions.items()) if node not in planned}
    reported_unplanned = sorted(node for node in cursor.reported_gaps if node not in planned)
    parts = [int(is_back), cursor.generation, positions, reported, unplanned, reported_unplanned]
    return page_tokens.encode(parts, is_compressed=True)


def decode(token: str, generations: Iterable[GenerationFacts]) -> tuple[bool, Cursor]:
    """Return `is_back` and `cursor` of a NextToken. `generations` has all generations of the job, with their plans.

    Raises InvalidRequest if the service did not make this token, or the generation's plan is no longer stored.
    """
    try:
        return _decoded(token, generations)
    except (ValueError, TypeError, AttributeError) as error:
        raise page_tokens.refused(
            f"{page_tokens.NOT_OURS}, or the plan of its generation is no longer stored"
        ) from error


def _decoded(token: str, generations: Iterable[GenerationFacts]) -> tuple[bool, Cursor]:
    is_back, generation, positions, reported, unplanned, reported_unplanned = page_tokens.decode(
        token, is_compressed=True
    )
    number = page_tokens.whole(generation)
    planned = _planned(generations, number)
    if type(reported) is not int or not 0 <= reported < 1 << len(planned):
        raise ValueError(page_tokens.NOT_OURS)
    places = {node: page_tokens.whole(place) for node, place in zip(planned, positions, strict=positions != [])}
    places |= {NodeId(page_tokens.text(node)): page_tokens.whole(place) for node, place in unplanned.items()}
    nodes = {node for place, node in enumerate(planned) if reported >> place & 1} | {
        NodeId(page_tokens.text(node)) for node in reported_unplanned
    }
    return bool(page_tokens.whole(is_back)), Cursor(
        number, {node: place for node, place in places.items() if place}, frozenset(nodes)
    )


def _planned(generations: Iterable[GenerationFacts], number: int) -> dict[NodeId, None]:
    """Return the nodes of a generation's plan in the order of `NextToken`. Empty if it is no longer stored."""
    return dict.fromkeys(next((sorted(each.ranks) for each in generations if each.number == number), ()))
