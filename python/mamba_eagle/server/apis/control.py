"""POST /flush_cache and /abort_request."""

from fastapi import APIRouter, Request, Response
from starlette.responses import PlainTextResponse

from mamba_eagle.core import shown
from mamba_eagle.server.bodies.model import Body, Flag, Text, says, takes
from mamba_eagle.server.errors import RequestError, json_response
from mamba_eagle.server.http.auth import need_admin
from mamba_eagle.server.http.disconnect import unless_gone
from mamba_eagle.server.state import heard, server_state

IDLE = "seconds to wait for the server to be idle"
router = APIRouter()


@router.api_route("/flush_cache", methods=["GET", "POST"], openapi_extra=takes(timeout=IDLE))
async def flush_cache(request: Request) -> Response:
    """Empties the prefix cache; ``?timeout=`` waits that many seconds for the server to be idle."""
    need_admin(request, server_state(request).config, "/flush_cache", by_default=True)
    given = request.query_params.get("timeout", "0")
    try:
        timeout = float(given)
        if not 0 <= timeout <= 3600:
            raise ValueError
    except ValueError:
        raise RequestError(f"timeout = {shown(given)}: must be 0 to 3600 seconds") from None
    manager = server_state(request).manager
    flushing = unless_gone(request, manager.ask.flush_cache(timeout))
    reply = await heard(flushing, "the scheduler does not answer")
    if reply is None:
        return Response(status_code=499)  # the client has left
    if reply.problem:
        raise RequestError(f"the cache was not flushed: {reply.problem}")
    return PlainTextResponse("Cache flushed.\n")


class AbortBody(Body):
    """rid or abort_all."""

    rid: Text | None = says("the request's name")
    abort_all: Flag = says("all requests", False)


@router.post("/abort_request", openapi_extra=takes(AbortBody))
async def abort_request(request: Request) -> Response:
    """Ends the request of exactly this ``rid`` with all its samples, or all requests."""
    body = await server_state(request).read_control(request, AbortBody)
    manager = server_state(request).manager
    if body.abort_all:
        need_admin(request, server_state(request).config, "abort_all", by_default=True)
        count = await manager.abort(None)
    else:
        if not body.rid:
            remedy = 'must be a request\'s name; or send {"abort_all": true}'
            raise RequestError.about("rid", body.rid, remedy)
        count = await manager.abort(body.rid)
    return json_response({"aborted": count})
