"""Fanouts: numbers of in-edges to sample per vertex at each hop, as in `15,10,5`, `all`, or by relation `15:5,10:5`."""

from __future__ import annotations

from collections.abc import Sequence

from weft.utils.errors import InputError

ALL = -1
"""Fanout that takes all in-edges."""

MAX_FANOUT = 2**31 - 1

Fanout = int | tuple[int, ...]
"""Number of in-edges to sample per vertex, or one for each relation, in the order of the graph's relations."""


def parse_fanouts(text: str) -> tuple[Fanout, ...]:
    """Parse fanouts: one per hop, from the batch outwards, separated by commas; `all` is ALL.

    Numbers separated by colons are fanouts by relation, of which 0 leaves a relation out: `15:5,10:5` samples up to 15
    in-edges of relation 0 and 5 of relation 1, then 10 and 5.

    Raises:
        InputError: If the text is no list of fanouts.
    """
    return tuple(_parse_hop(hop.strip(), text) for hop in text.split(","))


def format_fanouts(fanouts: Sequence[Fanout]) -> str:
    """Return the text from which `parse_fanouts` reads fanouts."""
    hops = (hop if isinstance(hop, tuple) else (hop,) for hop in fanouts)
    return ",".join(":".join("all" if number == ALL else str(number) for number in hop) for hop in hops)


def takes_all(fanout: Fanout) -> bool:
    """Return whether a fanout takes all in-edges of a vertex."""
    return {*fanout} == {ALL} if isinstance(fanout, tuple) else fanout == ALL


def _parse_hop(hop: str, text: str) -> Fanout:
    parts = hop.split(":")
    if len(parts) == 1:
        return _parse_number(hop, 1, text)
    return tuple(_parse_number(part.strip(), 0, text) for part in parts)


def _parse_number(word: str, lowest: int, text: str) -> int:
    if word == "all":
        return ALL
    if word.isascii() and word.isdigit() and len(word) <= len(str(MAX_FANOUT)) and lowest <= int(word) <= MAX_FANOUT:
        return int(word)
    raise InputError(
        f"fanout '{text}': '{word}' is neither a number from {lowest} to {MAX_FANOUT:,} nor 'all': give one for each "
        "hop, as in 15,10,5"
    )


def check_fanouts(fanouts: tuple[Fanout, ...], num_hops: int, num_relations: int = 0) -> tuple[Fanout, ...]:
    """Return one fanout per hop; a single one is repeated for all hops.

    Args:
        fanouts: The fanouts.
        num_hops: Number of hops of the model.
        num_relations: Number of relations of the graph.

    Raises:
        InputError: If their number is not that of the hops, or a fanout by relation has not one number per relation.
    """
    if len(fanouts) == 1:
        fanouts *= num_hops
    if len(fanouts) != num_hops:
        raise InputError(
            f"fanout has {len(fanouts)} numbers for a model of {num_hops} {'hop' if num_hops == 1 else 'hops'}: give "
            "one for each, or one for all"
        )
    for fanout in fanouts:
        if isinstance(fanout, tuple) and len(fanout) != num_relations:
            raise InputError(
                f"fanout '{format_fanouts([fanout])}' is for {len(fanout)} relations and the graph has "
                f"{num_relations or 'none'}: give one number, or one for each relation"
            )
    return fanouts
