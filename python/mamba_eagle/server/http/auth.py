"""API keys: where they come from, and who carries one."""

import hmac
import os
from collections.abc import Collection, Mapping

from starlette.requests import Request
from starlette.types import Scope

from mamba_eagle.config import ConfigError, ServerConfig
from mamba_eagle.core import is_unicode
from mamba_eagle.server.errors import RequestError

KEY_VARIABLE = "MAMBA_EAGLE_API_KEY"
KEY_IN_SCOPE = "mamba_eagle.key"
NEEDED = (
    "the server was started with an API key (--api-key): send it as 'Authorization: Bearer KEY' "
    "or 'x-api-key: KEY'"
)


def api_keys(config: ServerConfig, environment: Mapping[str, str] = os.environ) -> list[str]:
    """All that are valid: the flags', the file's (one per line) and the environment's; [] if the
    server is open.

    Raises: ConfigError for a source that is there but holds no key, since that opens the server
    to everybody by mistake.
    """
    given = config.api_key
    keys = [given] * bool(given) if isinstance(given, str) else list(given)
    if KEY_VARIABLE in environment:
        if not environment[KEY_VARIABLE].strip():
            raise ConfigError([f"{KEY_VARIABLE} is set but empty: set a key, or unset it"])
        if not is_unicode(environment[KEY_VARIABLE]):
            raise ConfigError([f"{KEY_VARIABLE}: is not text in UTF-8"])
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


def key_of(request: Request) -> str:
    """The key that let the request in; "" on a server without keys, and for what is open."""
    return request.scope.get(KEY_IN_SCOPE) or ""


def need_key(scope: Scope, keys: Collection[str], open_paths: Collection[str]) -> None:
    """Raises: RequestError 401 for what carries no key and is not open"""
    if scope["path"] not in open_paths:
        scope[KEY_IN_SCOPE] = carried_key(scope, keys)
        if scope[KEY_IN_SCOPE] is None:
            raise RequestError(NEEDED, 401)


def need_admin(request: Request, config: ServerConfig, what: str, by_default: bool) -> None:
    """Refuses a request that an operator alone may send. what: it, for the message. by_default:
    whether everybody whom the server serves may send it where no admin key was set.

    Raises: RequestError 401 or 403
    """
    key = config.admin_api_key
    if not key and by_default:
        return
    if not key:
        raise RequestError(
            f"{what}: takes the admin key of a server that was started with --admin-api-key; this "
            "one was not",
            403,
        )
    if carried_key(request.scope, [key]) is None:
        raise RequestError(
            f"{what}: takes the admin key (--admin-api-key): send it as 'Authorization: Bearer "
            "KEY' or 'x-api-key: KEY'",
            401,
        )


def carried_key(scope: Scope, keys: Collection[str]) -> str | None:
    """The first of ``keys`` that an HTTP request carries.

    Raises: RequestError if a header for a key comes twice: proxies take the first or the last.
    """
    names = [name for name, _ in scope["headers"]]
    for name in (b"authorization", b"x-api-key"):
        if names.count(name) > 1:
            raise RequestError(
                f"the header {name.decode()} came {names.count(name)} times: send one"
            )
    headers = dict(scope["headers"])
    scheme, _, token = headers.get(b"authorization", b"").strip().partition(b" ")
    given = [headers.get(b"x-api-key", b"").strip()]
    if scheme.lower() == b"bearer":
        given.append(token.strip())
    # Clients differ in how they send letters beyond ASCII.
    encoded = [(key, key.encode()) for key in keys]
    encoded += [(key, key.encode("latin-1")) for key in keys if all(each <= "\xff" for each in key)]
    # Every key is compared with in full: the time taken tells nothing about them.
    matches = [(key, hmac.compare_digest(one, sent)) for key, sent in encoded for one in given]
    return next((key for key, is_same in matches if is_same), None)
