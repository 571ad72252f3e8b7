"""What every route that runs prompts takes: when to serve them, what the prefix cache is to do; and
bounds on products: a small body may ask for much work, memory or output."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Generic, TypeVar

from mamba_eagle import limits
from mamba_eagle.config import ServerConfig
from mamba_eagle.core import SamplingParams
from mamba_eagle.message import Generate
from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.kinds import Body, says
from mamba_eagle.server.errors import RequestError
from mamba_eagle.tokenizer.sample import LiveRequest

SECONDS = f"must be 0 (no limit) or at most {limits.MAX_TIMEOUT:.0f} seconds"
TIMEOUT = kinds.number(0, limits.MAX_TIMEOUT, must=SECONDS)
PIN = kinds.number(0, limits.MAX_PIN_SECONDS, must=f"must be 0 to {limits.MAX_PIN_SECONDS}")
PRIORITY = kinds.integer(-limits.MAX_PRIORITY, limits.MAX_PRIORITY)
POSITIONS = kinds.integers("positions", limits.MAX_CHECKPOINTS)
SESSION = kinds.short(limits.MAX_RID_LENGTH)
SALT = kinds.short(limits.MAX_CACHE_SALT, f"must have at most {limits.MAX_CACHE_SALT} characters")
Name = Annotated[str, kinds.short(limits.MAX_RID_LENGTH)]
ModelName = Annotated[str, kinds.short(limits.MAX_MODEL_LENGTH)]


class Served(Body):
    REFUSED = known.REFUSED
    HARMLESS = known.HARMLESS

    timeout: Annotated[float, TIMEOUT] = says(
        "seconds from arrival to the end; 0: no limit; the server's `--request-timeout` may be "
        "shorter",
        0.0,
    )
    priority: Annotated[int, PRIORITY] = says(
        "with `--schedule-policy priority`: higher ones are served first, and running requests "
        "step back for them; their texts do not change",
        0,
    )
    cache_salt: Annotated[str, SALT] = says("only requests of the same salt share a prefix", "")
    pin_seconds: Annotated[float, PIN] = says("how long the prompt is evicted last", 0.0)
    session_id: Annotated[str, SESSION] = says(
        "what the session's last request has run is evicted last while it is open "
        "(`/open_session`); a name that is not open is let through",
        "",
    )
    checkpoint: Annotated[list[int], POSITIONS] = says("where the prompt's state is kept", [])

    def wishes(self, config: ServerConfig, prompt_len: int) -> dict[str, Any]:
        """The fields of a prompt that say when it is served, and what the cache is to do.
        ``checkpoint`` counts tokens of the prompt; of a list of prompts it counts for each.

        Raises: RequestError 400
        """
        if self.priority and config.schedule_policy != "priority":
            remedy = (
                "this server does not order requests by priority: leave it out, or start the "
                "server with --schedule-policy priority"
            )
            raise RequestError.about("priority", self.priority, remedy)
        positions = self.checkpoint
        if not all(0 < position < prompt_len for position in positions):
            remedy = (
                f"each must be between 1 and {prompt_len - 1}: the prompt has {prompt_len} tokens, "
                "and the last one is always run"
            )
            raise RequestError.about("checkpoint", positions, remedy)
        return {
            "priority": self.priority,
            "salt": self.cache_salt,
            "pin_seconds": self.pin_seconds,
            "checkpoints": sorted(set(positions)),
            "session": self.session_id,
        }


class Named(Served):
    """Of all routes that run prompts but /generate, whose prompts may have names of their own."""

    model: ModelName = says("the served name, an adapter's or default; another is 404", "")
    rid: Name = says("a name for `/abort_request` and logs", "")


B = TypeVar("B", bound=Served)


class Job(LiveRequest, Generic[B]):
    """A body, understood: the request that it asks for."""

    def __init__(
        self, body: B, config: ServerConfig, rid: str, prompts: list[Generate], model: str = ""
    ) -> None:
        """model: as the reply names it."""
        super().__init__(rid, prompts)
        self.body, self.model = body, model
        given = [limit for limit in (body.timeout, config.request_timeout) if limit > 0]
        self.timeout = min(given, default=0.0)


# What is kept of each token of output until the reply, and of how many tokens at most.
KEPT_OF_OUTPUT = {
    "return_hidden_states": limits.MAX_HIDDEN_STATES,
    "return_spec_trace": limits.MAX_TRACED_TOKENS,
}
NAMES: Mapping[str, str] = {"top": "top_logprobs_num", "output": "max_new_tokens"}


def check_demand(
    prompts: Sequence[Generate], context_length: int, names: Mapping[str, str] = NAMES
) -> None:
    """names: what the route calls the number of best tokens and the limit of the output.

    Raises: RequestError 400
    """
    carried = sum(prompt.n * len(prompt.token_ids) for prompt in prompts)
    if carried > limits.MAX_PROMPT_TOKENS:
        raise RequestError(
            f"n: {len(prompts)} prompts and their samples carry {carried} tokens together, more "
            f"than the limit of {limits.MAX_PROMPT_TOKENS}: send fewer prompts, or a lower n",
            param="n",
        )
    entries = sum(prompt.n * _entries(prompt.sampling) for prompt in prompts)
    if entries > limits.MAX_TOKEN_ENTRIES:
        raise RequestError(
            f"logit_bias, stop_token_ids, allowed_token_ids, bad_words: all samples have {entries} "
            f"entries together, more than the limit of {limits.MAX_TOKEN_ENTRIES}: send fewer, or "
            "a lower n",
            param="logit_bias",
        )
    for name, most in KEPT_OF_OUTPUT.items():
        tokens = sum(p.n * _output(p, context_length) for p in prompts if getattr(p, name))
        if tokens > most:
            raise RequestError(
                f"{name}: all samples have up to {tokens} tokens together, more than the limit of "
                f"{most}: lower {names['output']} or n",
                param=name,
            )
    _check_logprobs([p for p in prompts if p.return_logprob], context_length, names)


def _output(prompt: Generate, context_length: int) -> int:
    """The most tokens that a sample can have."""
    return min(prompt.sampling.max_new_tokens, context_length - len(prompt.token_ids))


def _entries(sampling: SamplingParams) -> int:
    lists = (sampling.logit_bias, sampling.stop_token_ids, sampling.allowed_token_ids)
    return sum(map(len, (*lists, *sampling.bad_word_ids)))


def _check_logprobs(
    prompts: Sequence[Generate], context_length: int, names: Mapping[str, str]
) -> None:
    top, output = names["top"], names["output"]
    total = 0
    for prompt in prompts:
        best = 1 + prompt.top_logprobs + len(prompt.token_ids_logprob)
        length = len(prompt.token_ids)
        wanted = (length - prompt.logprob_start) * best if prompt.logprob_start >= 0 else 0
        if wanted > limits.MAX_INPUT_LOGPROBS:
            raise RequestError(
                f"logprobs of a prompt: {length - max(prompt.logprob_start, 0)} positions with "
                f"{best} each are {wanted}, more than the limit of {limits.MAX_INPUT_LOGPROBS}: "
                f"ask for fewer positions (logprob_start_len) or a lower {top}",
                param=top,
            )
        total += prompt.n * (wanted + _output(prompt, context_length) * best)
    if total > limits.MAX_LOGPROBS:
        raise RequestError(
            f"{top}: tokens of all samples with their best ones are up to {total} logprobs, more "
            f"than the limit of {limits.MAX_LOGPROBS}: lower {top}, {output} or n",
            param=top,
        )


def fitting_output(n: int, top: int | None, traced: bool, room: int) -> int:
    """The longest output, up to ``room``, whose logprobs and traces stay within the limits; for
    requests that name no length. top None: no logprobs."""
    if top is not None:
        room = min(room, max(1, limits.MAX_LOGPROBS // (n * (1 + top))))
    return min(room, max(1, limits.MAX_TRACED_TOKENS // n)) if traced else room
