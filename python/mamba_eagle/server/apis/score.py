"""POST /v1/score: how likely each of some tokens is to follow each of some texts, as SGLang's.

The labels' logprobs are those that the engine names beside the one token that follows each text.
"""

import math
import uuid
from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any

from fastapi import APIRouter, Request, Response

from mamba_eagle.core import SamplingParams
from mamba_eagle.limits import MAX_PROMPTS
from mamba_eagle.message import Generate
from mamba_eagle.server.apis.sse import json_parts, wait_for_success
from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.kinds import Flag, needs, read, says, takes
from mamba_eagle.server.bodies.prompts import limit_prompts, limit_shared
from mamba_eagle.server.bodies.served import Job, Named, check_demand
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.state import ServerState, State

ITEMS = kinds.untouched(
    kinds.any_of(kinds.STRING, kinds.list_of(kinds.STRING), kinds.list_of(kinds.IDS)),
    "must be a string, a list of strings or lists of token ids",
)
LABELS = kinds.untouched(kinds.ID_LISTS, "must be token ids, or a list of such for each item")
TEMPERATURE = kinds.number(0, math.inf, above=0, must="must be above 0")
LABEL_IDS = kinds.integers("labels", MAX_PROMPTS)


class ScoreBody(Named):
    """Texts, and the tokens that may follow each."""

    query: Annotated[Any, kinds.untouched(kinds.any_of(kinds.STRING, kinds.IDS))] = says(
        "what all items have in common"
    )
    items: Annotated[Any, ITEMS] = needs("texts, or token ids, each with the query before it")
    item_first: Flag = says("the query comes after the item", False)
    label_token_ids: Annotated[Any, LABELS] = needs("tokens to be scored: of all items, or of each")
    apply_softmax: Flag = says("among the labels alone", False)
    temperature: Annotated[float, TEMPERATURE] = says("of apply_softmax", 1.0)
    return_token_logprobs: Flag = says("the labels' logprobs as well", False)

    REFUSED = known.SCORE


router = APIRouter()


@router.post("/v1/score", openapi_extra=takes(ScoreBody))
async def score(request: Request, state: State) -> Response:
    """How likely each of ``label_token_ids`` is to follow each of ``items`` behind ``query``."""
    # In a thread however short it is: a short query may become the beginning of thousands of texts.
    job = await state.read(request, parse_score, is_chat=True)
    if not job.prompts:
        return json_response(await _reply(job, []))
    state.submit(job)
    await wait_for_success(request, state, job)
    return json_response(await _reply(job, [one.logprobs[0].named for one in job.samples]))


async def _reply(job: Job[ScoreBody], logprobs: Sequence[list[float]]) -> dict[str, Any]:
    """logprobs: of each item's labels; of all items together as many as of a long output."""
    tokens = sum(len(prompt.token_ids) for prompt in job.prompts)
    temperature = job.body.temperature if job.body.apply_softmax else 0.0
    made: dict[str, Any] = {
        "object": "scoring",
        "model": job.model,
        "scores": await json_parts([partial(_scores, one, temperature) for one in logprobs]),
        "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
    }
    if job.body.return_token_logprobs:
        made["token_logprobs"] = await json_parts([one.copy for one in logprobs])
    return made


def _scores(logprobs: Sequence[float], temperature: float) -> list[float]:
    """Probabilities among all tokens, or with a temperature among the labels."""
    if not temperature:
        return [math.exp(value) for value in logprobs]
    best = max(logprobs)
    weights = [math.exp((value - best) / temperature) for value in logprobs]
    total = sum(weights)
    return [weight / total for weight in weights]


def parse_score(values: dict[str, Any], state: ServerState) -> Job[ScoreBody]:
    """Raises: RequestError 400"""
    body = read(ScoreBody, values)
    if body.temperature != 1 and not body.apply_softmax:
        remedy = "divides logprobs of apply_softmax: send that as well"
        raise RequestError.about("temperature", body.temperature, remedy)
    items = _items(body, state)
    labels = _labels(body.label_token_ids, state, len(items))
    state.limit_samples(len(items), len(items))
    adapter = state.adapter_of(body.model)
    rid = body.rid or f"score-{uuid.uuid4().hex}"
    prompts = [
        Generate(
            rid=f"{rid}_{number}",
            token_ids=ids,
            sampling=SamplingParams(max_new_tokens=1, temperature=0.0),
            seed=0,
            return_logprob=True,
            token_ids_logprob=own,
            adapter=adapter,
            **body.wishes(state.config, len(ids)),
        )
        for number, (ids, own) in enumerate(zip(items, labels))
    ]
    check_demand(prompts, state.context_length)
    return Job(body, state.config, rid, prompts, body.model or state.model_name)


def _items(body: ScoreBody, state: ServerState) -> list[list[int]]:
    """Query and item as one text each, or as one list of token ids."""
    query, item_first = body.query, body.item_first
    limit_prompts(body.items, "items")
    texts = [body.items] if isinstance(body.items, str) else body.items
    if not isinstance(texts, list):
        raise RequestError.about("items", body.items, ITEMS.must)
    names = [f"items[{i}]" for i in range(len(texts))]
    if texts and isinstance(texts[0], list):
        if not (query is None or isinstance(query, list)):
            raise RequestError.about("query", query, "must be token ids, as the items are")
        begin = state.prompts.check(query, "query") if query else []
        limit_shared(begin, len(texts), "query")
        if not all(isinstance(one, list) for one in texts):
            remedy = "must be lists of token ids, as the first is"
            raise RequestError.about("items", texts, remedy)
        joined = [one + begin if item_first else begin + one for one in texts]
        return [state.prompts.check(ids, name) for ids, name in zip(joined, names)]
    checked = kinds.all_of(texts, kinds.as_text)
    if checked is None:
        raise RequestError.about("items", body.items, ITEMS.must)
    if isinstance(query, list):
        raise RequestError.about("query", query, "must be a string, as the items are")
    start = "" if query is None else kinds.TEXT.take(query, "query")
    limit_shared(start, len(texts), "query")
    return state.prompts.prompts(
        [one + start if item_first else start + one for one in checked], names
    )


def _labels(value: Any, state: ServerState, count: int) -> list[list[int]]:
    """The labels of each item: those for all, or its own."""
    if not isinstance(value, list) or not value:
        raise RequestError.about("label_token_ids", value, LABELS.must)
    if not isinstance(value[0], list):
        return [_check_labels(value, "label_token_ids", state)] * count
    if len(value) != count:
        remedy = f"has {len(value)} lists for {count} items"
        raise RequestError.about("label_token_ids", value, remedy)
    return [_check_labels(one, f"label_token_ids[{i}]", state) for i, one in enumerate(value)]


def _check_labels(value: Any, name: str, state: ServerState) -> list[int]:
    limit_prompts(value, name, "labels")
    labels: list[int] = LABEL_IDS.take(value, name)
    if not labels or not all(0 <= label < state.vocab_size for label in labels):
        remedy = f"must be token ids between 0 and {state.vocab_size - 1}, at least one"
        raise RequestError.about(name, value, remedy)
    if len(set(labels)) != len(labels):
        raise RequestError.about(name, value, "a token is named twice: name each once")
    return labels
