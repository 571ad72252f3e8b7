"""API keys: where they come from, and who carries one."""

from __future__ import annotations

import hmac
import os
from collections.abc import Collection, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from mamba_eagle.config import ConfigError, ServerConfig
from mamba_eagle.server.errors import RequestError

KEY_VARIABLE = "MAMBA_EAGLE_API_KEY"
NEEDED = (
    "the server was started with an API key (--api-key): send it as 'Authorization: Bearer KEY' "
    "or 'x-api-key: KEY'"
)


def api_keys(config: ServerConfig, environment: Mapping[str, str] = os.environ) -> list[str]:
    """All that are valid: the flag's, the file's (one per line) and the environment's; [] if the
    server is open.

    Raises: ConfigError for a source that is there but holds no key, since that opens the server
    to everybody by mistake.
    """
    keys = [config.api_key] if config.api_key else []
    if KEY_VARIABLE in environment:
        if not environment[KEY_VARIABLE].strip():
            raise ConfigError([f"{KEY_VARIABLE} is set but empty: set a key, or unset it"])
        keys.append(environment[KEY_VARIABLE].strip())
    if config.api_key_file:
        keys += _keys_in(config.api_key_file)
    return keys


def _keys_in(path: str) -> list[str]:
    flag = f"--api-key-file {path}"
    try:
        with open(path, encoding="utf-8") as file:
            keys = [line.strip() for line in file if line.strip()]
    except OSError as error:
        raise ConfigError([f"{flag}: {error.strerror or error}"]) from None
    except UnicodeDecodeError:
        raise ConfigError([f"{flag}: is not text in UTF-8"]) from None
    if not keys:
        raise ConfigError([f"{flag}: has no key; write one per line"])
    return keys


class KeyAuth:
    """Lets through what carries a key, and what is open. Plain ASGI: streams pass untouched."""

    def __init__(self, app: ASGIApp, keys: Collection[str], open_paths: Collection[str]) -> None:
        self.app = app
        self.open_paths = frozenset(open_paths)
        self.keys = keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        open_to_all = scope["type"] != "http" or scope["path"] in self.open_paths
        if open_to_all or carries_key(scope, self.keys):
            await self.app(scope, receive, send)
            return
        await RequestError(NEEDED, 401).response()(scope, receive, send)


def carries_key(scope: Scope, keys: Collection[str]) -> bool:
    """Whether an HTTP request carries one of ``keys``."""
    headers = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").strip().partition(b" ")
    given = [headers.get(b"x-api-key", b"").strip()]
    if scheme.lower() == b"bearer":
        given.append(token.strip())
    # Clients differ in how they send letters beyond ASCII.
    encoded = {key.encode() for key in keys}
    encoded |= {key.encode("latin-1") for key in keys if _is_latin(key)}
    # Every key is compared with in full: the time taken tells nothing about them.
    matches = [hmac.compare_digest(one, key) for one in given for key in encoded]
    return any(matches)


def _is_latin(key: str) -> bool:
    try:
        key.encode("latin-1")
    except UnicodeEncodeError:
        return False
    return True
