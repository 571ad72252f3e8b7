"""The argument blocks of the engine: what Python writes and machine code reads, field by field.

A block is a C structure. Python sets its fields; a kernel is given its address and reads the same
fields by name (``reader``), as LLVM's code does (vectors/code.py). In a declaration ``name[shape]``
is the address of a contiguous array, float32 where nothing else is said, and 0 where there is none;
``name`` is a size, a count or another integer; ``name:single`` and ``name:double`` are numbers.
Who makes a block keeps it, and what it points to, for as long as it is used.

b requests, T nodes of a tree, n rows of a pass, R request slots, W rows of a request, F features.
"""

import ctypes
import re
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from mamba_eagle.cpu.memory import pointer_to
from mamba_eagle.machine_code import kernel, numba


class Block(ctypes.Structure):
    """The base of all."""

    @property
    def address(self) -> int:
        return ctypes.addressof(self)

    def point(self, **arrays: Tensor | np.ndarray) -> None:
        """Fields become the addresses of arrays, which the caller keeps."""
        for name, array in arrays.items():
            setattr(self, name, address_of(array))

    def assign(self, **values: float) -> None:
        for name, value in values.items():
            setattr(self, name, value)


def address_of(array: Tensor | np.ndarray) -> int:
    if isinstance(array, np.ndarray):
        assert array.flags.c_contiguous
        return array.ctypes.data
    assert array.is_contiguous()
    return array.data_ptr()


class Rounded(Block):
    """Rows as a product's inputs. Parts of inputs lie at ``numbers`` alone; all 0: the product
    takes float32."""

    # [n, size] int8, [n, size / 32] float32, the same int32
    _fields_ = [(name, ctypes.c_int64) for name in ("numbers", "scale", "total")]


KINDS: dict[str, Any] = {"": ctypes.c_int64, "single": ctypes.c_float, "double": ctypes.c_double}
KINDS["Rounded"] = Rounded


def fields(declaration: str) -> list[tuple[str, Any]]:
    """The fields of a block, as they are declared above. What follows a # is a comment."""
    words = re.findall(r"(\w+)(?:\[[^]]*\])?(?::(\w+))?", re.sub("#.*", "", declaration))
    return [(name, KINDS[kind]) for name, kind in words]


# ── in Numba's code ──


def reader(block: type) -> Callable[[int], Any]:
    """``f(address)``: a block, whose fields are read and written by their names."""
    dtype = np.dtype(block)

    @kernel
    def read(address):  # noqa: ANN001, ANN202
        return numba.carray(pointer_to(address), 1, dtype)[0]

    return read


@kernel
def floats(address, shape):  # noqa: ANN001, ANN201
    return numba.carray(pointer_to(address), shape, np.float32)


@kernel
def ints(address, shape):  # noqa: ANN001, ANN201
    return numba.carray(pointer_to(address), shape, np.int64)


@kernel
def bools(address, shape):  # noqa: ANN001, ANN201
    return numba.carray(pointer_to(address), shape, np.bool_)


# ── what all calls of a pass read ──


class Frame(Block):
    """A pass over layers; int64, but the stream and ``fold``, which is bool."""

    _fields_ = fields("""
        stream[n, hidden_size] rows  # n
        # kernels/tree_verify/layout.py
        slots[b] state_slots[b] journal[b, max_journal] journal_len[b]
        node_rows[b, T] parents[b, T] tail[b, history] fold[b]
        requests nodes max_journal history  # b, T, M, K - 1
        # what attention reads: by tree the request slot and the prefix; KV slots and parents of its
        # nodes, of drafted lanes those of all depths
        table[table_rows, positions] table_rows positions attended[trees] prefix[trees]
        own[trees, family] above[trees, family] family trees
        # rotary angles, of as many pairs of channels
        cos[n, pairs] sin[n, pairs] pairs
    """)


class PromptFrame(Block):
    """A pass over prompts. The tables are those of a PrefillPlan, int32. Saved journals: the row
    that each token is kept in, int64, or -1, and the rows of all layers."""

    _fields_ = fields("""
        stream[n, hidden_size] rows
        tokens[n, 2] requests[num_requests, 3] segments[num_segments, 3] num_requests num_segments
        kept[n] kept_inputs[layers, kept_rows, conv_dim] kept_steps[layers, kept_rows, E] kept_rows
    """)


class Step(Block):
    """A decode step of the target; int64, but features, raw inputs, and ``finished`` (bool).
    frame: the address of the ``Frame`` of its pass, which has the layout of its trees."""

    _fields_ = fields("""
        frame slots[b] b T  # request slots
        kv_slots[b, T] tokens[b, T] parents[b, T] depths[b, T]
        # made
        positions[b, T] features[b * T, F] size  # F
        # by request slot: tokens processed, state slots, journals; a path has places
        R processed[R] state_slot[R] journal_lengths[R] path[R, places] places
        history W max_journal  # K - 1; W; the longest that leaves room for a tree
        folded[b]  # rows of the journals that are folded before the step
        row_features[R, W, F] pool_features[states, F] states
        conv_in[layers, R, history + W, channels] layers channels
        # the request table
        table[R, columns] columns last_token[R] remaining[R] stops[R, num_stops] num_stops
        # accepted: the target's tokens; paths; positions of the states
        target[b, T] D path_nodes[b, D] path_tokens[b, D] number[b] finished[b] folded_at[b]
    """)


class Drafts(Block):
    """A step of drafting, in which one call leaves to the next where it stands; int64, but
    features, outputs, scores and log-probabilities. k lanes, C candidates, E entries of one. frame:
    the address of the ``Frame`` of its passes; least: float64, the probability below which a chain
    ends."""

    _fields_ = fields("""
        frame least[1] slots[b] requests longest topk nodes  # request slots; b; E; k; of the trees
        depth seen  # depths that have been added, candidates so far
        # the request table
        table[R, positions] R positions processed[R] last_token[R] remaining[R]
        # waiting entries
        tokens[R, width] width features[R, width, size] size pending[R] done[R]
        padding max_lanes  # KV slot for padding, which those for lanes follow; of a request
        # what attention reads; parents of all lanes so far
        own[b, E] parents[b, E] prefix[b] lane_parents[b, max_lanes]
        # rows: tokens, addresses of features, and which rows' outputs are read
        row_tokens[n] row_features[n] wanted[n]
        outputs[n, size] best[n, k] log_probs[n, k]
        candidates all_tokens[b, C] all_parents[b, C] all_scores[b, C]  # C
        # lanes: which candidates they are
        numbers[b, k] scores[b, k] lanes_above[b, k] lane_tokens[b, k] order[b, k]
        # of the Tree that is selected
        tree_tokens[b, T] tree_parents[b, T] tree_depths[b, T] tree_ancestors[b, T, T]
        tree_scores[b, T]
        doubts  # whether trees end here, before the depth that was added last
    """)


# ── calls of a layer; frame: the address of the pass's ──


class Norm(Block):
    """weight: 0 of what is only copied."""

    _fields_ = fields("frame weight[size] eps:double size out[n, size] rounded:Rounded")


class GatedNorm(Block):
    """gate_at: the gate's first column in projected. norm_first: as of a delta rule, with weight
    [group]."""

    _fields_ = fields("""
        frame weight[size] eps:double size group y[n, size] projected[n, columns] columns gate_at
        norm_first out[n, size] rounded:Rounded
    """)


class Gate(Block):
    """Between the products of an MLP."""

    _fields_ = fields("frame size above[n, columns] columns out[n, size] rounded:Rounded")


class Residual(Block):
    """weight: of a norm of what is added; 0: none."""

    _fields_ = fields("frame size made[n, columns] columns scale:single weight[size] eps:double")


class Columns(Block):
    """Those of a product in another order, int64."""

    _fields_ = fields("frame made[n, columns] columns order[size] size out[n, size]")


class Inputs(Block):
    """Of a product, that are rounded alone."""

    _fields_ = fields("frame size x[n, size] rounded:Rounded")


class Recurrence(Block):
    """A layer's recurrence in a decode step. K, channels, H, P, N, G, E as in ops/tree_verify.py;
    what heads share (``Seen``) is int64 but C. step: the address of a fold's ``Step``. Channels and
    raw gates begin at columns channels_at and gates_at."""

    _fields_ = fields("""
        frame step projected[n, columns] columns channels_at
        raw[n, raw_columns] raw_columns gates_at
        conv[K + 1, channels] heads[3, H] low:single high:single
        conv_in[R, K - 1 + W, channels] xB[R, W, H * P + G * N] dt[R, W, E] decay[R, W, H]
        state[states, H, P, N]
        R K W channels H P N G E states
        seen_C[b, T, G, N] seen_rows[b, max_journal + T] seen_order[b, T] seen_kept[b, T]
        out[n, H * P]
    """)


class PromptRecurrence(Block):
    """The same of a prompt. layer: its index among those of its kind."""

    _fields_ = fields("""
        frame projected[n, columns] columns channels_at raw[n, raw_columns] raw_columns gates_at
        conv[K + 1, channels] heads[3, H] low:single high:single
        history[states, K - 1, channels] state[states, H, P, N] states
        K channels H P N G E layer
        convolved[n, channels] steps[n, E] decay[n, H] out[n, H * P]
    """)


class Attention(Block):
    """Queries, keys and values lie side by side in packed; each: 2 where a gate follows each head
    of a query, else 1."""

    _fields_ = fields("""
        frame packed[n, columns] columns heads kv_heads head_dim each scale:single
        keys[kv_slots, kv_heads, head_dim] values[kv_slots, kv_heads, head_dim] kv_slots
        out[n, heads * head_dim]
    """)


class PlaceHeads(Block):
    """Norms, unless they are 0, and rotation of queries and keys, in place; as ``Attention``.
    whole: whether norms are of all heads at once, with weights [heads * head_dim]."""

    _fields_ = fields("""
        frame packed[n, columns] columns heads kv_heads head_dim each
        q_norm[head_dim] k_norm[head_dim] eps:double whole
    """)


class GateHeads(Block):
    """What attention has read, by the sigmoids of the gates in packed."""

    _fields_ = fields("""
        frame packed[n, columns] columns heads head_dim out[n, heads * head_dim] rounded:Rounded
    """)


class States(Block):
    """A head's state over J rows of a journal and T nodes (vectors/states.py)."""

    _fields_ = fields("""
        state[P, N] N J T decay[J + T] added[J + T, P] P  # added: dt x
        # rows with x and B, numbers from one to the next, columns of x and B; which rows are the
        # journal's and the nodes' (int64)
        rows[W, row] row of_x of_B ids[J + T]
        writes parents[T] order[T] kept[T]  # 0, BEFORE or AFTER; of ``depth_first``, int64
        C[T, C_row] C_row skip[1] out[T, out_row] out_row  # of the nodes; skip: D; out: y
        # room: [T, 16, 16], [T, TILE, 16]; of a delta rule a block of the state, and one per node
        sums tiles
        read[J + T]  # of a delta rule's nodes: -beta·decay
    """)


# ── calls around the layers ──


class StoredRows(Block):
    """Rows of an embedding in float32 or bfloat16. Those of a row come in groups of ``neighbours``
    numbers, of which the first is at token // per_block · block + token % per_block · neighbours,
    and the next is ``next`` numbers on. pair: of ``products/transpose.py``, or 0. tokens: int64."""

    _fields_ = fields("""
        tokens[n] out[n, columns] columns size scale:single
        numbers[rows, size] per_block block next neighbours pair
    """)


class GroupedRows(Block):
    """Rows of an embedding of integers in groups (``Blocks`` of products/grouped.py). offset: what
    zero is stored as; wide: whether scales are float32. tokens: int64."""

    _fields_ = fields("""
        tokens[n] out[n, columns] columns size factor:single
        codes[blocks] scale[blocks] minimum[blocks] bits offset wide
    """)


class Join(Block):
    """An embedding and a feature, side by side."""

    _fields_ = fields("frame drafts x[n, columns] columns rounded:Rounded")


class Stream(Block):
    _fields_ = fields("frame size made[n, columns] columns bias[size]")


class Outputs(Block):
    _fields_ = fields("frame drafts weight[size] eps:double size out[n, size] rounded:Rounded")


class Best(Block):
    """tokens: how many of the columns are tokens."""

    _fields_ = fields("frame drafts logits[n, columns] columns tokens")


class Append(Block):
    """``append_pending`` (ops/accept.py); int64, but entries and those that wait."""

    _fields_ = fields("""
        slots[b] nodes[b, D] tokens[b, D] count[b] entries[b, T, size] b T D size
        waiting_tokens[R, places] waiting[R, places, size] pending[R] R places
    """)


class EnterRoots(Block):
    """int64"""

    _fields_ = fields("slots[b] kv_slots[b, T] T table[R, columns] R columns processed[R]")


class BestOf(Block):
    """tokens: int64"""

    _fields_ = fields("scores[n, size] size tokens[n]")


# ── products ──


class Product(Block):
    """With weights of 16 or 32 bits. x: in tiles (products/amx.py), the parts of inputs."""

    _fields_ = fields("x[rows, inputs] weight[panels] y[rows, width] rows inputs width")


class Split(Block):
    """Inputs into parts."""

    _fields_ = fields("x[n, inputs] parts[n] inputs")


class GroupedProduct(Block):
    """With weights of integers in groups. The first three are made of x: int8, float32, int32."""

    _fields_ = fields("""
        numbers[rows, groups * 32] scale[rows, groups] total[rows, groups]
        codes[blocks] weight_scale[blocks] weight_minimum[blocks]
        y[rows, width] rows groups width x[rows, groups * 32]
    """)


class Transposed(Block):
    _fields_ = fields("source[panels, width, inputs] target[panels, inputs, width] inputs width")


class RowSlots(Block):
    """Which slot of adapters each row of a pass reads, int64; -1: none."""

    _fields_ = fields("slots[rows]")


class Addition(Block):
    """The slots of one matrix, of rank R at most: layers/adapters.py. small: what ``down`` makes of
    a row; ranks: int64; width: of a row of y, of which ``first`` is the matrix's own first output;
    row_slots: of a ``RowSlots``. A slot's down has [inputs, its rank] at the beginning."""

    _fields_ = fields("""
        row_slots x[rows, inputs] y[rows, width] small[rows, R] rows inputs width first outputs
        down[S, inputs, R] up[S, R, outputs] ranks[S] R S
    """)


# ── programs (team.py) ──


class CallRow(Block):
    """A call of a program: addresses of function and block; units, a sum; where the block takes the
    number of rows (0: nowhere); work, in nanoseconds that it takes one core, roughly."""

    # attention's trees: of drafted lanes one per request, each of which is a request of its own in
    # the recurrence
    _fields_ = fields("""
        function arguments units units_per_row units_per_request units_per_tree
        rows_at work work_per_row
    """)


class Job(Block):
    """A program, and what it is run with. control: the address of the team's, or 0; calls: of
    CallRows; min_shared: nanoseconds of work from which on a call is shared out."""

    _fields_ = fields("control calls[count] count rows requests trees threads min_shared")
