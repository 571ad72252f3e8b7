"""Compiles grammars while steps run, and keeps those that were used recently."""

import contextlib
import os
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait

import numpy as np
from llguidance import LLMatcher

from mamba_eagle.constrain.request import RequestGrammar
from mamba_eagle.constrain.vocabulary import Vocabulary
from mamba_eagle.core import SamplingParams

KEPT = 32  # compiled grammars: some megabytes each, or up to 60 (MAX_LEXER_STATES)
THREADS = 2
NICE = 5  # of these threads: a share of about a quarter beside one that computes steps


class Matchers:
    """Request grammars by text.

    All requests of one grammar share a compiled base and, with it, the lexer states that any of
    them has visited: masks of separate matchers took three times as long.
    """

    def __init__(self, load: Callable[[], Vocabulary], vocab_size: int, eos: Sequence[int]) -> None:
        """load: called once, in a thread, when the first grammar or ``prepare`` asks for it."""
        self._load, self._eos = load, tuple(eos)
        self.words = (vocab_size + 31) // 32  # of a mask
        self._bases: OrderedDict[str, Future[LLMatcher]] = OrderedDict()
        self._threads = ThreadPoolExecutor(THREADS, "grammars", initializer=yield_to_others)
        self._vocabulary: Future[Vocabulary] | None = None

    def prepare(self) -> Future[Vocabulary]:
        """Begin to load the vocabulary, unless that has begun."""
        if self._vocabulary is None:
            self._vocabulary = self._threads.submit(self._load)
        return self._vocabulary

    def wait(self) -> None:
        """Until the vocabulary is loaded, or cannot be, if it was begun."""
        if self._vocabulary is not None:
            wait([self._vocabulary])

    def start(self, params: SamplingParams) -> RequestGrammar:
        """One at the start of ``params.grammar``, which is compiled meanwhile, or of its rules."""
        base = self.compile(params.grammar) if params.grammar else None

        def spoiled() -> None:
            # Its lexer is shared, may be large, and has an error that it never leaves.
            if self._bases.get(params.grammar) is base:
                del self._bases[params.grammar]

        return RequestGrammar(base, params, self._eos, self.words, spoiled)

    def compile(self, text: str) -> Future[LLMatcher]:
        """A matcher at the start of a grammar, which others copy."""
        base = self._bases.pop(text, None)
        if base is None:
            base = self._threads.submit(self._compiled, text, self.prepare())
        self._bases[text] = base  # the last is the latest
        if len(self._bases) > KEPT:
            self._bases.popitem(last=False)
        return base

    def _compiled(self, text: str, vocabulary: Future[Vocabulary]) -> LLMatcher:
        base = vocabulary.result().matcher(text)
        if not base.is_error():
            # The lexer makes the states that a first mask needs, for all copies.
            row = np.empty(self.words, dtype=np.uint32)
            base.deep_copy().unsafe_compute_mask_ptr(row.ctypes.data, row.nbytes)
        return base


def yield_to_others() -> None:
    """Let this thread compute when others do not need the processor; Linux can, per thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
