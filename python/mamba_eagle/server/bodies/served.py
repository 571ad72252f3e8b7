"""What every route that runs prompts takes: when to serve them, what the prefix cache is to do."""

from dataclasses import dataclass
from typing import Annotated, Any, Generic, TypeVar

from mamba_eagle.config import ServerConfig
from mamba_eagle.limits import (
    MAX_CACHE_SALT,
    MAX_CHECKPOINTS,
    MAX_MODEL_LENGTH,
    MAX_PIN_SECONDS,
    MAX_PRIORITY,
    MAX_RID_LENGTH,
    MAX_TIMEOUT,
)
from mamba_eagle.message import CacheHints
from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.model import Body, says
from mamba_eagle.server.errors import RequestError
from mamba_eagle.tokenizer.sample import PromptRequest

SECONDS = f"must be above 0 and at most {MAX_TIMEOUT:.0f} seconds"
TIMEOUT = kinds.number(0, MAX_TIMEOUT, above=0, must=SECONDS)
PIN = kinds.number(0, MAX_PIN_SECONDS, must=f"must be 0 to {MAX_PIN_SECONDS}")
PRIORITY = kinds.integer(-MAX_PRIORITY, MAX_PRIORITY)
POSITIONS = kinds.integers("positions", MAX_CHECKPOINTS)
SESSION = kinds.short(MAX_RID_LENGTH)
SALT = kinds.short(MAX_CACHE_SALT, f"must have at most {MAX_CACHE_SALT} characters")
Name = Annotated[str, kinds.short(MAX_RID_LENGTH)]
ModelName = Annotated[str, kinds.short(MAX_MODEL_LENGTH)]


class Served(Body):
    REFUSED = known.REFUSED
    HARMLESS = known.HARMLESS

    timeout: Annotated[float, TIMEOUT] = says(
        "seconds from arrival to the end; the server's `--request-timeout` may be shorter", 0.0
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

    def schedule(self, config: ServerConfig) -> dict[str, Any]:
        """The fields of a PromptRequest that say when.

        Raises: RequestError 400
        """
        given = [limit for limit in (self.timeout, config.request_timeout) if limit > 0]
        if self.priority and config.schedule_policy != "priority":
            raise RequestError.about(
                "priority",
                self.priority,
                "this server does not order requests by priority: leave it out, or start the "
                "server with --schedule-policy priority",
            )
        return {"timeout": min(given, default=0.0), "priority": self.priority}

    def cache_hints(self, prompt_len: int) -> CacheHints:
        """``checkpoint`` counts tokens of the prompt; of a list of prompts it counts for each.

        Raises: RequestError 400
        """
        positions = self.checkpoint
        if not all(0 < position < prompt_len for position in positions):
            raise RequestError.about(
                "checkpoint",
                positions,
                f"each must be between 1 and {prompt_len - 1}: the prompt has {prompt_len} tokens, "
                "and the last one is always run",
            )
        return CacheHints(
            salt=self.cache_salt,
            pin_seconds=self.pin_seconds,
            positions=sorted(set(positions)),
            session=self.session_id,
        )


class Named(Served):
    """Of all routes that run prompts but /generate, whose prompts may have names of their own."""

    model: ModelName = says("the served name, an adapter's or default; another is 404", "")
    rid: Name = says("a name for `/abort_request` and logs", "")


B = TypeVar("B", bound=Served)


@dataclass(kw_only=True)
class Job(Generic[B]):
    """A body, understood. model: as the reply names it."""

    body: B
    rid: str
    prompts: list[PromptRequest]
    model: str = ""
