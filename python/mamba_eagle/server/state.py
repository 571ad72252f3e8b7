"""What all routes share."""

from __future__ import annotations

import asyncio
import os
import shutil
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Annotated, Any, TypeVar

from fastapi import Depends
from starlette.requests import Request

from mamba_eagle import message
from mamba_eagle.chat.format import ChatFormat
from mamba_eagle.chat.render import template_source
from mamba_eagle.config import ServerConfig
from mamba_eagle.constrain.trials import Tokens
from mamba_eagle.core import shown
from mamba_eagle.limits import MAX_CONTROL_BODY
from mamba_eagle.message.channel import RECEIVED_PREFIX, memory_dir
from mamba_eagle.metrics import Recorder
from mamba_eagle.models.config_json import read_values
from mamba_eagle.server.bodies.grammar_trials import Judge
from mamba_eagle.server.bodies.grammars import Grammars
from mamba_eagle.server.bodies.kinds import Model, read
from mamba_eagle.server.bodies.prompts import Infill, PromptReader
from mamba_eagle.server.bodies.reception import Bodies
from mamba_eagle.server.bodies.sampling import Vocabulary
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.http.at_reply import trace_parent
from mamba_eagle.server.http.auth import api_keys, need_admin
from mamba_eagle.server.http.origins import is_loopback
from mamba_eagle.server.lifetime import Lifetime
from mamba_eagle.server.remote_reads import RemoteReads
from mamba_eagle.tokenizer.manager import TokenizerManager
from mamba_eagle.tokenizer.sample import DuplicateRid, EngineDead, LiveRequest, QueueFull


@dataclass
class Incoming:
    """The part of an update of the weights that has come so far, of which nothing is used before
    all is there: in one folder for the target and one for the drafter."""

    begun: bool = False  # /start_weight_update says where it ends; else a pause does
    is_drafter: bool = False  # of what comes next
    receiving: int = 0  # calls under way
    version: str = ""
    problem: str = ""  # a part of it was refused, so the rest is as well
    folders: dict[bool, str] = field(default_factory=dict)  # by whether it is the drafter's

    def folder(self) -> str:
        """Where the next tensors go."""
        name = f"{RECEIVED_PREFIX}{uuid.uuid4().hex}"
        return self.folders.setdefault(self.is_drafter, os.path.join(memory_dir(), name))

    def fail(self, problem: str) -> None:
        """Also when a part has come after the failure: it has made its folder again."""
        for folder in self.folders.values():
            shutil.rmtree(folder, ignore_errors=True)
        self.problem = self.problem or problem

    def check(self) -> None:
        """Raises: RequestError if none of it will be used."""
        if self.problem:
            raise RequestError(
                f"another part of this update was refused ({self.problem}): end the pause, or "
                "start the update again"
            )

    def weights(self) -> message.Weights:
        target, drafter = self.folders.get(False, ""), self.folders.get(True, "")
        return message.Weights(target=target, drafter=drafter, version=self.version, received=True)


T = TypeVar("T")
R = TypeVar("R", message.Done, message.PrefixMoved, message.ProfileReply, list[message.RankReply])
SILENCE = "the engine did not answer in time"


@dataclass
class ServerState:
    config: ServerConfig
    manager: TokenizerManager
    recorder: Recorder
    folder: str  # the server's own, removed at its end
    started: float = field(default_factory=time.time)
    lifetime: Lifetime = field(default_factory=Lifetime)
    adapters: dict[str, str] = field(default_factory=dict)  # folders of those loaded, by name
    paused: bool = False  # new requests wait
    incoming: Incoming = field(default_factory=Incoming)  # weights from a group
    remote_reads: RemoteReads = field(default_factory=RemoteReads)  # of prefixes
    withdrawing: asyncio.Task[None] | None = None  # ends when others have read what was offered
    snapshot: list[dict[str, str]] | None = None  # the weights' checksums, by rank
    judge_kind: Callable[[Callable[[], Tokens]], Judge] = Judge

    def __post_init__(self) -> None:
        """Raises: ConfigError for an API key that cannot be read."""
        self.api_keys = api_keys(self.config)
        if self.recorder.log is not None:
            self.recorder.log.tokenizer = self.manager.tokenizer
        self.adapters |= self.config.first_adapters
        self.judge = self.judge_kind(self._tokens)
        config = self.config
        self.recorder.simulates(config.simulate_acc_len)
        self.recorder.split({"tp": config.tp_size, "pp": config.pp_size, "nodes": config.nnodes})
        self.bodies = Bodies(
            config.max_body_size * 2**20, config.request_timeout, config.allow_unknown_fields
        )

    @property
    def model_name(self) -> str:
        return self.config.served_model_name or self.config.model_path

    @property
    def own_names(self) -> tuple[str, ...]:
        """Names by which a request asks for the model itself."""
        return "", "default", self.model_name, self.config.model_path

    @property
    def vocab_size(self) -> int:
        return self.manager.engine.vocab_size

    @property
    def context_length(self) -> int:
        return self.manager.engine.context_length

    def adapter_of(self, model: str) -> str:
        """The adapter that a request names as its model; "" for the model itself.

        Raises: RequestError 404
        """
        self.check_model(model)
        return model if model in self.adapters else ""

    @property
    def loaded_adapters(self) -> str:
        """For messages about names that are not among them."""
        return f"is not loaded; loaded adapters: {shown(sorted(self.adapters))}"

    @cached_property
    def vocabulary(self) -> Vocabulary:
        return Vocabulary(self.vocab_size, self.manager.engine.eos_token_ids)

    @cached_property
    def prompts(self) -> PromptReader:
        return PromptReader(self.manager.tokenizer, self.vocab_size, self.context_length)

    def _tokens(self) -> Tokens:
        assert self.manager.tokenizer is not None
        engine = self.manager.engine
        return Tokens(self.manager.tokenizer.json(), engine.vocab_size, engine.eos_token_ids)

    @cached_property
    def grammars(self) -> Grammars:
        whitespace = self.config.constrained_json_whitespace_pattern or None
        return Grammars(self.manager.tokenizer, self.judge, whitespace)

    @cached_property
    def infill(self) -> Infill | None:
        tokenizer = self.manager.tokenizer
        return Infill.of(tokenizer) if tokenizer is not None else None

    def model_config(self) -> dict[str, Any]:
        """The checkpoint's config.json as ``read_values`` completes it, or what a GGUF file has in
        its place; {} if it cannot be read."""
        try:
            return read_values(self.config.model_path)
        except (OSError, ValueError):
            return {}

    @cached_property
    def chat(self) -> ChatFormat:
        tokenizer = self.manager.tokenizer
        assert tokenizer is not None
        template, config = "", self.config
        if config.chat_template:
            template = template_source(config.chat_template)
        parsers = (config.tool_call_parser, config.reasoning_parser)
        return ChatFormat(tokenizer.hf, tokenizer.special_tokens(), template, *parsers)

    async def read(
        self,
        request: Request,
        parse: Callable[[dict[str, Any], ServerState], T],
        is_chat: bool = False,
    ) -> T:
        """The body as ``parse`` understands it, which may run in a thread, and does for chats.

        Raises: RequestError
        """
        return await self.bodies.read(request, lambda values: parse(values, self), is_chat=is_chat)

    async def read_control(self, request: Request, model: type[Model]) -> Model:
        """The short body of a route that takes no prompt.

        Raises: RequestError
        """
        return await self.bodies.read(request, partial(read, model), max_size=MAX_CONTROL_BODY)

    async def ask(self, max_nodes: int = 0, max_tokens: int = 0) -> message.StateReply:
        """The scheduler's gauges, and what the cache holds. Raises: RequestError 503"""
        asked = message.GetState(max_nodes=max_nodes, max_tokens=max_tokens)
        return await heard(self.manager.ask(asked, 5.0), "the scheduler does not answer")

    def check_model(self, name: str) -> None:
        """Raises: RequestError 404 for another one's name"""
        if name not in self.own_names and name not in self.adapters:
            remedy = f"this server has {shown(self.model_name)}"
            if self.adapters:
                remedy += f" and the adapters {shown(sorted(self.adapters))}"
            raise RequestError(f"model = {shown(name)}: {remedy}", 404, "model")

    def limit_samples(self, num_prompts: int, samples: int) -> None:
        """Raises: RequestError 400 for more than the server ever holds."""
        most = self.manager.max_samples
        if samples > most:
            raise RequestError(
                f"{num_prompts} prompts with n samples each are {samples} samples, but the server "
                f"holds at most {most} (--max-running-requests and --max-queued-requests): send "
                "fewer at a time",
                param="n",
            )

    def submit(self, live: LiveRequest) -> None:
        """Starts its samples. Raises: RequestError 400 or 503."""
        constrained = any(prompt.sampling.is_constrained for prompt in live.prompts)
        if self.config.simulate_acc_len and constrained:
            raise RequestError(
                f"--simulate-acc-len {self.config.simulate_acc_len:g} forces tokens that no "
                "grammar allows: leave the grammar out, or ask a server without it"
            )
        live.trace_parent = trace_parent.get()
        try:
            self.manager.submit(live)
        except DuplicateRid as error:
            raise RequestError(str(error), param="rid") from None
        except QueueFull as error:
            raise RequestError(str(error), 503, retry_after=1) from None
        except EngineDead as error:
            raise RequestError(str(error), 503) from None


async def heard(question: Awaitable[T], silence: str = SILENCE) -> T:
    """The engine's answer.

    Raises: RequestError 503 if none comes; silence: what it says then.
    """
    try:
        return await question
    except (EngineDead, asyncio.TimeoutError) as error:
        raise RequestError(str(error) or silence, 503) from None


async def answered(question: Awaitable[R], silence: str = SILENCE) -> R:
    """As ``heard``. Raises: also RequestError 400, with the reason why nothing was done."""
    reply = await heard(question, silence)
    for each in reply if isinstance(reply, list) else [reply]:
        if each.problem:
            raise RequestError(each.problem)
    return reply


def server_state(request: Request) -> ServerState:
    """For the busiest routes: FastAPI takes 30 µs to hand over an argument."""
    return request.app.state.server


async def _state(request: Request) -> ServerState:
    return server_state(request)


State = Annotated[ServerState, Depends(_state)]  # what other routes are given as an argument


async def operated(request: Request, state: State) -> ServerState:
    """Raises: RequestError 401 where an admin key was set and the request does not carry it."""
    need_admin(request, state.config, request.url.path, by_default=True)
    return state


async def trusted(request: Request, state: State) -> ServerState:
    """For what reads folders of the server or takes its model away. Raises: RequestError 401, and
    403 where there is no admin key and other machines can reach the server."""
    local = is_loopback(state.config.host)
    need_admin(request, state.config, request.url.path, by_default=local)
    return state


Operated = Annotated[ServerState, Depends(operated)]
Trusted = Annotated[ServerState, Depends(trusted)]
