"""POST /inference/v1/generate: vLLM's route from token ids to token ids, with no text between."""

import base64
import io
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request, Response

from mamba_eagle.message import TokenLogprob
from mamba_eagle.server.apis.generate.body import TOP, GenerateBody, parse_generate
from mamba_eagle.server.apis.openai.route import usage
from mamba_eagle.server.apis.sse import JsonList, json_parts, sample_error, wait_for_success
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.kinds import Flag, Object, needs, read, says, takes
from mamba_eagle.server.bodies.served import Job, Name, Served
from mamba_eagle.server.errors import json_response
from mamba_eagle.server.state import ServerState, State
from mamba_eagle.tokenizer.sample import Sample

router = APIRouter()


class TokensBody(Served):
    """A prompt's token ids, and how to continue it."""

    token_ids: Annotated[Any, kinds.untouched(kinds.IDS)] = needs("the prompt's token ids")
    sampling_params: Object = says(
        "as of /generate, with `max_tokens`, `min_tokens` and `logprobs` as vLLM names them", {}
    )
    request_id: Name | None = says("a name for `/abort_request` and logs")
    stream: Flag = says("not available", False)

    REFUSED = {
        "stream": "this route replies once: leave it out",
        "features": "this server takes token ids alone: leave it out",
    }


# vLLM's names, and this server's. What is not here has one name for both.
NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens"}


def parse_tokens(values: dict[str, Any], state: ServerState) -> Job[GenerateBody]:
    """Raises: RequestError 400"""
    body = read(TokensBody, values)
    given = {NAMES.get(name, name): value for name, value in body.sampling_params.items()}
    given.setdefault("max_new_tokens", 16)
    top = given.pop("logprobs", None)
    start = given.pop("routed_experts_prompt_start", None)
    best = None if top is None else TOP.take(top, "sampling_params.logprobs")
    kept = {name: values[name] for name in Served.model_fields if name in values}
    asked = {
        **kept,
        "input_ids": body.token_ids,
        "sampling_params": given,
        "rid": body.request_id,
        "return_logprob": top is not None,
        "top_logprobs_num": best,
        # as vLLM does, for all requests of a server that keeps them
        "return_routed_experts": state.config.enable_return_routed_experts,
        "routed_experts_start_len": start,
    }
    return parse_generate(asked, state)


@router.post("/inference/v1/generate", openapi_extra=takes(TokensBody))
async def generate(request: Request, state: State) -> Response:
    """Token ids in, token ids out, with their logprobs if ``sampling_params.logprobs`` is given."""
    job = await state.read(request, parse_tokens)
    state.submit(job)
    logprobs = [JsonList() for _ in job.samples]

    def take(sample: Sample) -> None:
        logprobs[sample.index].extend([_with_best(item) for item in sample.logprobs])
        sample.logprobs = []

    await wait_for_success(request, state, job, take, sample_error)
    choices = await json_parts(
        [partial(_choice, sample, state, own) for sample, own in zip(job.samples, logprobs)]
    )
    return json_response({"request_id": job.rid, "choices": choices, "usage": usage(job.samples)})


def _choice(sample: Sample, state: ServerState, logprobs: JsonList) -> dict[str, Any]:
    assert sample.finish is not None
    return {
        "index": sample.index,
        "token_ids": sample.output_ids,
        "logprobs": {"content": logprobs.raw()} if sample.prompt.return_logprob else None,
        "finish_reason": sample.finish.kind,
        "weight_versions": [span._asdict() for span in sample.versions],
        "routed_experts": _npy_of_experts(sample, state) if sample.routed_experts else None,
    }


def _npy_of_experts(sample: Sample, state: ServerState) -> str:
    """A file of numpy's, in base64: [tokens, layers, k] int32."""
    layers = int(state.manager.engine.details["layers"])
    experts = np.frombuffer(sample.routed_experts, dtype="<i4")
    file = io.BytesIO()
    np.save(file, experts.reshape(-1, layers, sample.experts_width // layers // 4))
    return base64.b64encode(file.getvalue()).decode()


def _with_best(item: TokenLogprob) -> dict[str, Any]:
    best = [_entry(token, logprob) for logprob, token in item.top]
    return _entry(item.token_id, item.logprob) | {"top_logprobs": best}


def _entry(token_id: int, logprob: float | None) -> dict[str, Any]:
    return {"token": f"token_id:{token_id}", "logprob": logprob}
