"""What is wrong with a whole graph though each of its ops is right."""

from __future__ import annotations

from deepsp.compile.sharding.messages import CannotShard


def check_sharded(walk) -> None:
    """Raises if every rank would do all of the work."""
    there = set(walk.new.nodes)
    repeated = [old for new, old in walk.repeated.items() if new in there]
    if walk.lengths and repeated and not walk.worked & there:
        raise CannotShard(
            "every rank would compute all of it, and nothing in this graph would be sharded, since "
            "no input is known to hold tokens. deepsp.prepare_inputs marks them; indexing by "
            "anything but a slice loses the mark",
            repeated[0],
        )
