"""The nodes of a World: ranks whose hosts have the same name are on one node.

Ranks of one node address each other's memory. Between nodes only NCCL's collectives move data. A World over several
nodes of equal size therefore has two levels: a World of each node, and a World of the ranks with the same local rank
(`World.levels`). The operators of such a World run plan "two_level" or "sequential" (`Op.choose`).
"""

from __future__ import annotations

import os
import platform
from collections.abc import Hashable, Sequence
from pathlib import Path

NODE_VARIABLE = "WEFT_NODE"  # this name replaces the host's name, so that tests can have several nodes on one machine


def host_name() -> str:
    """Return the name of this process's node, or the environment's WEFT_NODE. The name consists of the host's name and
    the container's namespaces, because only processes of one container share memory. A container that uses the host's
    network has the host's name, but separate namespaces for shared memory and for processes."""
    boot, namespaces = Path("/proc/sys/kernel/random/boot_id"), Path("/proc/self/ns")
    machine = [platform.node(), boot.read_text().strip() if boot.exists() else ""]
    machine += [os.readlink(namespaces / kind) for kind in ("ipc", "pid") if os.path.lexists(namespaces / kind)]
    return os.environ.get(NODE_VARIABLE) or " ".join(machine)


def numbered(hosts: Sequence[Hashable]) -> tuple[int, ...]:
    """Return the number of each rank's node, by rank. hosts: the name of each rank's host, by rank. Nodes are numbered
    from 0, in the order of their first ranks."""
    numbers: dict[Hashable, int] = {}
    return tuple(numbers.setdefault(host, len(numbers)) for host in hosts)


def spread(nodes: Sequence[int]) -> str | None:
    """Return the reason why ranks on these nodes, by rank, cannot all address each other's memory; None for one
    node."""
    ranks = [nodes.count(node) for node in range(max(nodes) + 1)]
    if len(ranks) == 1:
        return None
    counts = f"{ranks[0]} each" if len(set(ranks)) == 1 else " + ".join(map(str, ranks))
    return f"its ranks are on {len(ranks)} nodes, {counts}"


def why_no_levels(nodes: Sequence[int]) -> str | None:
    """Return the reason why ranks on these nodes, by rank, do not form two levels. Return None if there are several
    nodes of equal size, each with at least two ranks that have consecutive numbers."""
    reason, count = spread(nodes), max(nodes) + 1
    if reason is None:
        return "its ranks are on one node"
    ranks_per_node, rest = divmod(len(nodes), count)
    if rest or ranks_per_node == 1 or any(nodes.count(node) != ranks_per_node for node in range(count)):
        return reason
    in_order = all(node == rank // ranks_per_node for rank, node in enumerate(nodes))
    return None if in_order else f"{reason}, and those of a node do not follow each other"


def placed(nodes: int | Sequence[int], size: int) -> tuple[int, ...]:
    """Return the number of each rank's node, by rank. nodes: the number of nodes of equal size, or the number of ranks
    on each node. Raises ValueError unless these nodes have `size` ranks in total."""
    ranks_per_node = (size // nodes,) * nodes if isinstance(nodes, int) and nodes > 0 else nodes
    if isinstance(ranks_per_node, int) or min(ranks_per_node, default=0) < 1 or sum(ranks_per_node) != size:
        raise ValueError(
            f"nodes={nodes!r}: for {size} ranks it is a number of nodes of equal size, or the ranks on each node"
        )
    return tuple(node for node, ranks in enumerate(ranks_per_node) for _ in range(ranks))
