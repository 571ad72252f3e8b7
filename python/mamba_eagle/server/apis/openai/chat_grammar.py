"""The grammar of a chat's output: calls that must or may come, a constraint, reasoning first."""

from typing import Annotated

from mamba_eagle.chat.call_grammar import CallableTool, CallGrammars, opening
from mamba_eagle.chat.family import Family
from mamba_eagle.chat.format import reasoning_is
from mamba_eagle.chat.thinking import Budget, thinking_first
from mamba_eagle.constrain.errors import GrammarError
from mamba_eagle.constrain.grammar import Grammar, any_of
from mamba_eagle.limits import MAX_THINKING_BUDGET
from mamba_eagle.server.apis.openai.tools import Tools
from mamba_eagle.server.bodies import grammars, kinds
from mamba_eagle.server.bodies.kinds import Body, says
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.state import ServerState

BUDGET = kinds.integer(0, MAX_THINKING_BUDGET)


class Thought(Body):
    """Either name."""

    thinking_budget: Annotated[int | None, BUDGET] = says("tokens of reasoning")
    thinking_token_budget: Annotated[int | None, BUDGET] = says("as thinking_budget")


class ConstrainedChat(grammars.Formatted, Thought):
    """What makes the grammar of a chat."""


def chat_grammar(
    body: ConstrainedChat, state: ServerState, tools: Tools | None, prefix: str
) -> str:
    """For ``SamplingParams.grammar``. prefix: the part of the assistant's message in the prompt.

    Raises: RequestError 400
    """
    family = state.chat.family
    asked = grammars.read_constraint(body, state.grammars)
    budget = _budget(body, state, family)
    made, calls = asked, None
    if tools is not None:
        assert family is not None  # refused otherwise
        calls = _Calls(state, family, tools)
        if tools.must_call and asked is not None:
            # A form is for text, and there will be none: some clients send both (instructor).
            state.grammars.check(asked.grammar, asked.path)
            asked = None
        made = calls.constraint(asked)
    if made is None and budget is None:
        return ""
    grammar = made.grammar if made is not None else None
    path = made.path if made is not None else "thinking_budget"
    if family is not None and family.reasoning is not None:
        begun, special = reasoning_is(family, prefix), state.grammars.special
        opened = opening(family.calls) if family.calls is not None else ""
        grammar = thinking_first(grammar, family.reasoning, begun, special, opened, budget)
    if grammar is None:  # a budget, but no reasoning
        return ""
    try:
        return state.grammars.check(grammar, path)
    except RequestError:
        if calls is not None:
            calls.check_each()  # says which tool it is
        raise


def _budget(body: Thought, state: ServerState, family: Family | None) -> Budget | None:
    name, tokens = "thinking_budget", body.thinking_budget
    if tokens is None:
        name, tokens = "thinking_token_budget", body.thinking_token_budget
    if tokens is None:
        return None
    if family is None or family.reasoning is None:
        remedy = (
            "how this model writes its reasoning is not known: start the server with "
            "--reasoning-parser, or leave it out"
        )
        raise RequestError.about(name, tokens, remedy)
    budget = state.chat.budget(tokens, state.manager.engine.eos_token_ids)
    if budget is None:
        remedy = (
            f"this model's end of reasoning, {family.reasoning.close}, is several tokens, of "
            "which no count can be kept: leave it out"
        )
        raise RequestError.about(name, tokens, remedy)
    return budget


class _Calls:
    """The calls that a request must or may have.

    Raises: RequestError 400
    """

    def __init__(self, state: ServerState, family: Family, tools: Tools) -> None:
        self.grammars, self.tools, self._family = state.grammars, tools, family
        self._callable = {  # by place
            place: CallableTool(one.name, one.parameters, tools.must_call or bool(one.strict))
            for place, one in enumerate(tools.functions)
            if tools.named in (-1, place)
        }
        self._arguments: list[Grammar] = []  # of those that are constrained

    def constraint(self, asked: grammars.Constraint | None) -> grammars.Constraint | None:
        """The constraint of the whole answer; None: the model may write anything."""
        tools = list(self._callable.values())
        if asked is None and not any(tool.strict for tool in tools):
            return None
        try:
            makers = CallGrammars(self._family, self.grammars.special)
        except GrammarError as error:
            raise RequestError(f"tool_choice: {error}", param="tool_choice") from None
        self._arguments = [self._made(makers, place) for place in self._callable]
        parallel = self.tools.parallel and self.tools.choice != "named"
        if asked is not None:
            either = any_of(makers.forced(tools, parallel), asked.grammar)
            return grammars.Constraint(either, asked.path)
        make = makers.forced if self.tools.must_call else makers.allowed
        return grammars.Constraint(make(tools, parallel), "tools")

    def check_each(self) -> None:
        """Raises: RequestError 400 for the first tool whose own schema cannot be served"""
        self.grammars.check_all(list(zip(self._arguments, map(_path, self._callable))))

    def _made(self, makers: CallGrammars, place: int) -> Grammar:
        try:
            return makers.arguments(self._callable[place])
        except GrammarError as error:
            raise grammars.refusal(_path(place), error.path, str(error)) from None


def _path(place: int) -> str:
    return f"tools[{place}].function.parameters"
