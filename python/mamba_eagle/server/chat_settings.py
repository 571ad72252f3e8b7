"""Checks the settings of chats before anything is loaded."""

from mamba_eagle.chat.family import NONE, FamilyError, read_family
from mamba_eagle.chat.parse import parser_problem, template_problem
from mamba_eagle.chat.render import template_source
from mamba_eagle.config import ServerConfig, flag_of
from mamba_eagle.core import shown


def chat_problems(config: ServerConfig) -> list[str]:
    """What of ``--chat-template`` and the parsers cannot be used, with what to change."""
    problems = []
    if config.chat_template:
        try:
            template_source(config.chat_template)
        except ValueError as error:
            problems.append(f"--chat-template {shown(config.chat_template)[1:-1]}: {error}")
    named = False
    for name in ("tool_call_parser", "reasoning_parser"):
        value = getattr(config, name)
        if value in ("auto", NONE):
            continue
        named = True
        try:
            wrong = "" if parser_problem() else template_problem(read_family(value))
        except FamilyError as error:
            wrong = str(error)
        if wrong:
            problems.append(f"{flag_of(name)} {shown(value)[1:-1]}: {wrong}")
    if named and (problem := parser_problem()):
        problems.append(f"--tool-call-parser, --reasoning-parser: {problem}")
    return problems
