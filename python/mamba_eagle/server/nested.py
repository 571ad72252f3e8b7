"""Nested values of a body, checked by pydantic; errors name path, value and remedy as Fields do."""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, ValidationError
from pydantic_core import PydanticCustomError

from mamba_eagle.core import shown
from mamba_eagle.server.errors import RequestError
from mamba_eagle.server.fields import as_text

REMEDIES = {
    "bool_type": "must be true or false",
    "dict_type": "must be an object",
    "int_type": "must be an integer",
    "list_type": "must be a list",
    "missing": "is needed",
    "model_attributes_type": "must be an object",
    "model_type": "must be an object",
    "string_type": "must be a string",
    "string_unicode": "must be a string of valid Unicode",
}


def _whole(value: str) -> str:
    if as_text(value) is None:
        raise PydanticCustomError("string_unicode", "half of a surrogate pair")
    return value


Text = Annotated[str, AfterValidator(_whole)]  # what tokenizers and replies can take


class Body(BaseModel):
    """Kinds are not converted; null means absent where a default is; unknown keys are ignored."""

    model_config = ConfigDict(strict=True, extra="ignore")


Model = TypeVar("Model", bound=Body)


def read(model: type[Model], value: Any, path: str) -> Model:
    """Raises: RequestError 400 for the first thing that is wrong."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
    where = path + "".join(
        f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"]
    )
    remedy = REMEDIES.get(first["type"])
    if remedy is None:
        said = str(first.get("ctx", {}).get("error", "")) or first["msg"]
        remedy = said[:1].lower() + said[1:]
    if first["type"] == "missing":
        raise RequestError(f"{where} {remedy}", param=where)
    raise RequestError(f"{where} = {shown(first['input'])}: {remedy}", param=where)
