"""/v1/files and /v1/batches, as OpenAI's: what ``run-batch`` does, asked for over HTTP."""

from collections.abc import AsyncGenerator, Sequence
from typing import Annotated

from fastapi import APIRouter, Request, Response
from python_multipart.multipart import parse_options_header
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import ClientDisconnect
from starlette.responses import FileResponse

from mamba_eagle.limits import MAX_FILE_BYTES, MAX_PAGE, MAX_SHOWN
from mamba_eagle.server.apis.batches.batch import Batch, BatchStore, StoredFile
from mamba_eagle.server.apis.batches.lines import URLS
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.kinds import (
    Body,
    Metadata,
    Text,
    count_in_address,
    needs,
    says,
    takes,
)
from mamba_eagle.server.bodies.reception import READABLE_CHARSETS, client_left
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.http.auth import key_of
from mamba_eagle.server.state import State

MAX_FORM = 2**16  # bytes of a form beside its file
MAX_TYPE = 1024  # characters of the header that says so
BATCH = "batch"
router = APIRouter()


class BatchBody(Body):
    """A file of requests to one route."""

    input_file_id: Text = needs("a file of purpose batch")
    endpoint: Annotated[str, kinds.choice_of(*URLS)] = needs("the route of all its requests")
    completion_window: Annotated[str, kinds.choice_of("24h")] = says("how long it may take", "24h")
    metadata: Metadata | None = says("repeated in replies")


def _store(request: Request) -> BatchStore:
    return request.app.state.batches


# ── files ────────────────────────────────────────────────────────────────────────────────────


@router.post("/v1/files")
async def upload(request: Request) -> Response:
    """A form with ``purpose``, which is batch, and ``file``, requests in JSON, one per line."""
    files, key = _store(request).files, key_of(request)
    form = await _form(request)
    try:
        purpose, file = form.get("purpose"), form.get("file")
        if purpose != BATCH:
            raise RequestError.about("purpose", purpose, "must be batch")
        if not isinstance(file, UploadFile):
            raise RequestError("file is needed: a part of the form with a filename", param="file")
        path = files.new_path()
        with files.more(key, path, file.size or 0) as stored:
            while piece := await file.read(2**20):
                stored.write(piece)
    finally:
        await form.close()
    made = files.add(key, (file.filename or "file")[:MAX_SHOWN], BATCH, path)
    return json_response(made.as_dict())


async def _form(request: Request) -> FormData:
    """Raises: RequestError 400, 413 or 415"""
    header = request.headers.get("content-type", "")
    # The reader takes time that grows with the square of a long one.
    kind, given = parse_options_header(header if len(header) <= MAX_TYPE else "")
    charset = given.get(b"charset", b"utf-8").decode("latin-1").lower()
    # Python knows character sets that take seconds to decode, and some with halves of pairs.
    if kind != b"multipart/form-data" or charset not in READABLE_CHARSETS:
        remedy = "a file comes as multipart/form-data in UTF-8, with the parts purpose and file"
        raise RequestError(remedy, 415)

    async def bounded() -> AsyncGenerator[bytes, None]:
        length = 0
        async for piece in request.stream():
            length += len(piece)
            if length > MAX_FILE_BYTES + MAX_FORM:
                raise RequestError(f"the file is longer than {MAX_FILE_BYTES} bytes: split it", 413)
            yield piece

    parser = MultiPartParser(
        request.headers, bounded(), max_files=1, max_fields=8, max_part_size=MAX_FORM
    )
    try:
        return await parser.parse()
    except (MultiPartException, KeyError) as error:
        raise RequestError(f"the form cannot be read: {error}") from None
    except ClientDisconnect:
        raise client_left() from None


@router.get("/v1/files")
async def files(request: Request) -> Response:
    """Those of the key, the newest first; ``purpose``, ``after``, ``limit``."""
    purpose = request.query_params.get("purpose")
    found = _store(request).files.of(key_of(request))
    return _page(request, [one for one in found[::-1] if purpose in (None, one.purpose)])


@router.get("/v1/files/{id}")
async def file(request: Request, id: str) -> Response:
    return json_response(_store(request).files.find(key_of(request), id).as_dict())


@router.get("/v1/files/{id}/content")
async def content(request: Request, id: str) -> Response:
    """The file itself."""
    found = _store(request).files.find(key_of(request), id)
    return FileResponse(found.path, media_type="application/jsonl", filename=found.name)


@router.delete("/v1/files/{id}")
async def delete_file(request: Request, id: str) -> Response:
    """A batch that reads it goes on."""
    _store(request).files.remove(key_of(request), id)
    return json_response({"id": id, "object": "file", "deleted": True})


# ── batches ──────────────────────────────────────────────────────────────────────────────────


@router.post("/v1/batches", openapi_extra=takes(BatchBody))
async def create(request: Request, state: State) -> Response:
    """Each request of a file is answered; of all batches half as many at a time as the engine runs
    at most."""
    key = key_of(request)
    body = await state.read_control(request, BatchBody)
    source = _store(request).files.find(key, body.input_file_id, "input_file_id")
    if source.purpose != BATCH:
        remedy = "is a file of replies: upload one of requests"
        raise RequestError.about("input_file_id", body.input_file_id, remedy)
    batch = Batch(key, body.endpoint, source, body.metadata)
    _store(request).start(batch, max(1, state.manager.engine.max_running_requests // 2))
    return json_response(batch.as_dict())


@router.get("/v1/batches")
async def batches(request: Request) -> Response:
    """Those of the key, the newest first; ``after``, ``limit``."""
    return _page(request, _store(request).of(key_of(request)))


@router.get("/v1/batches/{id}")
async def batch(request: Request, id: str) -> Response:
    return json_response(_store(request).find(key_of(request), id).as_dict())


@router.post("/v1/batches/{id}/cancel")
async def cancel(request: Request, id: str) -> Response:
    """What has been answered by then is in its files."""
    found = _store(request).find(key_of(request), id)
    found.cancel()
    return json_response(found.as_dict())


def _page(request: Request, found: Sequence[Batch | StoredFile]) -> Response:
    """A part of a list, as OpenAI's clients go through it."""
    limit = count_in_address("limit", request.query_params.get("limit", "100"), 1, MAX_PAGE)
    ids = [one.id for one in found]
    after = request.query_params.get("after")
    if after is not None and after not in ids:
        raise RequestError.about("after", after, "there is no such id")
    begin = ids.index(after) + 1 if after is not None else 0
    page = found[begin : begin + limit]
    return json_response(
        {
            "object": "list",
            "data": [one.as_dict() for one in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": begin + len(page) < len(found),
        }
    )
