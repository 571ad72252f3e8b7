"""When a body wants to be served: timeout, priority."""

from __future__ import annotations

from typing import Any

from mamba_eagle.config import ServerConfig
from mamba_eagle.limits import MAX_PRIORITY, MAX_TIMEOUT
from mamba_eagle.server.fields import Fields


def read_schedule(fields: Fields, config: ServerConfig) -> dict[str, Any]:
    """The fields of a PromptRequest that say so.

    Raises: RequestError 400
    """
    seconds = fields.number("timeout", 0.0)
    if fields.raw("timeout") is not None and not 0 < seconds <= MAX_TIMEOUT:
        raise fields.wrong("timeout", f"must be above 0 and at most {MAX_TIMEOUT:.0f} seconds")
    given = [limit for limit in (seconds, config.request_timeout) if limit > 0]
    priority = fields.integer("priority", 0)
    if abs(priority) > MAX_PRIORITY:
        raise fields.wrong("priority", f"must be between {-MAX_PRIORITY} and {MAX_PRIORITY}")
    if priority and config.schedule_policy != "priority":
        raise fields.wrong(
            "priority",
            "this server does not order requests by priority: leave it out, or start the server "
            "with --schedule-policy priority",
        )
    return {"timeout": min(given, default=0.0), "priority": priority}
