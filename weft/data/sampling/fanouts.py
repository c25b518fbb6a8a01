"""How many in-edges of a vertex are sampled, in each hop from a batch: `15,10,5`, `all`, by relation `15:5,10:5`."""

from __future__ import annotations

from weft.utils.errors import InputError

ALL = -1
"""The fanout that takes whole neighbourhoods."""

LARGEST = 2**31 - 1

Fanout = int | tuple[int, ...]
"""Of all in-edges of a vertex; or of those of each relation, in the order of the graph's relations."""


def parse_fanouts(text: str) -> tuple[Fanout, ...]:
    """Fanouts from text: one a hop, from the batch's own vertices outward, by commas; `all` is ALL.

    Numbers between colons are fanouts by relation, of which 0 leaves one out: `15:5,10:5` takes up to 15 in-edges of
    relation 0 and 5 of relation 1, then 10 and 5. InputError where the text is none of this.
    """
    return tuple(_parse_hop(hop.strip(), text) for hop in text.split(","))


def _parse_hop(hop: str, text: str) -> Fanout:
    parts = hop.split(":")
    if len(parts) == 1:
        return _parse_number(hop, 1, text)
    return tuple(_parse_number(part.strip(), 0, text) for part in parts)


def _parse_number(word: str, least: int, text: str) -> int:
    if word == "all":
        return ALL
    if word.isascii() and word.isdigit() and len(word) <= len(str(LARGEST)) and least <= int(word) <= LARGEST:
        return int(word)
    raise InputError(
        f"fanout '{text}': '{word}' is neither a number from {least} to {LARGEST:,} nor 'all': give one for each hop, "
        "as in 15,10,5"
    )


def check_fanouts(fanouts: tuple[Fanout, ...], num_hops: int, num_relations: int = 0) -> tuple[Fanout, ...]:
    """One fanout a hop, where one alone stands for all of them.

    InputError where they are not as many as hops, or one by relation is not as long as the graph has relations.
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
            shown = ":".join("all" if k == ALL else str(k) for k in fanout)
            raise InputError(
                f"fanout '{shown}' is for {len(fanout)} relations and the graph has {num_relations or 'none'}: "
                "give one number, or one for each relation"
            )
    return fanouts
