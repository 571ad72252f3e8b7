"""Sampling parameters of bodies: the fields are those that ``core.SamplingParams`` declares."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, NamedTuple, TypeVar

from pydantic import create_model

from mamba_eagle import limits
from mamba_eagle.core import SamplingParams, declared, shown
from mamba_eagle.server.bodies import kinds, known
from mamba_eagle.server.bodies.kinds import Body, says
from mamba_eagle.server.bodies.prompts import PromptReader
from mamba_eagle.server.errors import RequestError

PARAMETERS = declared()
DEFAULT = SamplingParams()


def strings_kind(what: str) -> kinds.Kind:
    """Not too many, and not too long; what: "stop strings"."""
    any_strings = kinds.texts(what, limits.MAX_STOP_STRINGS)

    def convert(value: Any) -> list[str]:
        strings: list[str] = any_strings.read(value)
        longest = max(strings, key=len, default="")
        if len(longest) > limits.MAX_STOP_LENGTH:
            raise ValueError(
                f"the string has {len(longest)} characters but may have at most "
                f"{limits.MAX_STOP_LENGTH}: shorten it"
            )
        total = sum(map(len, strings))
        if total > limits.MAX_STOP_CHARACTERS:
            raise kinds.TooMany(f"characters of {what}", total, limits.MAX_STOP_CHARACTERS)
        return strings

    return kinds.Kind(convert, any_strings.must, any_strings.schema)


def _logit_bias(value: Any) -> dict[int, float] | None:
    if not isinstance(value, dict):
        return None
    if len(value) > limits.MAX_LOGIT_BIAS_ENTRIES:
        raise kinds.TooMany("entries", len(value), limits.MAX_LOGIT_BIAS_ENTRIES)
    bias: dict[int, float] = {}
    for key, number in value.items():
        converted = kinds.as_number(number)
        if converted is None or not (key.isascii() and key.isdigit() and len(key) < 19):
            return None
        bias[int(key)] = converted
    return bias


STOP = strings_kind("stop strings")
BAD_WORDS = strings_kind("bad words")
KINDS: Mapping[Any, kinds.Kind] = {
    int: kinds.INTEGER_KIND,
    float: kinds.NUMBER,
    bool: kinds.FLAG,
    list[str]: STOP,
    list[int]: kinds.integers("token ids", limits.MAX_STOP_TOKEN_IDS),
    dict[int, float]: kinds.Kind(
        _logit_bias,
        "must be an object from token ids to finite numbers",
        {"type": "object", "additionalProperties": {"type": "number"}},
    ),
}
SEED = kinds.integer(0, limits.MAX_INTEGER, PARAMETERS["seed"][1].remedy)
Samples = Annotated[int, kinds.integer(1, limits.MAX_SAMPLES)]


def bounded(name: str) -> kinds.Kind:
    """An integer parameter under another name: its bounds are checked with the others'."""
    schema = {**kinds.INTEGER, **kinds.bounds(PARAMETERS[name][1])}
    return replace(kinds.INTEGER_KIND, schema=schema)


M = TypeVar("M", bound=Body)
LENGTHS = ("max_new_tokens", "min_new_tokens")  # the OpenAI routes have other names for them


def with_parameters(*but: str) -> Callable[[type[M]], type[M]]:
    """Adds the sampling parameters to a model, except for some. What is out of bounds is found when
    their values come together (``checked``), so that a refusal names all of it."""
    fields: dict[str, Any] = {}
    for name, (kind, parameter) in PARAMETERS.items():
        if name not in but and name != "seed":
            read_as = replace(KINDS[kind], schema={**KINDS[kind].schema, **kinds.bounds(parameter)})
            fields[name] = (Annotated[Any, read_as], says(parameter.about, getattr(DEFAULT, name)))

    def add(model: type[M]) -> type[M]:
        return create_model(model.__name__, __base__=model, __doc__=model.__doc__, **fields)

    return add


class Sampled(Body):
    """Of all routes that sample."""

    REFUSED = known.SAMPLING

    n: Samples = says("samples of each prompt", 1)
    sampling_seed: Annotated[int | None, SEED] = says("as seed")
    seed: Annotated[int | None, SEED] = says(PARAMETERS["seed"][1].about)
    bad_words: Annotated[list[str], BAD_WORDS] = says(
        "texts that must not come, as the tokens that spell them after a blank and without one", []
    )

    def bad_word_ids(self, prompts: PromptReader, where: str = "") -> list[list[int]]:
        """Each word's tokens, at the beginning of a text and behind a blank, if that makes other
        ones of the same number, as vLLM finds them. where: the path of the object they stand in.

        Raises: RequestError 400
        """
        if not self.bad_words:
            return []
        bare = [word.lstrip() for word in self.bad_words]
        if not all(bare):
            raise RequestError.about(f"{where}bad_words", self.bad_words, "none may be empty")
        names = [f"{where}bad_words"] * len(bare)
        found = prompts.encode(bare, names, False)
        behind_blank = prompts.encode([f" {word}" for word in bare], names, False)
        for ids, other in zip(list(found), behind_blank):
            if len(other) == len(ids) and other[:1] != ids[:1]:
                found.append(other)
        return [ids for ids in found if ids]

    @property
    def chosen_seed(self) -> int | None:
        return self.seed if self.sampling_seed is None else self.sampling_seed


class Vocabulary(NamedTuple):
    """What token ids of a request are checked against."""

    size: int
    eos_token_ids: Sequence[int]


def checked(
    body: Body,
    vocabulary: Vocabulary,
    where: str = "",
    names: Mapping[str, str] | None = None,
    **others: Any,
) -> SamplingParams:
    """The parameters that a body holds, and ``others``; where: the path of the object that they
    stand in; names: the route's own names of parameters, where they are not SamplingParams'.

    Raises: RequestError with every value that is out of range.
    """
    values = vars(body)
    given = {**{name: values[name] for name in PARAMETERS if name in values}, **others, "seed": 0}
    if 0 < given["temperature"] < limits.GREEDY_BELOW:
        given["temperature"] = 0.0
    params = SamplingParams(**given)
    problems = params.problems(*vocabulary)
    if not problems:
        return params
    parts = []
    for name, value, remedy in problems:
        for ours, theirs in (names or {}).items():
            remedy = remedy.replace(ours, theirs)
        parts.append(f"{where}{(names or {}).get(name, name)} = {shown(value)}: {remedy}")
    raise RequestError("; ".join(parts), param=parts[0].partition(" = ")[0])
