"""POST /v1/score: how likely each of some tokens is to follow each of some texts, as SGLang's.

A label's probability is that of a prompt's last token: the text and the label are one prompt, from
which nothing is generated. The first label of each item goes first, and leaves its text's state in
the prefix cache; the other labels continue from there. So the engine knows nothing of scores.
"""

from __future__ import annotations

import math
import uuid
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Request, Response

from mamba_eagle.core import SamplingParams
from mamba_eagle.limits import MAX_PROMPTS
from mamba_eagle.message import CacheHints
from mamba_eagle.server.apis.sse import sample_error, wait_until_done
from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.demand import check_demand
from mamba_eagle.server.bodies.model import Flag, needs, read, says
from mamba_eagle.server.bodies.prompts import limit_prompts
from mamba_eagle.server.bodies.served import Named
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.state import ServerState, server_state
from mamba_eagle.tokenizer.sample import PromptRequest

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


@router.post("/v1/score")
async def score(request: Request) -> Response:
    """How likely each of ``label_token_ids`` is to follow each of ``items`` behind ``query``."""
    state = server_state(request)
    job = await state.read(request, parse_score)
    logprobs: list[list[float]] = [[] for _ in job.items]
    # The first labels leave behind what the others continue from.
    waves = (job.prompts(state, slice(0, 1)), job.prompts(state, slice(1, None)))
    for prompts in filter(None, waves):
        live = state.submit(job.rid, [prompt for _, prompt in prompts])
        if not await wait_until_done(request, state.manager, live):
            return Response(status_code=499)  # the client has left
        for (item, _), sample in zip(prompts, live.samples, strict=True):
            if (error := sample_error(sample)) is not None:
                raise error
            if not sample.input_logprobs:  # somebody ended it
                reason = sample.finish.message if sample.finish is not None else ""
                raise RequestError(f"the request was ended: {reason}")
            logprob = sample.input_logprobs[-1].logprob
            assert logprob is not None  # only the first token of a prompt has none
            logprobs[item].append(logprob)
    return json_response(job.reply(logprobs))


class ScoreJob(msgspec.Struct, kw_only=True):
    """items: each with its text's tokens; labels: each item's tokens to be scored."""

    rid: str
    model: str
    items: list[list[int]]
    labels: list[list[int]]
    temperature: float  # 0: probabilities as they are
    with_logprobs: bool
    hints: list[CacheHints]  # of each item
    schedule: dict[str, Any]

    def prompts(self, state: ServerState, which: slice) -> list[tuple[int, PromptRequest]]:
        """Some of each item's labels, with the item's number.

        Raises: RequestError 400
        """
        made = []
        for number, (ids, labels, hints) in enumerate(zip(self.items, self.labels, self.hints)):
            # The label's logits are those of the item's last token, which runs again.
            end = [len(ids) - 1] if len(ids) > 1 and which.start == 0 else []
            own = msgspec.structs.replace(hints, positions=sorted({*hints.positions, *end}))
            for label in labels[which]:
                rid = f"{self.rid}_{number}_{label}"
                prompt = PromptRequest(
                    rid=rid,
                    token_ids=[*ids, label],
                    sampling=SamplingParams(max_new_tokens=0, temperature=0.0),
                    seed=0,
                    sample_rids=[rid],
                    return_logprob=True,
                    logprob_start=len(ids),
                    cache=own,
                    **self.schedule,
                )
                made.append((number, prompt))
        check_demand([prompt for _, prompt in made], state.context_length)
        return made

    def reply(self, logprobs: Sequence[Sequence[float]]) -> dict[str, Any]:
        tokens = sum(map(len, self.items))
        made: dict[str, Any] = {
            "object": "scoring",
            "model": self.model,
            "scores": [_scores(one, self.temperature) for one in logprobs],
            "usage": {"prompt_tokens": tokens, "total_tokens": tokens, "completion_tokens": 0},
        }
        return made | ({"token_logprobs": logprobs} if self.with_logprobs else {})


def _scores(logprobs: Sequence[float], temperature: float) -> list[float]:
    """Probabilities among all tokens, or with a temperature among the labels."""
    if not temperature:
        return [math.exp(value) for value in logprobs]
    best = max(logprobs)
    weights = [math.exp((value - best) / temperature) for value in logprobs]
    return [weight / sum(weights) for weight in weights]


def parse_score(values: dict[str, Any], state: ServerState) -> ScoreJob:
    """Raises: RequestError 400"""
    body = read(ScoreBody, values)
    if body.temperature != 1 and not body.apply_softmax:
        remedy = "divides logprobs of apply_softmax: send that as well"
        raise RequestError.about("temperature", body.temperature, remedy)
    items = _items(body, state)
    labels = _labels(body.label_token_ids, state, len(items))
    state.limit_samples(len(items), sum(map(len, labels)))
    return ScoreJob(
        rid=body.rid or f"score-{uuid.uuid4().hex}",
        model=body.model or state.model_name,
        items=items,
        labels=labels,
        temperature=body.temperature if body.apply_softmax else 0.0,
        with_logprobs=body.return_token_logprobs,
        hints=[body.cache_hints(len(ids) + 1) for ids in items],
        schedule=body.schedule(state.config) | {"adapter": state.adapter_of(body.model)},
    )


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
    return state.prompts.prompts(
        [one + start if item_first else start + one for one in checked], names
    )


def _labels(value: Any, state: ServerState, count: int) -> list[list[int]]:
    """Of each item: those of all, or its own."""
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
