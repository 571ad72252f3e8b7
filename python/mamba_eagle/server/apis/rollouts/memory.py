"""Memory that a trainer on the same device needs, given back and taken again."""

from collections.abc import Sequence
from typing import Annotated

from fastapi import APIRouter, Request, Response

from mamba_eagle.core import MEMORY_TAGS
from mamba_eagle.message import ChangeModel
from mamba_eagle.server.apis.rollouts.operator import CHANGE_SECONDS, answered, trusted
from mamba_eagle.server.bodies import kinds
from mamba_eagle.server.bodies.model import Body, says, takes
from mamba_eagle.server.errors import RequestError, json_response

MUST = f"must be a list of {' and '.join(MEMORY_TAGS)}"
router = APIRouter()


class TagsBody(Body):
    """Memory of what."""

    tags: Annotated[list[str], kinds.texts("tags", len(MEMORY_TAGS))] = says(
        "`weights`, `kv_cache`; left out: both", []
    )


@router.post("/release_memory_occupation", openapi_extra=takes(TagsBody))
async def release_memory_occupation(request: Request) -> Response:
    """The weights and pools are freed; requests wait until all of it is resumed."""
    tags = await _tags_of_body(request)
    await _change(request, release=tags)
    return json_response({"success": True, "released": tags})


@router.post("/resume_memory_occupation", openapi_extra=takes(TagsBody))
async def resume_memory_occupation(request: Request) -> Response:
    """Once nothing is released any more, the weights are read again and requests go on."""
    tags = await _tags_of_body(request)
    await _change(request, resume=tags)
    return json_response({"success": True, "resumed": tags})


@router.post("/sleep")
async def sleep(request: Request) -> Response:
    """vLLM's: releases all; ``?level=`` makes no difference."""
    await _change(request, release=MEMORY_TAGS)
    return json_response({"status": "sleeping"})


@router.post("/wake_up", openapi_extra=takes(tags="weights, kv_cache; left out: both"))
async def wake_up(request: Request) -> Response:
    """vLLM's: ``?tags=`` once or several times; left out: all."""
    await _change(request, resume=_checked(request.query_params.getlist("tags")))
    return json_response({"status": "awake"})


async def _tags_of_body(request: Request) -> list[str]:
    return _checked((await trusted(request).read_control(request, TagsBody)).tags)


def _checked(tags: Sequence[str]) -> list[str]:
    if set(tags) - set(MEMORY_TAGS):
        raise RequestError.about("tags", list(tags), MUST)
    return sorted(set(tags)) or list(MEMORY_TAGS)


async def _change(
    request: Request, release: Sequence[str] = (), resume: Sequence[str] = ()
) -> None:
    asked = ChangeModel(release=list(release), resume=list(resume))
    await answered(trusted(request).manager.ask(asked, CHANGE_SECONDS))
