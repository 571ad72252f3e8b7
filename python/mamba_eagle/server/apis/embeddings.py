"""POST /v1/embeddings: a vector for each text, from the model's hidden states, as OpenAI's.

A text is a prompt from which nothing is generated. Its vector is that of its last token after the
final norm, or the mean of all tokens' (--pooling-method). A mean needs every token's hidden state,
which the prefix cache does not keep, so those prompts run as a whole; of others only the last token
has to run.
"""

import base64
import uuid
from functools import partial
from typing import Annotated, Any

import numpy as np
from fastapi import APIRouter, Request, Response

from mamba_eagle.core import SamplingParams
from mamba_eagle.limits import MAX_EMBEDDINGS
from mamba_eagle.message import Generate
from mamba_eagle.server.apis.sse import json_parts, wait_for_success
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.kinds import Flag, needs, read, says, takes
from mamba_eagle.server.bodies.prompts import ANY_PROMPTS, count_prompts, limit_prompts
from mamba_eagle.server.bodies.served import Job, Named, check_demand
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.state import ServerState, State
from mamba_eagle.tokenizer.sample import Sample

FORMAT = kinds.choice_of("float", "base64")
DIMENSIONS = kinds.Kind(
    lambda value: None,
    "the model was not trained for vectors that are cut: leave the field out",
    {"type": "null"},
)
Vector = np.ndarray[Any, np.dtype[np.float32]]
router = APIRouter()


class EmbeddingsBody(Named):
    """Texts, or token ids."""

    input: Annotated[Any, ANY_PROMPTS] = needs(f"one or several, up to {MAX_EMBEDDINGS}")
    encoding_format: Annotated[str, FORMAT] = says(
        "a list of numbers, or float32 as bytes", "float"
    )
    dimensions: Annotated[None, DIMENSIONS] = says("vectors are never cut")
    normalize: Flag = says("to a length of 1", True)


@router.post("/v1/embeddings", openapi_extra=takes(EmbeddingsBody))
async def embeddings(request: Request, state: State) -> Response:
    """A vector for each text or list of token ids of ``input``."""
    job = await state.read(request, parse_embeddings)
    state.submit(job)
    await wait_for_success(request, state, job)
    return json_response(await _reply(job))


def parse_embeddings(values: dict[str, Any], state: ServerState) -> Job[EmbeddingsBody]:
    """Raises: RequestError 400"""
    body = read(EmbeddingsBody, values)
    count = count_prompts(body.input)
    if count > MAX_EMBEDDINGS:
        limit_prompts(body.input, "input", "inputs", MAX_EMBEDDINGS)
    state.limit_samples(count, count)
    rid = body.rid or f"embd-{uuid.uuid4().hex}"
    ids = state.prompts.any(body.input, "input")
    names = [rid] if len(ids) == 1 else [f"{rid}_{number}" for number in range(len(ids))]
    prompts = [
        Generate(
            rid=name,
            token_ids=prompt,
            sampling=SamplingParams(max_new_tokens=0, temperature=0.0),
            seed=0,
            pooling=state.config.pooling_method,
            adapter=state.adapter_of(body.model),
            **body.wishes(state.config, len(prompt)),
        )
        for name, prompt in zip(names, ids)
    ]
    check_demand(prompts, state.context_length)
    return Job(body, state.config, rid, prompts, body.model or state.model_name)


async def _reply(job: Job[EmbeddingsBody]) -> dict[str, Any]:
    samples = job.samples
    as_base64 = job.body.encoding_format == "base64"

    def part(number: int) -> dict[str, Any]:
        vector = _vector(samples[number], job.body.normalize)
        made = base64.b64encode(vector.tobytes()).decode() if as_base64 else vector.tolist()
        return {"object": "embedding", "index": number, "embedding": made}

    tokens = sum(len(sample.prompt.token_ids) for sample in samples)
    return {
        "object": "list",
        "model": job.model,
        "data": await json_parts([partial(part, number) for number in range(len(samples))]),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens},
    }


def _vector(sample: Sample, normalize: bool) -> Vector:
    """In float32, little-endian; of length 1 if it is normalized.

    Raises: RequestError if the model made numbers that JSON has not.
    """
    vector: Vector = np.frombuffer(sample.embedding, dtype="<f4")
    if not np.isfinite(vector).all():
        raise RequestError("the model's hidden states are not finite", 500)
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length).astype("<f4") if normalize and length else vector
