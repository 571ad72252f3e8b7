"""Which experts the tokens of a benchmark's steps go to."""

from mamba_eagle.layers.moe import Router
from mamba_eagle.runner.model_runner import ModelRunner


def watch(runner: ModelRunner, kind: str) -> None:
    """Keep which ones; kind: as in ``Router.watch``. Call it before the first step."""
    nodes = runner.ready.max_running_requests * runner.config.tree_shape.nodes
    most = max(runner.ready.chunked_prefill_size, nodes, 2049)  # and what is rehearsed
    for seed, router in enumerate(_routers(runner)):
        router.watch(kind, most, seed)
    runner.capture()
    runner.step.num_forced.zero_()


def touched(runner: ModelRunner, tokens: int) -> float:
    """How many experts the first ``tokens`` of the last step went to, on average over the layers; 0
    without experts."""
    seen = [router.seen[:tokens] for router in _routers(runner) if router.seen is not None]
    return sum(len(ids.unique()) for ids in seen) / max(1, len(seen))


def _routers(runner: ModelRunner) -> list[Router]:
    return [module for module in runner.model.modules() if isinstance(module, Router)]
