"""The masks of a draft tree: which tokens the grammar allows behind each node.

A node's mask depends on the tokens of its path from the root alone. A matcher is copied where the
tree forks, and goes along one path.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mamba_eagle.constrain.place import is_allowed
from mamba_eagle.constrain.request import Branch, RequestGrammar

Masks = npt.NDArray[np.uint32]  # [T, W]: bit ``v % 32`` of word ``v // 32`` is set: v is allowed


def fill_masks(
    grammar: RequestGrammar, tokens: Sequence[int], parents: Sequence[int], masks: Masks
) -> list[int]:
    """Write the masks of all nodes that can be reached, and return the others: the nodes that the
    grammar refuses, and those below them.

    tokens, parents [T] of the tree; the root, node 0, is the last token that ``grammar`` has taken
    in. masks: all ones. The rows of refused nodes keep them: what they allow is not read, and a
    row without any token would make a NaN of its softmax.
    """
    children: list[list[int]] = [[] for _ in tokens]
    for node in range(1, len(tokens)):
        children[parents[node]].append(node)
    address, row_bytes = masks.ctypes.data, masks.strides[0]
    root, branch = grammar.mask(), grammar.branch()
    if root is None or branch is None:
        masks[0] = 0
        return list(range(1, len(tokens)))
    masks[0] = root
    refused: list[int] = []

    def visit(above: int, branch: Branch) -> None:
        row, below = masks[above], []
        for node in children[above]:
            if is_allowed(row, tokens[node]):
                below.append(node)
            else:
                refuse(node)
        for node in below:
            own = branch if node == below[-1] else branch.fork()
            if not own.step_in(tokens[node]):
                continue  # an end token behind a finished grammar: a leaf, which ends the request
            if own.fill(masks[node], address + node * row_bytes):
                if children[node]:
                    visit(node, own)
            else:
                refused.extend(children[node])

    def refuse(node: int) -> None:
        refused.append(node)
        for child in children[node]:
            refuse(child)

    visit(0, branch)
    return sorted(refused)
