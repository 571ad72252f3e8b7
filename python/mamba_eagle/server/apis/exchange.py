"""POST /export_prefix and /import_prefix: what the cache has of a prompt, from one server to
another one."""

import asyncio
import os
import secrets
from pathlib import Path

from fastapi import APIRouter, Request, Response
from msgspec.structs import replace
from starlette.background import BackgroundTask
from starlette.responses import FileResponse

from mamba_eagle.message import ExportPrefix, ImportPrefix
from mamba_eagle.server.apis.generate.body import GenerateBody, parse_generate
from mamba_eagle.server.apis.sse import wait_for_success
from mamba_eagle.server.bodies.kinds import takes
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.remote_reads import TransportError
from mamba_eagle.server.state import ServerState, Trusted, answered

MOVE_SECONDS = 600.0
NIXL = "nixl"  # the other transport
OFFER_POLL_SECONDS = 0.2
router = APIRouter()


@router.post("/export_prefix", openapi_extra=takes(GenerateBody))
async def export_prefix(request: Request, state: Trusted) -> Response:
    """Runs the prompt of a /generate body, without an output, and answers with what the cache has
    of it, for /import_prefix; with ?transport=nixl, with how to read that from its memory. Takes
    the admin key, unless the server has none and listens to its own machine alone."""
    transport = request.query_params.get("transport", "")
    if transport not in ("", NIXL):
        raise RequestError.about("transport", transport, f"must be {NIXL}, or left out")
    job = await state.read(request, parse_generate)
    prompt, *others = job.prompts
    if others or prompt.n > 1 or prompt.adapter:
        raise RequestError("/export_prefix takes one prompt and one sample, without an adapter")
    _need_tier(state)
    sampling = replace(prompt.sampling, max_new_tokens=0, min_new_tokens=0)
    job.prompts = [replace(prompt, sampling=sampling)]
    state.submit(job)
    await wait_for_success(request, state, job)
    path = _new_file(state)
    remove = BackgroundTask(path.unlink, missing_ok=True)
    try:
        asked = ExportPrefix(token_ids=prompt.token_ids, salt=prompt.salt, path=str(path))
        reply = await answered(state.manager.ask(asked, MOVE_SECONDS))
    except BaseException:
        path.unlink(missing_ok=True)
        raise
    headers = {"x-prefix-tokens": str(reply.tokens)}
    if transport == NIXL:
        return await _offer(state, path, headers)
    kind = "application/octet-stream"
    return FileResponse(path, media_type=kind, headers=headers, background=remove)


@router.post("/import_prefix")
async def import_prefix(request: Request, state: Trusted) -> Response:
    """Takes what /export_prefix of another server has answered into host memory: prompts that begin
    with it need not run it again. Takes the admin key like that."""
    _need_tier(state)
    path = _new_file(state)
    try:
        with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            async for part in request.stream():
                file.write(part)
                if file.tell() > state.config.host_cache_bytes:
                    raise RequestError("it is larger than --host-cache-gb", 413)
        if request.headers.get("content-type") == "application/json":
            await _take(state, path)
        reply = await answered(state.manager.ask(ImportPrefix(path=str(path)), MOVE_SECONDS))
    finally:
        path.unlink(missing_ok=True)
    return json_response({"success": True, "tokens": reply.tokens})


async def _offer(state: ServerState, path: Path, headers: dict[str, str]) -> Response:
    """How to read the file from this server's memory, where it stays until it was read."""
    reads = state.remote_reads
    try:
        content = await asyncio.to_thread(reads.offer, path)
    except (OSError, TransportError) as error:
        raise RequestError(str(error)) from error
    finally:
        path.unlink(missing_ok=True)

    async def wait() -> None:
        while not await asyncio.to_thread(reads.withdraw):
            await asyncio.sleep(OFFER_POLL_SECONDS)

    if state.withdrawing is None or state.withdrawing.done():
        state.withdrawing = asyncio.create_task(wait())
    return Response(content, media_type="application/json", headers=headers)


async def _take(state: ServerState, path: Path) -> None:
    """The file that ``path`` says how to read takes its place."""
    offered, most = path.read_bytes(), state.config.host_cache_bytes
    try:
        await asyncio.to_thread(state.remote_reads.take, offered, path, most)
    except (OSError, TransportError) as error:
        raise RequestError(str(error)) from error


def _need_tier(state: ServerState) -> None:
    """Raises: RequestError 400"""
    if not state.config.host_cache_gb:
        raise RequestError("this takes a server with --host-cache-gb")


def _new_file(state: ServerState) -> Path:
    """A path in the server's own folder, which ends with it."""
    return Path(state.folder, f"prefix-{secrets.token_hex(12)}")
