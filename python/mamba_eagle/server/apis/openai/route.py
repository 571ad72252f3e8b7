"""POST /v1/completions and /v1/chat/completions: OpenAI's replies from the same engine."""

import time
from collections.abc import AsyncGenerator, Sequence
from itertools import groupby
from typing import Any

from fastapi import APIRouter, Request, Response

from mamba_eagle.server.apis import sse
from mamba_eagle.server.apis.openai.body import CompletionBody, OpenAIJob, parse_completion
from mamba_eagle.server.apis.openai.chat_body import ChatBody, parse_chat
from mamba_eagle.server.apis.openai.choice import ChatChoice, Choice, CompletionChoice
from mamba_eagle.server.bodies.kinds import takes
from mamba_eagle.server.errors import json_response
from mamba_eagle.server.state import ServerState, server_state
from mamba_eagle.tokenizer.sample import Sample

router = APIRouter()


@router.post("/v1/completions", openapi_extra=takes(CompletionBody))
async def completions(request: Request) -> Response:
    state = server_state(request)
    job = await state.read(request, parse_completion)
    return await _serve(request, state, job, CompletionChoice)


@router.post("/v1/chat/completions", openapi_extra=takes(ChatBody))
async def chat_completions(request: Request) -> Response:
    state = server_state(request)
    # In a thread however short it is: a template may take long.
    job = await state.read(request, parse_chat, is_chat=True)
    return await _serve(request, state, job, ChatChoice)


async def _serve(
    request: Request, state: ServerState, job: OpenAIJob, kind: type[Choice]
) -> Response:
    state.submit(job)
    tokenizer = state.prompts.need_tokenizer(request.url.path)
    choices = [kind(sample, tokenizer, job) for sample in job.samples]
    head = {"id": job.rid, "created": int(time.time()), "model": job.model}
    if job.body.stream:
        return sse.EventStream(state, job, _stream(state, job, choices, head))
    await sse.wait_for_success(
        request, state, job, lambda sample: choices[sample.index].take_logprobs()
    )
    given = best_of_each(choices, job.body.n)
    for choice in given:
        await choice.make_prompt_logprobs()
    return json_response(
        {
            **head,
            "object": choices[0].object_name,
            "choices": await sse.json_parts([choice.whole for choice in given]),
            "usage": usage(job.samples),
            **choices[0].of_reply(),
        }
    )


def best_of_each(choices: list[Choice], given: int) -> list[Choice]:
    """Those of each prompt's samples with the best mean logprobs, renumbered."""
    found: list[Choice] = []
    for _, own in groupby(choices, lambda choice: id(choice.sample.prompt)):
        samples = list(own)
        if len(samples) > given:
            samples = sorted(samples, key=lambda choice: -choice.mean_logprob)[:given]
        found += samples
    for index, choice in enumerate(found):
        choice.index = index
    return found


async def _stream(
    state: ServerState, job: OpenAIJob, choices: list[Choice], head: dict[str, Any]
) -> AsyncGenerator[bytes, None]:
    head = {**head, "object": choices[0].chunk_name}
    options = job.body.stream_options
    begun = False
    interval = state.config.stream_interval
    async for sample in sse.updates(job, lambda sample: interval):
        error = sse.choice_error(sample)
        if error is not None:
            if not begun:
                raise error
            yield sse.event(error.body())
            continue
        choice = choices[sample.index]
        for piece in choice.pieces():
            begun = True
            chunk = {**head, "choices": [piece]}
            if options.continuous_usage_stats:
                # Of the choice that the chunk is about, as vLLM and SGLang count.
                chunk["usage"] = usage([sample])
            elif options.include_usage:
                chunk["usage"] = None
            yield sse.event(chunk)
    if options.include_usage:
        yield sse.event({**head, "choices": [], "usage": usage(job.samples)})
    yield sse.DONE


def usage(samples: Sequence[Sample]) -> dict[str, Any]:
    """So far. Prompts count once, however many samples each has."""
    prompts = {id(sample.prompt): len(sample.prompt.token_ids) for sample in samples}
    cached = {id(sample.prompt): sample.last.cached_tokens for sample in reversed(samples)}
    prompt_tokens = sum(prompts.values())
    completion_tokens = sum(len(sample.output_ids) for sample in samples)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached.values())},
    }
