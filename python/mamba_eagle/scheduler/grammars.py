"""Requests that wait until the runner has compiled their grammars.

The largest grammars take a second to compile. A runner that met one unprepared would wait for it in
the middle of a step, and so would all requests. So the runner is asked when a request arrives, and
the request is admitted once its grammar is compiled. Others may overtake it meanwhile.
"""

from collections import OrderedDict

from mamba_eagle.message import CompileGrammar
from mamba_eagle.scheduler.request import Request

# Texts that the runner still has. It keeps twice as many (constrain/matchers.py), and forgets those
# first that were compiled and begun longest ago, as here.
REMEMBERED = 16


class GrammarQueue:
    """Which grammars are compiled, and who waits for the others."""

    def __init__(self) -> None:
        self._compiled: OrderedDict[str, None] = OrderedDict()
        self._waiting: dict[str, list[Request]] = {}  # by text
        self._unsent: list[CompileGrammar] = []

    def add(self, request: Request) -> None:
        """A request has arrived; it waits if its grammar is not compiled."""
        text = request.sampling.grammar
        if not text or text in self._compiled:
            return
        if text not in self._waiting:
            self._unsent.append(CompileGrammar(text=text))
        self._waiting.setdefault(text, []).append(request)
        request.waits_for_grammar = True

    def may_begin(self, request: Request) -> bool:
        """Whether the runner has the grammar of a request that there is room for now. If it waited
        for so long that the grammar may be forgotten, it waits for it once more."""
        text = request.sampling.grammar
        if text in self._compiled:
            self._compiled.move_to_end(text)
        else:
            self.add(request)
        return not request.waits_for_grammar

    def take_unsent(self) -> list[CompileGrammar]:
        """What the runner has to be asked for, once."""
        unsent, self._unsent = self._unsent, []
        return unsent

    def compiled(self, text: str) -> None:
        """The runner has compiled a grammar, or has found what is wrong with it: a request that
        cannot be served ends when it is."""
        for request in self._waiting.pop(text):
            request.waits_for_grammar = False
        self._compiled[text] = None
        if len(self._compiled) > REMEMBERED:
            self._compiled.popitem(last=False)

    def failed(self, text: str) -> None:
        """The runner could not follow a grammar, and has dropped it."""
        self._compiled.pop(text, None)
