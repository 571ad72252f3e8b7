"""Growing and pruning a draft tree on a CPU: tree/candidates.py as two loops.

Of equal scores the lower candidate number ranks first, as there.
"""

import numpy as np

from mamba_eagle.cpu.ops.top_log_probs import insert
from mamba_eagle.cpu.vector_math import ZERO
from mamba_eagle.machine_code import kernel


@kernel
def expand(log_probs, lane_scores, lane_numbers, parents, scores, lanes, frontier):
    """The children of each lane; the best k of all of them are the next lanes.

    Args:
        log_probs: [b, n, k]; lane_scores, lane_numbers: [b, n].
        Out, of the children: parents, scores [b, n*k]. Out, of the next lanes: lanes [b, k], the
        parent's lane; frontier [b, k], their places among the children.
    """
    b, n, k = log_probs.shape
    best = np.empty(k, np.float32)
    for r in range(b):
        filled = 0
        for lane in range(n):
            for child in range(k):
                at = lane * k + child
                parents[r, at] = lane_numbers[r, lane]
                # no child may score above its parent: rounding may leave a log-probability above 0,
                # and a network that overflows gives none
                gain = log_probs[r, lane, child]
                gain = min(gain, ZERO) if gain == gain else np.float32(-np.inf)
                scores[r, at] = lane_scores[r, lane] + gain
                if filled < k:  # whatever its score, which may be -inf
                    filled += 1
                    insert(scores[r, at], at, best[:filled], frontier[r, :filled])
                elif scores[r, at] > best[k - 1]:
                    insert(scores[r, at], at, best, frontier[r])
        for lane in range(k):
            lanes[r, lane] = frontier[r, lane] // k


@kernel
def select(all_tokens, all_parents, all_scores, topk, tokens, parents, depths, ancestors, scores):
    """The root and the best T - 1 candidates, by depth, then by score.

    all_tokens, all_parents, all_scores [b, candidates]. Out: the fields of a Tree, [b, T] and
    ancestors [b, T, T].
    """
    b, C = all_scores.shape
    T = tokens.shape[1]
    chosen, depth_of = np.empty(T, np.int64), np.empty(T, np.int64)
    taken, node_of = np.empty(C, np.bool_), np.zeros(C, np.int64)
    for r in range(b):
        taken[:] = False
        for i in range(T):
            best = -1
            for c in range(C):
                if not taken[c] and (best < 0 or all_scores[r, c] > all_scores[r, best]):
                    best = c
            taken[best] = True
            chosen[i] = best
            # numbers are dense: the root, k of depth 1, then k² per depth
            deeper = (best - topk - 1) // (topk * topk) + 2
            depth_of[i] = 0 if best == 0 else 1 if best <= topk else deeper
        node, depth = 0, 0
        while node < T:
            for i in range(T):
                if depth_of[i] == depth:
                    c = chosen[i]
                    node_of[c] = node
                    above = node_of[all_parents[r, c]]
                    tokens[r, node], parents[r, node] = all_tokens[r, c], above
                    depths[r, node], scores[r, node] = depth, all_scores[r, c]
                    for j in range(T):
                        ancestors[r, node, j] = node > 0 and ancestors[r, above, j]
                    ancestors[r, node, node] = True
                    node += 1
            depth += 1
