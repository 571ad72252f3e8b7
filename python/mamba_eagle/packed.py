"""A model's pass over whole sequences, without a server: what a trainer calls for the
log-probabilities of tokens that a server has sampled.

    forward = PackedForward("/models/nemotron", exact=True)
    old = forward.logprobs([prompt + output for prompt, output in rollouts])

Weights, pools and kernels are a server's, and so is the pass: sequences are prompts that never
sample. What holds of a server's bits holds of these (docs/rollouts.md).
"""

import dataclasses
import gc
from collections.abc import Callable, Iterator, Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch import Tensor

from mamba_eagle.config import ConfigError, EngineConfig, from_keywords
from mamba_eagle.core import SamplingParams, prompt_problem, shown
from mamba_eagle.message import ChangeModel, FirstChunk, PrefillItem, Weights
from mamba_eagle.message.indices import indices
from mamba_eagle.models.registry import read_model_config
from mamba_eagle.resolve import resolve
from mamba_eagle.runner.assemble import START_ERRORS
from mamba_eagle.runner.model_runner import ModelRunner
from mamba_eagle.runner.pools import context_length
from mamba_eagle.runner.renewal import Renewal
from mamba_eagle.runner.start import start_rank
from mamba_eagle.runner.steps.prompts import at_temperature

PASS_TOKENS = 2048  # whose logits are in memory at the same time, unless a setting says how many
NO_DECODING: dict[str, Any] = {
    "speculative_algorithm": "NONE",
    "speculative_draft_model_path": "",
    "disable_cuda_graph": True,
    "disable_radix_cache": True,
}
Sequences = Sequence[Sequence[int]]


class PackedForward:
    """A model with its weights. One call at a time, from the thread that has made it."""

    def __init__(self, model_path: str | PurePath = "", **settings: Any) -> None:
        """Loads the weights.

        Args:
            model_path: checkpoint folder or Hugging Face name; "": the embedded model.
            settings: a server's, by their flags' names with underscores: for equal bits those of
                the server that samples. Flags of drafts, graphs and the cache do nothing. A pass
                takes ``chunked_prefill_size`` tokens of at most ``max_running_requests`` sequences;
                KV slots are for a pass and ``context_length`` tokens.

        Raises: ConfigError (a ValueError) with every setting that cannot work, and if the model
            cannot be loaded.
        """
        known = {"model_path": model_path, **settings, **NO_DECODING}
        config = from_keywords(EngineConfig, "PackedForward", known)
        if config.num_ranks > 1:
            raise ConfigError(["tp_size, pp_size: PackedForward has one device; leave them out"])
        self._renewal = Renewal(start_rank(_sized(resolve(config))))

    def logprobs(self, sequences: Sequences, temperature: float = 1.0) -> list[Tensor]:
        """Log-probabilities of all tokens but the first, each given those before it.

        temperature: above 0; of a server with ``logprobs_at_temperature``, the request's.

        Returns: [tokens - 1] float32 for each sequence, on the device, without gradient.
        Raises: ValueError for what the model cannot take.
        """
        if not temperature > 0:
            raise ValueError(f"temperature {temperature}: must be above 0")
        runner = self._runner

        def of(features: Tensor, following: Tensor) -> Tensor:
            logits = at_temperature(runner.model.step_logits(features), temperature)
            return runner.chooser.logprobs(logits, following[:, None], top=0).logprob[:, 0]

        # What follows the last token is the next sequence's.
        return [logprobs[:-1] for logprobs in self._run(sequences, of)]

    def logits(self, sequences: Sequences) -> list[Tensor]:
        """[tokens, vocab_size] for each sequence, after each of its tokens: on the device, without
        gradient, in the dtype that a server samples from. Raises: as ``logprobs``."""
        model = self._runner.model
        return self._run(sequences, lambda features, _: model.step_logits(features))

    def update_weights_from_disk(self, model_path: str) -> None:
        """Other weights of the same model from a folder, as a server's /update_weights_from_disk.

        Raises: ValueError with all that is wrong, when the weights are the old ones; ConfigError if
            they could not be loaded, when there are none until an update succeeds.
        """
        asked = ChangeModel(weights=Weights(target=model_path))
        if problem := self._renewal.change(asked, let_go=lambda: None):
            raise ValueError(problem)

    def close(self) -> None:
        """Frees the memory, for good."""
        self._renewal.close()
        self._renewal.runner = None
        gc.collect()

    @property
    def _runner(self) -> ModelRunner:
        if self._renewal.runner is None:
            raise ValueError("there are no weights: they were closed, or an update has failed")
        return self._renewal.runner

    def _run(self, sequences: Sequences, make: Callable[[Tensor, Tensor], Tensor]) -> list[Tensor]:
        """make: n rows from the features [n, F] of a pass and the tokens that follow [n]. Returns
        the rows of each sequence."""
        runner, found, done = self._runner, [], 0
        _check(sequences, runner.ready.context_length, runner.ready.vocab_size)
        if not sequences:
            return []
        following = [token for ids in sequences for token in ids][1:] + [0]
        with torch.inference_mode():
            for items in packed(sequences, runner.config):
                features = runner.prompts.forward(items).features
                begin, done = done, done + len(features)
                found.append(make(features, runner.backend.place.to_device(following[begin:done])))
        # Outside of inference mode: these may take part in what autograd follows.
        return list(torch.cat(found).split([len(ids) for ids in sequences]))


def packed(sequences: Sequences, config: EngineConfig) -> Iterator[list[PrefillItem]]:
    """Passes over sequences, one after the other; the end of a pass may cut one in two.

    Tokens take KV slots in a circle, sequences take request and state slots so. A pass writes over
    those of sequences that have ended: only its first one has begun before, within
    ``context_length`` tokens.
    """
    most, kv_slots = config.chunked_prefill_size, config.max_total_tokens
    assert most is not None and kv_slots is not None
    items: list[PrefillItem] = []
    left, place = most, 0
    for number, ids in enumerate(sequences):
        slot, end = number % config.max_running_requests, 0
        while end < len(ids):
            begin, end = end, min(len(ids), end + left)
            places = range(place, place + end - begin)
            first = FirstChunk(sampling=SamplingParams(), output_start=len(ids))
            item = PrefillItem(
                slot=slot,
                state_slot=slot,
                start=begin,
                token_ids=indices(ids[begin:end]),
                kv_slots=indices(at % kv_slots for at in places),
                first=None if begin else first,
                is_last=False,
                track=False,
            )
            items.append(item)
            left, place = left - len(places), places.stop
            if not left or len(items) == config.max_running_requests:
                yield items
                items, left = [], most
    if items:
        yield items


def _check(sequences: Sequence[Any], most: int, vocab_size: int) -> None:
    for i, ids in enumerate(sequences):
        wrong = ""
        if not isinstance(ids, Sequence):
            wrong = f" = {shown(ids)}: must be a list of token ids"
        elif not ids:
            wrong = ": is empty; leave it out"
        elif len(ids) > most:
            wrong = f": has {len(ids)} tokens, and the context {most}: shorten it"
        if wrong := wrong or prompt_problem(ids, vocab_size, len(ids) + 1):
            raise ValueError(f"sequences[{i}]{wrong}")


def _sized(config: EngineConfig) -> EngineConfig:
    """With pools for one pass, and for what was of a sequence that it goes on with."""
    try:
        length = context_length(config, read_model_config(config.model_path))
    except START_ERRORS as error:
        raise ConfigError([str(error)]) from error
    tokens = config.chunked_prefill_size or PASS_TOKENS
    return dataclasses.replace(
        config,
        tokenizer_path="",  # only grammars read it
        context_length=length,
        chunked_prefill_size=tokens,
        max_total_tokens=length + tokens,
        max_mamba_cache_size=config.max_running_requests,
    )
