"""Which web pages may use the server.

A browser sends a page's requests to any address that the page names, this machine's own servers
included. Without an API key such a request would abort or flush whatever it likes, whether or not
the page may read the answer. So requests of pages that are not allowed are refused, and not only
hidden from them.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import Scope

from mamba_eagle.config import ServerConfig
from mamba_eagle.core import shown
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.http.at_reply import AtRequest
from mamba_eagle.server.http.auth import api_keys

LOOPBACK_PAGE = r"https?://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?"
# Browsers load an image of any address without naming the page's origin; only these would change
# something.
CHANGED_BY_GET = ("/flush_cache", "/health_generate")


def is_loopback(host: str) -> bool:
    return host == "localhost" or (is_address(host) and ipaddress.ip_address(host).is_loopback)


def is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True


def host_name(host: str) -> str:
    """A Host header without its port; "" if it is malformed."""
    try:
        return urlsplit(f"//{host}").hostname or ""
    except ValueError:
        return ""


def exposure_warning(config: ServerConfig) -> str | None:
    """For a server that anyone on the network may use."""
    if api_keys(config) or is_loopback(config.host):
        return None
    return (
        f"--host {config.host} without --api-key: anyone who can reach port {config.port} can use "
        "this server, abort its requests and flush its cache"
    )


def origin_problems(config: ServerConfig) -> list[str]:
    """What is wrong with --cors-origins."""
    value = config.cors_origins
    if value in ("auto", "off"):
        return []
    if value == "*":
        if api_keys(config) or is_loopback(config.host):
            return []
        return [
            f"--cors-origins '*' with --host {config.host} lets any web page use the server: add "
            "--api-key, or list the origins"
        ]
    wrong = [one for one in _listed(value) if not _is_origin(one)]
    if not _listed(value):
        wrong = [value]
    return [
        f"--cors-origins {shown(one)}: must be auto, off, * or origins such as "
        "https://chat.example.com:8080, with commas between"
        for one in wrong
    ]


def _listed(value: str) -> list[str]:
    return [one.strip() for one in value.split(",") if one.strip()]


def _is_origin(text: str) -> bool:
    try:
        parts = urlsplit(text)
        return bool(parts.scheme and parts.hostname) and f"{parts.scheme}://{parts.netloc}" == text
    except ValueError:
        return False


@dataclass(frozen=True)
class OriginPolicy:
    """The meaning of --cors-origins for this server."""

    any_page: bool
    loopback_pages: bool
    pages: tuple[str, ...]  # origins
    # A page whose host name is made to point at 127.0.0.1 is of the server's own origin to a
    # browser. Only the name that it asks for gives it away.
    check_host: bool

    @classmethod
    def of(cls, config: ServerConfig) -> OriginPolicy:
        value, keyless = config.cors_origins, not api_keys(config)
        named = value not in ("auto", "off", "*")
        return cls(
            any_page=value == "*" or (value == "auto" and not keyless),
            loopback_pages=value == "auto" and keyless,
            pages=tuple(_listed(value)) if named else (),
            check_host=value != "*" and keyless and is_loopback(config.host),
        )

    def allows_page(self, origin: str) -> bool:
        if self.any_page or origin in self.pages:
            return True
        return self.loopback_pages and re.fullmatch(LOOPBACK_PAGE, origin) is not None

    def allows_host(self, host: str) -> bool:
        """``host`` is the request's Host header. Addresses, names without a dot and local names
        cannot be those of a page on the internet."""
        name = host_name(host)
        if not self.check_host or "." not in name or name.endswith((".localhost", ".local")):
            return True
        return is_address(name) or any(urlsplit(page).hostname == name for page in self.pages)

    def check(self, scope: Scope) -> None:
        """Raises: RequestError 403 for a request of a page that is not allowed"""
        if (problem := self._problem(scope)) is not None:
            raise RequestError(problem, 403)

    def _problem(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        host, origin = headers.get("host", ""), headers.get("origin")
        if not self.allows_host(host):
            return (
                f"Host {shown(host)} is not this machine's: start the server with --api-key, or "
                "name the page's origin in --cors-origins"
            )
        site = headers.get("sec-fetch-site")  # only browsers can send this header
        if site in ("same-origin", "none"):
            return None
        if origin is not None:
            if self.allows_page(origin) or origin.partition("://")[2] == host:
                return None
            return (
                f"pages of origin {shown(origin)} may not use this server: start it with "
                "--api-key, or name the origin in --cors-origins"
            )
        if site == "cross-site" and scope["path"] in CHANGED_BY_GET and not self.any_page:
            return f"pages of other sites may not use {scope['path']}"
        return None


def guard_origins(app: Starlette, config: ServerConfig) -> None:
    """Adds both middlewares. Call it last, so that they come first: a browser's preflight request
    carries no key."""
    policy = OriginPolicy.of(config)
    app.add_middleware(AtRequest, begin=policy.check)
    app.add_middleware(
        CORSMiddleware,
        allow_origins=["*"] if policy.any_page else list(policy.pages),
        allow_origin_regex=LOOPBACK_PAGE if policy.loopback_pages else None,
        allow_methods=["*"],
        allow_headers=["*"],
        allow_private_network=True,
    )
