"""Messages to a prompt, by the chat template of the checkpoint or of ``--chat-template``.

The templates are Jinja's, in transformers' sandbox: they can neither reach into Python nor change
what they are given. What the sandbox does not bound is time, see ``bounded``.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from mamba_eagle.chat.bounded import OutOfTime, run_bounded
from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_TEMPLATE_SECONDS

Message = Mapping[str, Any]


class TemplateError(ValueError):
    """The chat template is missing or does not take what it was given."""


@dataclass(frozen=True)
class Chat:
    """What a template is rendered with. ``arguments`` are its keyword arguments beyond these."""

    messages: Sequence[Message]
    tools: Sequence[Mapping[str, Any]] | None = None
    documents: Sequence[Mapping[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    arguments: Mapping[str, Any] = field(default_factory=dict)


def template_source(value: str) -> str:
    """The template of ``--chat-template``: a file's text, or the value itself.

    Raises: ValueError
    """
    if "{%" in value or "{{" in value:
        return value
    try:
        return Path(value).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8"
        raise ValueError(
            f"{reason}; give the path of a Jinja file, or a template that has {{{{ or {{%"
        ) from None


class ChatTemplate:
    """``hf``: a tokenizer of transformers. ``source`` "": the tokenizer's own template."""

    def __init__(self, hf: Any, source: str = "") -> None:
        self.hf = hf
        self.max_seconds = MAX_TEMPLATE_SECONDS  # of processor time for one chat
        self._source = source

    def source(self, with_tools: bool = False) -> str:
        """The template's text; some checkpoints have another one for chats with tools. "" if
        there is none."""
        own = self._source or getattr(self.hf, "chat_template", None)
        if isinstance(own, Mapping):
            names = ("tool_use", "default") if with_tools else ("default",)
            own = next((own[name] for name in names if name in own), None)
        return own or ""

    @cached_property
    def reserved(self) -> frozenset[str]:
        """Names that no argument may have: those of what it is rendered with."""
        names = set(inspect.signature(self.hf.apply_chat_template).parameters)
        return frozenset(names | {"messages", "conversations", "self", "kwargs"})

    @property
    def knows_developer(self) -> bool:
        return "developer" in self.source()

    def render(self, chat: Chat) -> str:
        """The prompt, special tokens included.

        Raises: TemplateError
        """
        source = self.source(chat.tools is not None)
        if not source:
            raise TemplateError(
                "this model's tokenizer has no chat template: start the server with "
                "--chat-template, or use /v1/completions or /generate"
            )
        messages = list(chat.messages)
        if not self.knows_developer:
            messages = [
                {**message, "role": "system"} if message.get("role") == "developer" else message
                for message in messages
            ]

        def work() -> str:
            text: str = self.hf.apply_chat_template(
                messages,
                tools=list(chat.tools) if chat.tools is not None else None,
                documents=list(chat.documents) if chat.documents is not None else None,
                chat_template=source,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tokenize=False,
                **chat.arguments,
            )
            return text

        try:
            return run_bounded(work, self.max_seconds)
        except OutOfTime:
            raise TemplateError(
                "the chat template was stopped, since it had not ended after "
                f"{self.max_seconds:g} s of processor time: send less, or start the server with "
                "another (--chat-template)"
            ) from None
        except Exception as error:  # templates raise whatever Jinja or they themselves choose
            raise TemplateError(
                f"the chat template does not take these messages: {shown(str(error))}"
            ) from None
