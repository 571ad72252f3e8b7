"""Which tree shapes decode steps may have.

No torch: the scheduler chooses among these shapes, and the runner captures graphs for them.
"""

from mamba_eagle.core import PLAIN, TreeShape


def step_shapes(configured: TreeShape, adaptive: bool) -> list[TreeShape]:
    """All shapes that a server's decode steps may have.

    adaptive: the scheduler chooses a shape for each step; otherwise all have shape ``configured``.
    """
    return candidate_shapes(configured) if adaptive and configured != PLAIN else [configured]


def candidate_shapes(configured: TreeShape) -> list[TreeShape]:
    """Plain decoding, chains, and trees up to the configured one; smaller ones first.

    The chains have depth 1, half the configured depth, and the configured depth. They are followed
    by the configured tree cut to half its depth, and the tree itself. Shapes that cannot be formed
    or have more nodes than the configured one are left out.
    """
    topk, depth, nodes = configured.topk, configured.depth, configured.nodes
    half = (depth + 1) // 2
    chains = [TreeShape(1, each, each + 1) for each in (1, half, depth)]
    half_tree = TreeShape(topk, half, 1 + round((nodes - 1) * half / depth))
    shapes = [*chains, half_tree, configured]
    possible = [shape for shape in shapes if shape.nodes <= nodes and not shape.problems()]
    return [PLAIN, *dict.fromkeys(possible)]
