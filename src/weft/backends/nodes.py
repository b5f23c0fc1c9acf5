"""Which ranks of a World are on one node: those whose hosts have the same name.

Ranks of one node address each other's memory. Between nodes there is only what the library's collectives move. So a
World over several nodes has two levels, where its nodes are alike: a World of each node, and one of the ranks that have
the same place in their nodes (`World.levels`); its operators run by plan "two_level" or by the library (`Op.choose`).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Hashable, Sequence
from pathlib import Path

NODE_VARIABLE = "WEFT_NODE"  # stands for the host's name, so that tests have several nodes on one machine


def host_name() -> str:
    """The name of the node that this process runs on: the host's and the container's, within one of which alone memory
    is shared; where the environment has WEFT_NODE, that."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    own = f"{platform.node()} {boot.read_text().strip() if boot.exists() else ''}"
    return os.environ.get(NODE_VARIABLE) or own


def numbered(hosts: Sequence[Hashable]) -> tuple[int, ...]:
    """The number of each rank's node, by rank. hosts: the name of each rank's host, by rank. Nodes count from 0, in the
    order of their first ranks."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


def spread(nodes: Sequence[int]) -> str | None:
    """Why ranks of these nodes, by rank, cannot all address each other's memory; None for those of one node."""
    ranks = [nodes.count(node) for node in range(max(nodes) + 1)]
    if len(ranks) == 1:
        return None
    each = f"{ranks[0]} each" if len(set(ranks)) == 1 else " + ".join(map(str, ranks))
    return f"its ranks are on {len(ranks)} nodes, {each}"


def why_no_levels(nodes: Sequence[int]) -> str | None:
    """Why ranks of these nodes, by rank, make no two levels; None where each node has as many ranks as the others, at
    least two, one behind another."""
    reason, count = spread(nodes), max(nodes) + 1
    if reason is None:
        return "its ranks are on one node"
    each, rest = divmod(len(nodes), count)
    if rest or each == 1 or any(nodes.count(node) != each for node in range(count)):
        return reason
    in_order = all(node == rank // each for rank, node in enumerate(nodes))
    return None if in_order else f"{reason}, and those of a node do not follow each other"


def placed(nodes: int | Sequence[int], size: int) -> tuple[int, ...]:
    """The number of each rank's node, by rank, for `size` ranks on so many nodes alike, or on nodes of so many ranks
    each. Raises ValueError where these do not make `size` ranks."""
    each = (size // nodes,) * nodes if isinstance(nodes, int) and nodes > 0 else nodes
    if isinstance(each, int) or min(each, default=0) < 1 or sum(each) != size:
        raise ValueError(f"nodes={nodes!r}: {size} ranks are on so many nodes alike, or on nodes of so many ranks each")
    return tuple(node for node, ranks in enumerate(each) for _ in range(ranks))
