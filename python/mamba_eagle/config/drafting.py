"""Who drafts, and what trees."""

from dataclasses import dataclass

from mamba_eagle.config.flags import Settings, setting
from mamba_eagle.config.model import QUANTIZATIONS
from mamba_eagle.core import MAX_TREE_NODES, PLAIN, TreeShape
from mamba_eagle.drafters import DRAFTERS

DEFAULT_TREE = TreeShape(topk=2, depth=5, nodes=8)


@dataclass(frozen=True)
class DraftSettings(Settings):
    speculative_algorithm: str = setting(
        "auto",
        "draft algorithm; auto: inferred from the drafter's config.json, NONE without a drafter "
        "(EAGLE for the embedded model)",
        ("auto", *DRAFTERS, "NONE"),
        group="drafting",
    )
    speculative_draft_model_path: str = setting(
        "",
        "folder, GGUF file or Hugging Face name of the drafter (default: for the embedded model, "
        "the drafter that comes with it)",
    )
    speculative_draft_model_quantization: str = setting(
        "same",
        "weights of few bits of the drafter, with the values of --quantization; same: what that "
        "says, and for EAGLE on a CPU where that says auto int8, or int4 with AVX2 alone; none: "
        "drafts are chosen in the bits of the target's lm_head, on a GPU, too",
        ("same", *QUANTIZATIONS),
    )
    speculative_num_steps: int | None = setting(None, "depth of the draft tree; auto: 5")
    speculative_eagle_topk: int | None = setting(
        None,
        "branching factor of the draft tree; 1: a chain; auto: 2, on a CPU 1 unless more nodes are "
        "set than a chain has",
    )
    speculative_num_draft_tokens: int | None = setting(
        None,
        "number of nodes verified per step, including the root; auto: 8 where the tree has them, "
        "all of a chain",
    )
    speculative_draft_p_min: float = setting(
        0.6,
        "on a CPU, greedy requests: no draft is verified that the drafter gives a smaller "
        "probability of being accepted; 0: all are",
    )
    speculative_adaptive: bool = setting(
        True, "use the fastest draft for each step: this tree, a smaller one, a chain, or none"
    )
    speculative_ngram_max_trie_depth: int = setting(
        12, "NGRAM: maximum length of an n-gram, including the token it predicts"
    )
    speculative_ngram_capacity: int = setting(
        2_000_000, "NGRAM: maximum number of n-grams kept, 40 bytes of host memory each"
    )

    simulate_acc_len: float = setting(
        0.0,
        "for benchmarks with dummy weights: every step accepts this many tokens on average, "
        "whatever the target says, and texts mean nothing; 0: off "
        "(SGLang: SGLANG_SIMULATE_ACC_LEN)",
    )

    @property
    def journal_rows(self) -> int:
        """Tokens per saved journal: 64 before the end of any output, what three steps may add, and
        enough room that anchors need not be moved with each step."""
        accepts = self.tree_shape.depth + 1
        return max(128, 96 + 3 * accepts)

    @property
    def tree_shape(self) -> TreeShape:
        """The tree of a verify step; a single node without a drafter."""
        return PLAIN if self.speculative_algorithm == "NONE" else self.drafted_tree

    @property
    def drafted_tree(self) -> TreeShape:
        """The tree that a drafter makes, by the settings and what is usual."""
        return self.tree_of(DEFAULT_TREE.topk)

    def tree_of(self, usual_topk: int) -> TreeShape:
        """The same where ``usual_topk`` lanes are usual."""
        topk, depth = self.speculative_eagle_topk, self.speculative_num_steps
        topk = usual_topk if topk is None else topk
        depth = DEFAULT_TREE.depth if depth is None else depth
        nodes = self.speculative_num_draft_tokens
        if nodes is None:
            most = MAX_TREE_NODES if topk == 1 else DEFAULT_TREE.nodes
            nodes = max(2, min(most, TreeShape(topk, depth).max_nodes))
        return TreeShape(topk, depth, nodes)

    def problems(self) -> list[str]:
        wrong, least = super().problems(), self.speculative_draft_p_min
        if not 0 <= least <= 1:
            given = f"--speculative-draft-p-min {least:g}"
            wrong.append(f"{given}: must be between 0 and 1, a probability")
        if self.speculative_algorithm in DRAFTERS:
            wrong += self.tree_shape.problems()
        return wrong + self.simulation_problems()

    def simulation_problems(self) -> list[str]:
        """Why --simulate-acc-len cannot be had."""
        length, most = self.simulate_acc_len, self.tree_shape.depth + 1
        flag = f"--simulate-acc-len {length:g}"
        if length == 0.0:
            return []
        if self.speculative_algorithm == "NONE":
            return [
                f"{flag}: without a drafter each step makes one token; set --speculative-algorithm"
            ]
        if not 1 <= length <= most:
            return [
                f"{flag}: must be between 1 and {most}, the most that a tree of "
                f"--speculative-num-steps {self.tree_shape.depth} can gain per step; or 0 for off"
            ]
        return []
