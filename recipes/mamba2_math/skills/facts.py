"""JSON from a sentence: which of its words belong to which key.

The keys come from a schema that the model does not see: the server's grammar writes them. So the
lesson is what to write behind a key, whichever keys are asked for, in any order.
"""

# ruff: noqa: E501  (long lists of sentences)

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from mamba2_math import words
from mamba2_math.draft import Draft, Problem
from mamba2_math.skills.chat import Chat, assistant, call, tool, user
from mamba2_math.story_words import NUMBER_WORDS

PLACES = [
    *words.CITIES,
    *"Oslo Paris Rome London Madrid Berlin Vienna Lisbon Tokyo Cairo Lima Dublin Prague Athens "
    "Bergen Geneva Toronto Sydney Houston Lyon Milan Porto Quito Havana".split(),
]
SYLLABLES = "ba den fi go hal ka lo mer ni or pa rin sa tu vel wen yo zar el mo".split()
WORDS_UP_TO = 13  # numbers below it are also written as words
INSTRUCTIONS = (
    "Fill in the form: {}",
    "Give me the facts as JSON. {}",
    "{} Answer with JSON.",
    "Read the text and fill in the fields.\n{}",
    "Extract the data: {}",
    "{}\nWrite this down as JSON.",
    "Put this into a record: {}",
)
SAVERS = "save add record note store register create put submit keep".split()


class Fact(NamedTuple):
    names: str  # that its key may have
    value: Any
    told: str  # what is said of the subject; "" if the subject's name says it


def number(d: Draft, value: int) -> str:
    return NUMBER_WORDS[value] if value < WORDS_UP_TO and d.chance(0.25) else str(value)


def made_up(d: Draft) -> str:
    return "".join(d.of(SYLLABLES) for _ in range(d.number(2, 3))).capitalize()


def place(d: Draft) -> str:
    return made_up(d) if d.chance(0.15) else d.of(PLACES)


def listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def amount(d: Draft, things: Sequence[str], low: int = 2, high: int = 40) -> tuple[int, str, str]:
    count, thing = d.number(low, high), d.of(things)
    return count, thing, f"{number(d, count)} {thing}"


# ── subjects, and what is said of them ──


def person(d: Draft) -> tuple[str, str, list[Fact]]:
    p = d.person()
    name = made_up(d) if d.chance(0.15) else p.name
    age, home, color, subject = d.number(4, 90), place(d), d.of(words.COLORS), d.of(words.SUBJECTS)
    pets, kind, owned = amount(d, words.ANIMALS, 2, 12)
    rides, swims = d.chance(0.5), d.chance(0.5)
    friends = [x.name for x in (d.person(), d.person(), d.person())[: d.number(1, 3)]]
    return (
        name,
        p.He,
        [
            Fact("name first_name person who", name, ""),
            Fact("age years age_in_years", age, d.pick("is {} years old", "is {}").format(age)),
            Fact(
                "city town home place lives_in",
                home,
                d.pick("lives in {}", "comes from {}", "is from {}").format(home),
            ),
            Fact("color favorite_color", color, f"likes the color {color}"),
            Fact("pets animals count num_pets", pets, f"has {owned}"),
            Fact("animal kind pet", kind, f"keeps {kind}"),
            Fact("subject favorite_subject likes", subject, f"likes {subject} best"),
            Fact("has_bike bike", rides, "has a bike" if rides else "has no bike"),
            Fact("can_swim swims", swims, "can swim" if swims else "cannot swim"),
            Fact("friends friend_names", friends, f"is a friend of {listed(friends)}"),
        ],
    )


def order(d: Draft) -> tuple[str, str, list[Fact]]:
    p = d.person()
    count, thing, ordered = amount(d, words.GOODS)
    day, home, price, gift = d.of(words.DAYS), place(d), d.number(3, 250), d.chance(0.5)
    color = d.of(words.COLORS)
    told = d.pick("orders", "buys", "wants", "would like").format() + " "
    return (
        p.name,
        p.He,
        [
            Fact("customer name buyer client", p.name, ""),
            Fact("quantity count number amount", count, told + ordered),
            Fact("item product thing article", thing, told + f"{color} {thing}"),
            Fact("color", color, f"asks for {color} ones"),
            Fact("day delivery_day date when", day, f"needs them on {day}"),
            Fact("city address to destination", home, f"lives in {home}"),
            Fact("price total cost paid amount_paid", price, f"pays ${price}"),
            Fact("gift is_gift", gift, "sends it as a gift" if gift else "says it is no gift"),
        ],
    )


def trip(d: Draft) -> tuple[str, str, list[Fact]]:
    p = d.person()
    start, end, day, by = (
        place(d),
        place(d),
        d.of(words.DAYS),
        d.pick("train", "bus", "plane", "car", "ship"),
    )
    month, seats, nights = d.of(words.MONTHS), d.number(2, 12), d.number(2, 20)
    back = d.chance(0.5)
    return (
        p.name,
        p.He,
        [
            Fact("traveler name passenger who", p.name, ""),
            Fact("from origin start", start, f"leaves from {start}"),
            Fact(
                "to destination city end",
                end,
                d.pick("goes to {}", "travels to {}", "flies to {}").format(end),
            ),
            Fact("day date weekday", day, f"leaves on {day}"),
            Fact("month", month, f"travels in {month}"),
            Fact("by vehicle transport means", by, f"takes the {by}"),
            Fact(
                "seats tickets passengers people",
                seats,
                f"needs {number(d, seats)} {d.pick('seats', 'tickets')}",
            ),
            Fact("nights days stay", nights, f"stays {number(d, nights)} nights"),
            Fact("return return_ticket", back, "comes back" if back else "does not come back"),
        ],
    )


def event(d: Draft) -> tuple[str, str, list[Fact]]:
    what = d.pick("concert", "party", "meeting", "book fair", "lesson", "dinner", "game", "picnic")
    home, day, hour, guests = place(d), d.of(words.DAYS), d.number(1, 11), d.number(3, 300)
    price, free, host = d.number(2, 60), d.chance(0.4), d.person().name
    return (
        f"The {what}",
        "It",
        [
            Fact("event title name what", what, ""),
            Fact("city place location where", home, f"is in {home}"),
            Fact("day date when weekday", day, f"is on {day}"),
            Fact("hour time start begins", hour, f"starts at {hour} pm"),
            Fact("guests people visitors seats", guests, f"has {guests} guests"),
            Fact("free is_free", free, "is free" if free else "is not free"),
            Fact("price ticket cost", price, f"costs ${price}"),
            Fact("host organizer by", host, f"is held by {host}"),
        ],
    )


def school(d: Draft) -> tuple[str, str, list[Fact]]:
    p = d.person()
    subject, score, passed = d.of(words.SUBJECTS), d.number(10, 100), d.chance(0.5)
    grade, absent, teacher = d.number(1, 12), d.number(2, 15), d.person().name
    return (
        p.name,
        p.He,
        [
            Fact("student name pupil", p.name, ""),
            Fact("subject course class", subject, f"takes {subject}"),
            Fact(
                "score points result mark",
                score,
                d.pick("has {} points", "scored {}", "got {}").format(score),
            ),
            Fact("passed success", passed, "passed" if passed else "did not pass"),
            Fact("grade year level", grade, f"is in grade {grade}"),
            Fact("absent days_absent missed", absent, f"missed {number(d, absent)} days"),
            Fact("teacher", teacher, f"is taught by {teacher}"),
        ],
    )


def weather(d: Draft) -> tuple[str, str, list[Fact]]:
    home = place(d)
    degrees, sky, wind = (
        d.number(1, 40),
        d.pick("sunny", "rainy", "cloudy", "snowy", "foggy"),
        d.chance(0.5),
    )
    day, rain = d.of(words.DAYS), d.number(2, 60)
    return (
        d.pick("The weather in {}", "{}").format(home),
        "It",
        [
            Fact("city place location", home, ""),
            Fact("temperature degrees temp", degrees, f"has {degrees} degrees"),
            Fact("sky weather condition", sky, f"is {sky}"),
            Fact("windy wind is_windy", wind, "is windy" if wind else "is not windy"),
            Fact("day date", day, f"is for {day}"),
            Fact("rain rain_mm", rain, f"brings {rain} mm of rain"),
        ],
    )


SUBJECTS: tuple[Callable[[Draft], tuple[str, str, list[Fact]]], ...] = (
    person,
    person,
    order,
    trip,
    event,
    school,
    weather,
)


def told(d: Draft) -> tuple[str, dict[str, Any]]:
    """A text and what is asked of it."""
    subject, pronoun, facts = d.of(SUBJECTS)(d)
    first, rest = facts[0], facts[1:]
    chosen = [rest[i] for i in d.two(range(len(rest)))]
    chosen += [f for f in rest if f not in chosen and d.chance(0.25)][:2]
    sentences, at = [], 0
    while at < len(chosen):
        size = min(len(chosen) - at, d.pick(1, 1, 2, 2, 3))
        who = subject if not sentences or d.chance(0.15) else pronoun
        sentences.append(f"{who} {listed([f.told for f in chosen[at : at + size]])}.")
        at += size
    asked = [f for f in (first, *chosen) if d.chance(0.8)] or [first]
    if d.chance(0.4):
        asked = [asked[i] for i in d.order(len(asked))]
    return " ".join(sentences), _record(d, asked)


def _record(d: Draft, facts: Sequence[Fact]) -> dict[str, Any]:
    record: dict[str, Any] = {}
    for fact in facts:
        record.setdefault(d.of(fact.names.split()), fact.value)
    return record


def counted(d: Draft) -> tuple[str, dict[str, Any]]:
    """Things of several kinds: the keys are the things."""
    things = [d.of(words.THINGS) for _ in range(d.number(2, 4))]
    counts = {thing: d.number(2, 99) for thing in things}
    parts = [f"{number(d, count)} {thing}" for thing, count in counts.items()]
    start = d.pick("There are", f"{d.person()} has", f"{d.person()} bought", "In the box are")
    asked = [thing for thing in counts if d.chance(0.8)] or things[:1]
    return f"{start} {listed(parts)}.", {thing: counts[thing] for thing in asked}


def terse(d: Draft) -> tuple[str, dict[str, Any]]:
    """Names and values, as they stand in lists and forms."""
    *_, facts = d.of(SUBJECTS)(d)
    chosen = [facts[i] for i in d.order(len(facts))][: d.number(2, 4)]
    chosen = [f for f in chosen if type(f.value) in (int, str)] or facts[:1]
    record = _record(d, chosen)
    form, between = d.pick(
        ("{}: {}", ", "), ("{} is {}", ", "), ("{}: {}", "\n"), ("{} = {}", "; ")
    )
    shown = [form.format(name.replace("_", " "), value) for name, value in record.items()]
    asked = {name: value for name, value in record.items() if d.chance(0.8)} or record
    return between.join(shown), asked


def worked(d: Draft, problem: Problem) -> tuple[str, dict[str, Any]]:
    """A word problem: the steps as a text, then the number; or, of one step, the number alone."""
    *lines, final = problem.answer.split("\n")
    value = int(final.removeprefix("#### "))
    name = d.pick("answer", "result", "number", "total", "value")
    if len(lines) == 1 and d.chance(0.5):
        asked = problem.question.partition("How many ")[2].split(" ", 1)[0].rstrip("?.,")
        name = asked if asked.isalpha() and d.chance(0.7) else name
        return problem.question, {name: value}
    steps = d.pick("steps", "work", "explanation", "reasoning", "thoughts")
    return problem.question, {steps: " ".join(lines), name: value}


def make(d: Draft, problem: Problem) -> Chat:
    """problem: one that may be asked."""
    if d.chance(0.2):
        text, record = worked(d, problem)
        return Chat([user(text), assistant(json.dumps(record))], (), True, asks_for_json=False)
    text, record = d.pick(told, told, told, counted, terse)(d)
    if d.chance(0.2):  # the same to a tool, whose parameters the prompt names
        name = f"{d.of(SAVERS)}_{d.pick('record', 'person', 'order', 'data', 'entry', 'item')}"
        name = name if d.chance(0.7) else name.partition("_")[0]
        return Chat([user(text), call(name, record)], [tool(name, *record)])
    if asks := d.chance(0.5):
        text = d.of(INSTRUCTIONS).format(text)
    return Chat([user(text), assistant(json.dumps(record))], (), True, asks_for_json=asks)
