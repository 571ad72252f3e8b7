"""Compiles grammars beside the steps, and keeps those that were used lately."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from llguidance import LLMatcher

from mamba_eagle.constrain.request import RequestGrammar
from mamba_eagle.constrain.vocabulary import Vocabulary
from mamba_eagle.core import SamplingParams

KEPT = 64  # compiled grammars; one in use takes up to some megabytes
THREADS = 2


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
        self._threads = ThreadPoolExecutor(THREADS, "grammars")
        self._vocabulary: Future[Vocabulary] | None = None

    def prepare(self) -> Future[Vocabulary]:
        """Begin to load the vocabulary, if nobody has."""
        if self._vocabulary is None:
            self._vocabulary = self._threads.submit(self._load)
        return self._vocabulary

    def start(self, params: SamplingParams) -> RequestGrammar:
        """At the start of ``params.grammar``, which is compiled meanwhile."""
        return RequestGrammar(self._base(params.grammar), params, self._eos, self.words)

    def _base(self, text: str) -> Future[LLMatcher]:
        base = self._bases.pop(text, None)
        if base is None:
            vocabulary = self.prepare()
            base = self._threads.submit(lambda: vocabulary.result().matcher(text))
        self._bases[text] = base  # the last is the latest
        if len(self._bases) > KEPT:
            self._bases.popitem(last=False)
        return base
