"""The generator of word problems: right arithmetic, variety, and a held-out set kept apart."""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
from itertools import islice
from pathlib import Path

import pytest

from mamba2_math import problems, stories, story_words
from mamba2_math.draft import Draft, Problem, document
from mamba2_math.problems import generate, held_out, stream
from mamba2_math.registry import FAMILIES, SCENARIOS
from mamba2_math.stories.writing import MAX_STEPS, Story
from mamba_eagle.eval.gsm8k import EMBEDDED_PROBLEMS

ANNOTATION = re.compile(r"(\d+) ([-+*/]) (\d+) = \$?<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")
EXACT = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


NUMBER_WORDS = {word: str(k) for k, word in enumerate(story_words.NUMBER_WORDS)} | {"dozen": "12"}


def check_worked_answer(problem: Problem, fewest: int = 1) -> None:
    """Each line spells one operation, right, and the last one's result is the answer."""
    *lines, final = problem.answer.split("\n")
    result = None
    for line in lines:
        found = ANNOTATION.findall(line)
        assert len(found) == 1, line
        a, op, b, a2, op2, b2, value, written = found[0]
        assert (a, op, b, value) == (a2, op2, b2, written), line
        assert EXACT[op](int(a), int(b)) == int(value), line
        result = value
    assert final == f"#### {result}"
    assert fewest <= len(lines) <= 5
    assert not re.search(r"[@{}]|  |\bNone\b", problem.question + problem.answer)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_arithmetic_is_right(name: str) -> None:
    for seed in range(300):
        draft = Draft(random.Random(seed))
        SCENARIOS[name](draft)
        problem = draft.finish(name)
        check_worked_answer(problem, fewest=2)
        assert problem.question[-1] == "?"


def draws(family: str, count: int) -> list[Problem]:
    """Stories of one family; only a ValueError may say that the numbers did not work out."""
    made, seed = [], 0
    while len(made) < count and seed < 50 * count:
        seed += 1
        draft = Story(random.Random(seed))
        try:
            FAMILIES[family].make(draft)
        except ValueError:
            continue
        if 1 <= len(draft.lines) <= MAX_STEPS:
            made.append(draft.finish(":".join(["story", family, *draft.shape])))
    assert len(made) == count
    return made


@pytest.mark.parametrize("family", FAMILIES)
def test_story_arithmetic_is_right(family: str) -> None:
    made = draws(family, 400)
    for problem in made:
        check_worked_answer(problem)
        assert problem.question[-1] in "?."
        assert problem.question[0].isupper() or problem.question[0].isdigit()
    assert len({problem.question for problem in made}) > 250


def test_stories_have_many_structures_and_some_single_steps() -> None:
    rng = random.Random(0)
    made = []
    while len(made) < 5000:
        try:
            made.append(stories.make(rng))
        except ValueError:
            continue
    assert len({problem.template for problem in made}) > 300
    single = sum(problem.answer.count("\n") == 1 for problem in made) / len(made)
    assert 0.2 < single < 0.55


def test_no_draw_ends_the_stream() -> None:
    for seed in range(3):
        for problem in islice(stream(seed), 10_000):
            check_worked_answer(problem)


@pytest.mark.parametrize(
    ("phrase", "forms"),
    [
        ("buy {a}", ("bought {a}", "buys {a}", "buy {a}")),
        ("carry it", ("carried it", "carries it", "carry it")),
        ("play", ("played", "plays", "play")),
        ("watch {a} now", ("watched {a} now", "watches {a} now", "watch {a} now")),
        ("be eaten", ("were eaten", "is eaten", "are eaten")),
        ("have", ("had", "has", "have")),
    ],
)
def test_verbs_are_conjugated(phrase: str, forms: tuple[str, str, str]) -> None:
    assert story_words.conjugate(phrase) == forms


def test_nouns_have_their_plural() -> None:
    plurals = {noun.one: noun.many for noun in story_words.NOUNS + story_words.ANIMALS}
    assert plurals["apple"] == "apples" and plurals["berry"] == "berries"
    assert plurals["peach"] == "peaches" and plurals["leaf"] == "leaves"
    assert plurals["toy"] == "toys" and plurals["sheep"] == "sheep"
    assert plurals["slice of pizza"] == "slices of pizza"


def test_numbers_are_also_written_as_words() -> None:
    text = " ".join(p.question for p in islice(stream(6), 4000)).lower()
    for word in ("three", "a dozen", "twice", "5 dollars", "$5"):
        assert word in text, word


def test_numbers_stay_small() -> None:
    values = [
        int(found[7])
        for problem in islice(stream(3), 5000)
        for found in ANNOTATION.findall(problem.answer)
    ]
    assert max(values) < 10_000
    assert sum(value < 1000 for value in values) > 0.98 * len(values)


def test_numbers_of_the_first_step_are_in_the_question_or_known() -> None:
    """Percent and unit words stand for divisors and factors; everything else must be given."""
    known = {"2", "3", "4", "5", "6", "10", "12", "25", "60", "1", "7", "8", "24", "100", "1000"}
    for problem in islice(stream(4), 3000):
        if problem.template.startswith("story:remainder"):
            continue  # the quotient, which is not a step, comes first
        a, _, b, *_ = ANNOTATION.findall(problem.answer)[0]
        words = re.findall(r"[a-z]+", problem.question.lower())
        given = set(re.findall(r"\d+", problem.question)) | known
        given |= {NUMBER_WORDS[word] for word in words if word in NUMBER_WORDS}
        assert a in given and b in given, problem


def test_there_are_many_scenarios_and_wordings() -> None:
    assert len(SCENARIOS) >= 40
    sample = list(islice(stream(5), 5000))
    templates = {p.template for p in sample}
    assert templates >= set(SCENARIOS)
    assert {t.split(":")[1] for t in templates if t.startswith("story:")} == set(FAMILIES)
    told = sum(p.template.startswith("story:") for p in sample) / len(sample)
    assert abs(told - problems.STORY_SHARE) < 0.03
    assert len({p.question for p in sample}) > 4900
    assert {len(p.answer.split("\n")) - 1 for p in sample} >= {1, 2, 3, 4, 5}


def test_same_seed_gives_the_same_problems() -> None:
    assert generate(7, 50) == generate(7, 50)
    assert generate(7, 50) != generate(8, 50)


def test_training_never_sees_a_held_out_problem() -> None:
    keys, questions = ({p.key for p in held_out()}, {p.question for p in held_out()})
    for problem in islice(stream(problems.HELD_OUT_SEED), 5000):  # the seed they came from
        assert problem.key not in keys and problem.question not in questions


def test_held_out_file_is_what_the_generator_makes_bit_for_bit() -> None:
    made = problems.as_jsonl(problems.as_records(held_out()))
    assert EMBEDDED_PROBLEMS.read_bytes() == made.encode()
    assert len(held_out()) == problems.HELD_OUT_COUNT == 200
    assert len({p.template for p in held_out()}) > 40


def test_the_order_of_imports_changes_no_problem() -> None:
    """Families are numbered as they register, and a seed draws numbers."""
    script = (
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]: importlib.import_module(f'mamba2_math.{name}')\n"
        "from mamba2_math import problems, registry\n"
        "print(json.dumps([*registry.SCENARIOS, *registry.FAMILIES]))\n"
        "print(json.dumps(problems.generate(7, 20)))"
    )
    backwards = [f"stories.{name}" for name in ("more", "measures", "rates", "money", "things")]
    command = [sys.executable, "-c", script, *backwards, "scenarios"]
    path = os.pathsep.join(entry for entry in sys.path if entry)
    ended = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=True
    )
    names, made = map(json.loads, ended.stdout.splitlines())
    assert names == [*SCENARIOS, *FAMILIES]
    assert made == generate(7, 20)


def test_document_is_the_few_shot_form() -> None:
    assert document("How many?", "#### 3") == "Question: How many?\nAnswer: #### 3"


def test_documents_are_problems_of_the_stream_one_behind_the_other() -> None:
    records = problems.generate_documents(seed=3, count=40)
    wanted = (document(p.question, p.answer) for p in stream(3))
    counts = []
    for record in records:
        parts = document(**record).split("\n\n")
        assert parts == list(islice(wanted, len(parts)))
        counts.append(len(parts))
    assert min(counts) == 1 and 4 < max(counts) <= problems.MAX_PROBLEMS
    assert 10 < counts.count(1) < 32


def test_scenario_errors_name_the_step() -> None:
    draft = Draft(random.Random(0))
    with pytest.raises(ValueError, match="7 / 2 is not exact"):
        draft.step("They get @.", 7, "/", 2)
    with pytest.raises(ValueError, match="2 - 7 is negative"):
        draft.step("They get @.", 2, "-", 7)


def test_the_command_writes_a_file_of_prompts(tmp_path: Path) -> None:
    problems.main(["--count", "3", "--output", f"{tmp_path}/made"])
    lines = (tmp_path / "made").read_text().splitlines()
    assert [json.loads(line) for line in lines] == generate(0, 3)
