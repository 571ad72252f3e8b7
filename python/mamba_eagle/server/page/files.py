"""The page that tries the server out: GET / and the files below /page/ that it is made of."""

import hashlib
from functools import cached_property
from html import escape
from pathlib import Path

from fastapi import APIRouter, Request, Response

from mamba_eagle.server.state import State

FOLDER = Path(__file__).parent
TYPES = {
    ".html": "text/html",
    ".css": "text/css",
    ".js": "text/javascript",
    ".mjs": "text/javascript",
}
BASE = '<base href="./">'  # where relative addresses begin
HEADERS = {
    # Asked for again each time, answered by 304: a page of one version with a script of the last
    # one would fail in ways that no one can explain.
    "Cache-Control": "no-cache",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    # Nothing comes from elsewhere and nothing goes there, whatever a model writes.
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
        "img-src data:; base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
    ),
}


class PageFile:
    """One file, read once."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.media_type = TYPES[path.suffix]

    @cached_property
    def content(self) -> str:
        return self.path.read_text(encoding="utf-8")

    def reply(self, request: Request, state: State) -> Response:
        root, content = state.config.root_path, self.content
        if root:  # the page's own address may lack the slash that relative ones need
            content = content.replace(BASE, f'<base href="{escape(root)}/">')
        etag = f'"{hashlib.sha256(content.encode()).hexdigest()[:16]}"'
        headers = {**HEADERS, "ETag": etag}
        if etag in request.headers.get("if-none-match", ""):
            return Response(status_code=304, headers=headers)
        return Response(content, headers=headers, media_type=self.media_type)


def address(path: Path) -> str:
    return "/" if path.suffix == ".html" else f"/page/{path.relative_to(FOLDER).as_posix()}"


# Named one by one: nothing that a client writes reaches the file system.
FILES = {
    address(path): PageFile(path) for path in sorted(FOLDER.rglob("*")) if path.suffix in TYPES
}
router = APIRouter()
for place, file in FILES.items():
    router.add_api_route(
        place, file.reply, methods=["GET", "HEAD"], response_model=None, include_in_schema=False
    )
