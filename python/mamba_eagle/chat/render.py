"""Messages to a prompt, by the chat template of the checkpoint or of ``--chat-template``.

The templates are Jinja's, in transformers' sandbox: they can neither reach into Python nor change
what they are given. What the sandbox does not bound is time, see ``bounded``.
"""

import ctypes
import inspect
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Generic, TypeVar

from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_TEMPLATE_SECONDS

POLL_SECONDS = 0.05
# A thread also waits for others: on the clock it may take this many times its processor time.
PATIENCE = 20

T = TypeVar("T")


class OutOfTime(Exception):
    """The work was stopped."""


class _Stopped(BaseException):
    """Raised inside the work. Not an Exception: templates' own handlers must not catch it."""


class _Work(threading.Thread, Generic[T]):
    def __init__(self, function: Callable[[], T]) -> None:
        super().__init__(daemon=True, name="bounded-work")
        self.function = function
        self.result: list[T] = []
        self.error: Exception | None = None
        self._clock: int | None = None
        self._ending = threading.Lock()  # a thread's number may be another's once it has ended
        self._ended = False

    def run(self) -> None:
        try:
            self._clock = time.pthread_getcpuclockid(threading.get_ident())
            self.result.append(self.function())
        except Exception as error:
            self.error = error
        except _Stopped:
            pass
        with self._ending:
            self._ended = True

    def seconds(self) -> float:
        """Processor time that the thread has had; 0 before it begins and after it ends."""
        try:
            return time.clock_gettime(self._clock) if self._clock is not None else 0.0
        except OSError:
            return 0.0

    def stop(self) -> None:
        assert self.ident is not None
        with self._ending:
            if not self._ended:
                number, error = ctypes.c_ulong(self.ident), ctypes.py_object(_Stopped)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(number, error)


def run_bounded(function: Callable[[], T], seconds: float) -> T:
    """``function()``, run in a thread of its own for at most this much processor time.

    Whatever it runs as Python can be stopped anywhere, so it must own nothing that others use. A
    single call into C (one huge multiplication of strings, say) ends before it is stopped.

    Raises: OutOfTime; whatever ``function`` raises.
    """
    work = _Work(function)
    given_up = time.monotonic() + PATIENCE * seconds
    work.start()
    while True:
        work.join(min(POLL_SECONDS, seconds))
        if not work.is_alive():
            break
        if work.seconds() >= seconds or time.monotonic() >= given_up:
            work.stop()
            raise OutOfTime
    if work.error is not None:
        raise work.error
    return work.result[0]


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
        if "developer" not in self.source():  # the template does not know the role
            messages = [
                {**message, "role": "system"} if message.get("role") == "developer" else message
                for message in messages
            ]

        def work() -> str:
            return self.hf.apply_chat_template(
                messages,
                tools=list(chat.tools) if chat.tools is not None else None,
                documents=list(chat.documents) if chat.documents is not None else None,
                chat_template=source,
                add_generation_prompt=chat.add_generation_prompt,
                continue_final_message=chat.continue_final_message,
                tokenize=False,
                **chat.arguments,
            )

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
