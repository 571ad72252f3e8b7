"""What the tree looks like, for people."""

import heapq
import time

from mamba_eagle.cache.node import Node
from mamba_eagle.message import CacheNode


def top_nodes(root: Node, max_nodes: int, max_tokens: int = 0) -> list[CacheNode]:
    """Up to ``max_nodes`` nodes below ``root``, each after its parent; the most recently used ones,
    with up to ``max_tokens`` of their tokens.

    A node was used whenever one below it was, so these are found without a walk over the tree:
    only the children of nodes that are returned are looked at.
    """
    now = time.monotonic()
    nodes: list[CacheNode] = []
    # (-used_at, order of discovery, node, index of its parent)
    heap: list[tuple[int, int, Node, int]] = []
    found = 0

    def discover(parent: Node, index: int) -> None:
        nonlocal found
        wanted = max_nodes - len(nodes)
        for child in heapq.nlargest(wanted, parent.children.values(), key=lambda n: n.used_at):
            found += 1
            heapq.heappush(heap, (-child.used_at, found, child, index))

    discover(root, -1)
    while heap and len(nodes) < max_nodes:
        _, _, node, parent = heapq.heappop(heap)
        nodes.append(
            CacheNode(
                parent=parent,
                start=node.start,
                tokens=len(node.tokens),
                kind=node.kind if node.state_slot >= 0 else "",
                evicted_first=node.spare,
                locks=node.locks,
                age=round(max(now - node.used_time, 0.0), 3),
                children=len(node.children),
                token_ids=node.tokens[:max_tokens].tolist(),
            )
        )
        discover(node, len(nodes) - 1)
    return nodes
