"""The engine as a library: a server's parameters and replies without HTTP.

    with Engine("/models/nemotron", speculative_num_steps=3) as engine:
        print(engine.generate("1 + 1 =", {"max_new_tokens": 8})["text"])

Scheduler and runner are processes of their own, as a server's; with ``in_process=True`` they are
threads. Calls may come from any thread and any event loop; requests that are under way at the same
time are batched.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

import msgspec
from starlette.types import ASGIApp

from mamba_eagle.chat.format import chat_problems
from mamba_eagle.config import ConfigError, ServerConfig, from_keywords
from mamba_eagle.engine_loop import EngineError, EngineLaunch, EngineLoop, ThreadLaunch
from mamba_eagle.resolve import resolve
from mamba_eagle.server.bodies.grammars import whitespace_problems
from mamba_eagle.server.http.asgi_client import Call, encoded
from mamba_eagle.tokenizer.text import TextTokenizer

Reply = dict[str, Any]
Parameters = dict[str, Any]
GENERATE, CHAT, EMBEDDINGS = "/generate", "/v1/chat/completions", "/v1/embeddings"
DONE = b"[DONE]"


class Answer(NamedTuple):
    """A reply with its HTTP status."""

    status: int
    body: Any


class Engine(EngineLoop):
    """A model that generates. Close it, or use it as a context manager."""

    def __init__(
        self, model_path: str | PurePath = "", *, in_process: bool = False, **settings: Any
    ) -> None:
        """Loads the model; returns when it is ready.

        Args:
            model_path: checkpoint folder or Hugging Face name; "": the embedded model.
            in_process: no other processes are started, for debuggers, notebooks and places that
                allow none. The texts are the same; tokens take longer, since the model's Python
                code and the caller's share one interpreter.
            settings: a server's, by their flags' names with underscores; paths may be Path objects.

        Raises: ConfigError (a ValueError) with every setting that cannot work; EngineError if the
            model cannot be loaded.
        """
        known = {"log_level": "warning", "model_path": model_path, **settings}
        config = from_keywords(ServerConfig, "Engine", known)
        problems = chat_problems(config) + whitespace_problems(config)
        if config.nnodes > 1:
            problems.append("nnodes: is for a server; an Engine runs on one machine")
        elif in_process and config.num_ranks > 1:
            problems.append(
                f"in_process: --tp-size {config.tp_size} and --pp-size {config.pp_size} need "
                f"{config.num_ranks} processes; leave them or in_process out"
            )
        if problems:
            raise ConfigError(problems)
        super().__init__(resolve(config), ThreadLaunch if in_process else EngineLaunch)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """None with ``skip_tokenizer_init``."""
        return self._launch.manager.tokenizer

    def generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Parameters | Sequence[Parameters] | None = None,
        **fields: Any,
    ) -> Any:
        """What POST /generate replies: a dict, or a list of them for several prompts or samples.

        Args:
            prompt: a text or a list of texts. Or give ``input_ids``, one list of token ids or many.
            fields: others of a /generate body, such as return_logprob.

        Raises: EngineError
        """
        return self._wait(_reply(self._app, GENERATE, _body(prompt, sampling_params, fields)))

    async def async_generate(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Parameters | Sequence[Parameters] | None = None,
        **fields: Any,
    ) -> Any:
        """``generate`` for callers with an event loop. Cancelling it ends the request."""
        body = _body(prompt, sampling_params, fields)
        return await self._bridge(_reply(self._app, GENERATE, body))

    def stream(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Parameters | Sequence[Parameters] | None = None,
        **fields: Any,
    ) -> Iterator[Reply]:
        """``generate`` in pieces, each with what is new. Leaving the loop ends the request.

        Raises: EngineError
        """
        body = {**_body(prompt, sampling_params, {"incremental": True, **fields}), "stream": True}
        events = self._wait(_open(self._app, GENERATE, body))
        try:
            while (event := self._wait(events.next())) is not None:
                yield event
        finally:
            self._wait(events.close())

    async def async_stream(
        self,
        prompt: str | Sequence[str] | None = None,
        sampling_params: Parameters | Sequence[Parameters] | None = None,
        **fields: Any,
    ) -> AsyncIterator[Reply]:
        """``stream`` for callers with an event loop."""
        body = {**_body(prompt, sampling_params, {"incremental": True, **fields}), "stream": True}
        events = await self._bridge(_open(self._app, GENERATE, body))
        try:
            while (event := await self._bridge(events.next())) is not None:
                yield event
        finally:
            await self._bridge(events.close())

    def chat(self, messages: Sequence[Parameters], **fields: Any) -> Reply:
        """What POST /v1/chat/completions replies.

        Raises: EngineError
        """
        return self._wait(_reply(self._app, CHAT, {"messages": list(messages), **fields}))

    def score(self, prompt: str, continuations: Sequence[str]) -> list[float]:
        """The log probability of each text after the prompt, natural logarithm, summed over its
        tokens.

        Raises: EngineError; ValueError without a tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError("score needs a tokenizer: start without skip_tokenizer_init")
        start = self.tokenizer.encode(prompt)
        whole = self.tokenizer.encode_all([prompt + text for text in continuations])
        replies = self.generate(
            sampling_params={"max_new_tokens": 0},
            input_ids=whole,
            return_logprob=True,
            # The first token follows nothing and has no probability.
            logprob_start_len=[max(1, _shared(start, ids)) for ids in whole],
        )
        logprobs = [reply["meta_info"]["input_token_logprobs"] for reply in replies]
        return [sum(value for value, *_ in values) for values in logprobs]

    def embed(self, texts: str | Sequence[str] | Sequence[Sequence[int]]) -> list[list[float]]:
        """The vectors that POST /v1/embeddings replies, one for each text or list of token ids.

        Raises: EngineError
        """
        body = {"input": texts if isinstance(texts, str) else list(texts)}
        reply = self._wait(_reply(self._app, EMBEDDINGS, body))
        return [one["embedding"] for one in reply["data"]]

    # ── for trainers: docs/rollouts.md ───────────────────────────────────────────────────────

    def pause_generation(self, mode: str = "abort") -> Reply:
        """Returns when no step is under way. mode: abort, retract or in_place.

        Raises: EngineError, as all of these.
        """
        return self._post("/pause_generation", mode=mode)

    def continue_generation(self) -> Reply:
        return self._post("/continue_generation")

    def reset_prefix_cache(self) -> Reply:
        return self._post("/reset_prefix_cache")

    def update_weights_from_disk(self, model_path: str = "", **fields: Any) -> Reply:
        """fields: draft_model_path, weight_version, abort_all_requests. If names, shapes or dtypes
        do not fit, nothing changes."""
        return self._post("/update_weights_from_disk", model_path=model_path, **fields)

    def release_memory_occupation(self, tags: Sequence[str] = ()) -> Reply:
        """Frees weights and pools (both tags: weights, kv_cache) until all of it is resumed."""
        return self._post("/release_memory_occupation", tags=list(tags))

    def resume_memory_occupation(self, tags: Sequence[str] = ()) -> Reply:
        return self._post("/resume_memory_occupation", tags=list(tags))

    def _post(self, path: str, **body: Any) -> Reply:
        return self._wait(_reply(self._app, path, body))

    async def async_post(self, path: str, body: Parameters) -> Answer:
        """What any POST route replies, errors too."""
        return await self._bridge(_post(self._app, path, body))


# ── requests on that loop ────────────────────────────────────────────────────────────────────


class _Events:
    """The objects of a stream."""

    def __init__(self, call: Call) -> None:
        self._call = call
        self._pieces = call.pieces()
        self._rest = b""

    async def next(self) -> Reply | None:
        """None at the end. Raises: EngineError"""
        while b"\n\n" not in self._rest:
            piece = await anext(self._pieces, None)
            if piece is None:
                if self._call.status != 200:
                    raise _error(msgspec.json.decode(self._rest or b"{}"), self._call.status)
                return None
            self._rest += piece
        event, _, self._rest = self._rest.partition(b"\n\n")
        if not event.startswith(b"data: "):  # a comment
            return await self.next()
        content = event.removeprefix(b"data: ")
        if content == DONE:
            return None
        reply: Reply = msgspec.json.decode(content)
        if "error" in reply:
            raise _error(reply, reply["error"].get("code", 500))
        return reply

    async def close(self) -> None:
        await self._call.close()


async def _open(app: ASGIApp, path: str, body: Parameters) -> _Events:
    return _Events(Call(app, path, encoded(body)))


async def _reply(app: ASGIApp, path: str, body: Parameters) -> Any:
    if body.get("stream"):
        raise EngineError("stream = true: use stream() or async_stream()", 400, "stream")
    status, reply = await _post(app, path, body)
    if status != 200:
        raise _error(reply, status)
    return reply


async def _post(app: ASGIApp, path: str, body: Parameters) -> Answer:
    call = Call(app, path, encoded(body))
    text = await call.whole()
    return Answer(call.status, msgspec.json.decode(text or b"{}"))


def _error(reply: Reply, status: int) -> EngineError:
    error = reply.get("error", {})
    return EngineError(error.get("message", "the request failed"), status, error.get("param"))


def _body(prompt: Any, sampling_params: Any, fields: Parameters) -> Parameters:
    body = {"text": prompt, "sampling_params": sampling_params, **fields}
    return {name: value for name, value in body.items() if value is not None}


def _shared(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two lists begin with alike."""
    pairs = zip(a, b)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))
