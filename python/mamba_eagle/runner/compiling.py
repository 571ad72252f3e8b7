"""Grammars that the scheduler has asked for and that threads compile beside the steps."""

from concurrent.futures import Future
from typing import Any

from mamba_eagle.message import CompileGrammar, GrammarCompiled
from mamba_eagle.runner.constraints import Constraints


class Compiling:
    """What is being compiled; true as long as anything is."""

    def __init__(self, constraints: Constraints) -> None:
        self.constraints = constraints
        self._made: dict[int, Future[Any]] = {}  # by the number of the request for it

    def __bool__(self) -> bool:
        return bool(self._made)

    def begin(self, asked: CompileGrammar) -> None:
        self._made[asked.number] = self.constraints.compile(asked.text)

    def take_done(self) -> list[GrammarCompiled]:
        """The answers that are due."""
        done = [number for number, made in self._made.items() if made.done()]
        for number in done:
            del self._made[number]
        return [GrammarCompiled(number=number) for number in done]
