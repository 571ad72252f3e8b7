"""POST /v1/embeddings: a vector for each text, from the model's hidden states, as OpenAI's.

A text is a prompt from which nothing is generated. Its vector is that of its last token after the
final norm, or the mean of all tokens' (--pooling-method). A mean needs every token's hidden state,
which the prefix cache does not keep, so those prompts run as a whole; of others only the last token
has to run.
"""

from __future__ import annotations

import base64
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response

from mamba_eagle.core import SamplingParams
from mamba_eagle.limits import MAX_EMBEDDINGS, MAX_MODEL_LENGTH, MAX_RID_LENGTH
from mamba_eagle.server.cache_fields import read_cache_hints
from mamba_eagle.server.demand import check_demand
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.fields import Fields
from mamba_eagle.server.openai_body import read_prompts
from mamba_eagle.server.schedule_fields import read_schedule
from mamba_eagle.server.sse import json_parts, sample_error, wait_until_done
from mamba_eagle.server.state import ServerState, server_state
from mamba_eagle.tokenizer.sample import PromptRequest, Sample

FORMATS = ("float", "base64")
Vector = np.ndarray[Any, np.dtype[np.float32]]
router = APIRouter()


class EmbeddingJob(msgspec.Struct, kw_only=True):
    """What a body asks for."""

    rid: str
    model: str
    prompts: list[PromptRequest]
    as_base64: bool
    normalize: bool


@router.post("/v1/embeddings")
async def embeddings(request: Request) -> Response:
    """A vector for each text or list of token ids of ``input``."""
    state = server_state(request)
    job = await state.read(request, parse_embeddings)
    live = state.submit(job.rid, job.prompts)
    if not await wait_until_done(request, state.manager, live):
        return Response(status_code=499)  # nobody reads it
    for sample in live.samples:
        if (error := sample_error(sample)) is not None:
            raise error
    return json_response(await _reply(job, live.samples))


def parse_embeddings(fields: Fields, state: ServerState) -> EmbeddingJob:
    """Raises: RequestError 400"""
    encoding = fields.text("encoding_format", FORMATS[0])
    if encoding not in FORMATS:
        raise fields.wrong("encoding_format", f"must be {' or '.join(FORMATS)}")
    if fields.raw("dimensions") is not None:
        remedy = "the model was not trained for vectors that are cut: leave the field out"
        raise fields.wrong("dimensions", remedy)
    value = fields.raw("input")
    batch = isinstance(value, list) and value and isinstance(value[0], (str, list))
    if batch and len(value) > MAX_EMBEDDINGS:
        raise fields.too_many("input", "inputs", len(value), MAX_EMBEDDINGS)
    rid = fields.short_text("rid", MAX_RID_LENGTH) or f"embd-{uuid.uuid4().hex}"
    ids = read_prompts(fields, "input", state)
    names = [rid] if len(ids) == 1 else [f"{rid}_{number}" for number in range(len(ids))]
    prompts = [
        PromptRequest(
            rid=name,
            token_ids=prompt,
            sampling=SamplingParams(max_new_tokens=0, temperature=0.0),
            seed=0,
            sample_rids=[name],
            pooling=state.config.pooling_method,
            cache=read_cache_hints(fields, len(prompt)),
            **read_schedule(fields, state.config),
        )
        for name, prompt in zip(names, ids)
    ]
    check_demand(prompts, state.context_length)
    return EmbeddingJob(
        rid=rid,
        model=fields.short_text("model", MAX_MODEL_LENGTH) or state.model_name,
        prompts=prompts,
        as_base64=encoding == "base64",
        normalize=fields.flag("normalize", True),
    )


async def _reply(job: EmbeddingJob, samples: Sequence[Sample]) -> dict[str, Any]:
    def part(number: int) -> dict[str, Any]:
        vector = _vector(samples[number], job.normalize)
        made = base64.b64encode(vector.tobytes()).decode() if job.as_base64 else vector.tolist()
        return {"object": "embedding", "index": number, "embedding": made}

    tokens = sum(len(sample.prompt.token_ids) for sample in samples)
    return {
        "object": "list",
        "model": job.model,
        "data": await json_parts([partial(part, number) for number in range(len(samples))]),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _vector(sample: Sample, normalize: bool) -> Vector:
    """Of float32, little-endian; of length 1 if it is normalized.

    Raises: RequestError if the request was ended, or if the model made numbers that JSON has not.
    """
    if not sample.embedding:  # somebody ended it
        reason = sample.finish.message if sample.finish is not None else ""
        raise RequestError(f"the request was ended: {reason}")
    vector: Vector = np.frombuffer(sample.embedding, dtype="<f4")
    if not np.isfinite(vector).all():
        raise RequestError("the model's hidden states are not finite", 500)
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length).astype("<f4") if normalize and length else vector
