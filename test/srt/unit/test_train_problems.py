"""The generator of word problems: right arithmetic, variety, and a held-out set kept apart."""

from __future__ import annotations

import json
import random
import re
from itertools import islice

import pytest

from mamba_eagle.train import problems
from mamba_eagle.train.problems import Draft, Problem, document, generate, held_out, stream
from mamba_eagle.train.scenarios import SCENARIOS

ANNOTATION = re.compile(r"(\d+) ([-+*/]) (\d+) = \$?<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")
EXACT = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


def check_worked_answer(problem: Problem) -> None:
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
    assert 2 <= len(lines) <= 5
    assert not re.search(r"[@{}]|  |\bNone\b", problem.question + problem.answer)


@pytest.mark.parametrize("name", SCENARIOS)
def test_scenario_arithmetic_is_right(name: str) -> None:
    for seed in range(300):
        draft = Draft(random.Random(seed))
        SCENARIOS[name](draft)
        problem = draft.finish(name)
        check_worked_answer(problem)
        assert problem.question[-1] == "?"


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
    known = {"2", "3", "4", "5", "6", "10", "12", "25", "60", "1"}
    for problem in islice(stream(4), 3000):
        a, _, b, *_ = ANNOTATION.findall(problem.answer)[0]
        given = set(re.findall(r"\d+", problem.question)) | known
        assert a in given and b in given, problem


def test_there_are_many_scenarios_and_wordings() -> None:
    assert len(SCENARIOS) >= 40
    sample = list(islice(stream(5), 5000))
    assert len({p.template for p in sample}) == len(SCENARIOS)
    assert len({p.question for p in sample}) > 4900
    assert {len(p.answer.split("\n")) - 1 for p in sample} >= {2, 3, 4, 5}


def test_same_seed_gives_the_same_problems() -> None:
    assert generate(7, 50) == generate(7, 50)
    assert generate(7, 50) != generate(8, 50)


def test_training_never_sees_a_held_out_problem() -> None:
    keys, questions = ({p.key for p in held_out()}, {p.question for p in held_out()})
    for problem in islice(stream(problems.HELD_OUT_SEED), 5000):  # the seed they came from
        assert problem.key not in keys and problem.question not in questions


def test_held_out_file_is_what_the_generator_makes() -> None:
    lines = problems.HELD_OUT_PATH.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines]
    assert records == [{"question": p.question, "answer": p.answer} for p in held_out()]
    assert len(records) == problems.HELD_OUT_COUNT
    assert len({p.template for p in held_out()}) > 40


def test_document_is_the_few_shot_form() -> None:
    assert document("How many?", "#### 3") == "Question: How many?\nAnswer: #### 3"


def test_scenario_errors_name_the_step() -> None:
    draft = Draft(random.Random(0))
    with pytest.raises(ValueError, match="7 / 2 is not exact"):
        draft.step("They get @.", 7, "/", 2)
    with pytest.raises(ValueError, match="2 - 7 is negative"):
        draft.step("They get @.", 2, "-", 7)
