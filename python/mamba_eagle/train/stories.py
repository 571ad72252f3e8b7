"""Word problems put together from parts, so that a model must read rather than recognise.

A story takes people and a thing, lets one to five events happen, each from a list of kinds with
many wordings, and asks. The worked answers keep to few turns of phrase: what an answer says follows
from what happened, not from chance. The functions below that carry :func:`story` are the families.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple

from mamba_eagle.train import story_words as w
from mamba_eagle.train.problems import Draft, Problem
from mamba_eagle.train.story_words import BASE, PAST, THIRD, Noun

MAX_STEPS = 5


class Actor(NamedTuple):
    first: str  # "a farmer", "Mia"
    name: str  # from then on: "the farmer", "Mia"
    he: str
    his: str
    him: str
    form: int = THIRD  # of verbs in the present

    @property
    def has(self) -> str:
        return "has" if self.form == THIRD else "have"

    @property
    def does(self) -> str:
        return "does" if self.form == THIRD else "do"

    @property
    def owner(self) -> str:
        """"Mia's", "my"."""
        return self.his if self.he in ("I", "you") else f"{self.name}'s"


def cap(text: str) -> str:
    return text[0].upper() + text[1:]


class Story(Draft):
    """A draft with a style of its own, and the names of the operations that it is made of."""

    __slots__ = ("dollars", "euros", "names", "past", "shape", "text", "wordy")

    def __init__(self, rng: random.Random) -> None:
        super().__init__(rng)
        self.past = rng.random() < 0.6
        style = rng.random()
        self.wordy = 0.0 if style < 0.6 else 0.3 if style < 0.8 else 0.9
        self.dollars = rng.random() < 0.22
        self.euros = False
        self.shape: list[str] = []
        self.text: list[str] = []
        self.names: set[str] = set()

    # --- numbers

    def n(self, k: int) -> str:
        """A number in digits or, if small, perhaps as a word."""
        if self.wordy and k <= 20 and (k <= 12 or self.wordy > 0.5):
            if self.chance(self.wordy):
                if k == 12 and self.chance(0.4):
                    return "a dozen"
                return w.NUMBER_WORDS[k]
        return str(k)

    def usd(self, k: int) -> str:
        if self.euros:
            return f"{self.n(k)} euros" if k != 1 else f"{self.n(k)} euro"
        if self.dollars:
            return f"{self.n(k)} dollars" if k != 1 else f"{self.n(k)} dollar"
        return f"${k}"

    def size(self, low: int = 2, high: int = 120) -> int:
        """Small numbers and round ones more often, as people choose them."""
        r = self._rng.random()
        if r < 0.4:
            return self.number(low, max(low, min(high, 20)))
        if r < 0.75:
            return self.number(low, max(low, min(high, 60)))
        if r < 0.87:
            k = self.number(1, max(1, high // 10)) * 10
            return max(low, k)
        return self.number(low, high)

    def price(self) -> int:
        return self.number(1, 12) if self.chance(0.7) else self.number(2, 40)

    # --- people

    def he_or_she(self, name: str, role: str = "") -> Actor:
        she = self.chance(0.5)
        he, his, him = ("she", "her", "her") if she else ("he", "his", "him")
        return Actor(role or name, name, he, his, him)

    def someone(self) -> Actor:
        """A person with a name that this story has not used."""
        while True:
            r = self._rng.random()
            if r < 0.465:
                actor = Actor(name := self.of(w.GIRLS), name, "she", "her", "her")
            elif r < 0.93:
                actor = Actor(name := self.of(w.BOYS), name, "he", "his", "him")
            else:  # a name never heard, to be copied letter by letter
                name = "".join(self.of(w.SYLLABLES) for _ in range(self.number(2, 3)))
                actor = self.he_or_she(name.capitalize())
            if actor.name not in self.names:
                self.names.add(actor.name)
                return actor

    def actor(self) -> Actor:
        """Who the story is about: mostly a name, else a farmer, Mr. Lee, Grandma, I, you, they."""
        r = self._rng.random()
        if r < 0.72:
            return self.someone()
        if r < 0.78:
            she = self.chance(0.5)
            role = self.of(w.ROLES_HER if she else w.ROLES_HIS)
            pronouns = ("she", "her", "her") if she else ("he", "his", "him")
            return Actor(f"a {role}", f"the {role}", *pronouns)
        if r < 0.81:
            name = self.pick("Grandma", "Mom", "Aunt Rose", "Mrs. Smith", "Ms. Lee", "Mrs. Brown",
                             "Ms. Garcia", "Miss Clark", "Grandmother", "Mrs. Jones")  # fmt: skip
            return Actor(name, name, "she", "her", "her")
        if r < 0.84:
            name = self.pick("Grandpa", "Dad", "Uncle Joe", "Mr. Smith", "Mr. Lee", "Mr. Brown",
                             "Mr. Patel", "Mr. Jones", "Grandfather", "Mr. Wilson")  # fmt: skip
            return Actor(name, name, "he", "his", "him")
        if r < 0.91:
            return Actor("I", "I", "I", "my", "me", BASE)
        if r < 0.93:
            return Actor("you", "you", "you", "your", "you", BASE)
        if r < 0.95:
            who = self.pick("the children", "the students", "the boys", "the friends")
            return Actor(who, who, "they", "their", "them", BASE)
        a, b = self.someone().name, self.someone().name
        return Actor(f"{a} and {b}", f"{a} and {b}", "they", "their", "them", BASE)

    def relative(self, actor: Actor) -> str:
        if self.chance(0.75):
            return f"{actor.his} {self.of(w.RELATIONS)}"
        return self.someone().name

    def noun(self) -> Noun:
        r = self._rng.random()
        if r < 0.45:
            return self.of(w.FOODS)
        if r < 0.97:
            return self.of(w.ITEMS)
        one = self.of(w.SYLLABLES) + self.of(w.SYLLABLES) + self.pick("", "t", "m", "n", "p")
        return Noun(one, one + "s")

    def who(self, actor: Actor) -> str:
        return actor.he if self.chance(0.6) else actor.name

    # --- text

    def say(self, *wordings: str) -> None:
        self.text.append(cap(self.of(wordings)))

    def end(self, *wordings: str) -> None:
        """The last sentence, and with it the question is complete."""
        self.text.append(cap(self.of(wordings)))
        self.question = " ".join(self.text)

    def form(self, actor: Actor | None = None) -> int:
        if self.past:
            return PAST
        return THIRD if actor is None else actor.form

    def add(self, kind: str, text, left: int, op: str, right: int) -> int:
        self.shape.append(kind)
        if self.euros:
            text = text.replace("$@", "@ euros")
        return self.step(cap(text), left, op, right)

    def divisor(self, value: int, low: int = 2, high: int = 12) -> int | None:
        """A number between ``low`` and ``high`` that divides ``value``."""
        found = [k for k in range(low, high + 1) if value % k == 0 and value > k]
        return self.of(found) if found else None


FAMILIES: dict[str, tuple[float, Callable[[Story], None]]] = {}


def story(weight: float) -> Callable:
    def register(function: Callable[[Story], None]) -> Callable[[Story], None]:
        FAMILIES[function.__name__] = (weight, function)
        return function

    return register


def make(rng: random.Random) -> Problem:
    """One problem. Raises: ValueError if the numbers did not work out; draw again."""
    d = Story(rng)
    name = rng.choices(_NAMES, cum_weights=_WEIGHTS)[0]
    FAMILIES[name][1](d)
    if not 1 <= len(d.lines) <= MAX_STEPS:
        raise ValueError(f"{len(d.lines)} steps in {name}")
    if d.names and d.chance(0.05):
        opening = d.of(OPENINGS).format(P=min(d.names))
        d.question = f"{opening} {d.question}"
    return d.finish(":".join(["story", name, *d.shape]))


# --- amounts -------------------------------------------------------------------------------------


def more(d: Story, k: int, x: Noun, first: bool) -> str:
    """``k`` things that are got: "5 more apples"."""
    n = d.n(k)
    things = x.one if k == 1 else x.many
    if first:
        return f"{n} {things}"
    r = d._rng.random()
    if r < 0.35:
        return f"{n} more {things}"
    if r < 0.62:
        return f"{n} more"
    if r < 0.84 or n == "a dozen":
        return f"{n} {things}"
    if r < 0.92:
        return f"another {n}" if d.chance(0.5) else f"another {n} {things}"
    return f"{n} {d.pick('additional', 'new', 'extra')} {things}"


def some(d: Story, k: int, x: Noun, his: str = "the") -> str:
    """``k`` of the things that are there: "7 of them"."""
    n = d.n(k)
    r = d._rng.random()
    if r < 0.4:
        return f"{n} {x.one if k == 1 else x.many}"
    if r < 0.55:
        return n
    if r < 0.8:
        return f"{n} of them"
    return f"{n} of {his if d.chance(0.6) else 'the'} {x.many}"


def packed(d: Story, k: int, m: int, box: Noun, x: Noun, extra: str = "") -> tuple[str, str]:
    """``k`` containers of ``m`` things, and a sentence to follow (or "")."""
    kn, mn, many = d.n(k), d.n(m), x.many
    c = f"{kn}{extra} {box.many}"
    r = int(d._rng.random() * 14)
    if r == 0:
        return f"{c} with {mn} {many} each", ""
    if r == 1:
        return f"{c} of {mn} {many} each", ""
    if r == 2:
        return f"{c} of {many} with {mn} {many} in each", ""
    if r == 3:
        return f"{c} of {many} with {mn} in each {box.one}", ""
    if r == 4:
        return f"{c}, each with {mn} {many}", ""
    if r == 5:
        return f"{c} of {mn} {many}", ""
    if r == 6:
        return f"{c} that {d.pick('hold', 'contain')} {mn} {many} each", ""
    if r == 7:
        return f"{c} with {mn} {many} in each", ""
    if r == 8:
        return f"{c} of {many}, each {d.pick('containing', 'holding')} {mn} {many}", ""
    if r == 9:
        return f"{c} of {many} with {mn} {many} per {box.one}", ""
    if r == 10:
        return f"{c} of {many}", f"Each {box.one} {d.pick('has', 'contains', 'holds')} {mn} {many}."
    if r == 11:
        return f"{c} of {many}", f"There are {mn} {many} in each {box.one}."
    if r == 12:
        return f"{c} of {many}", f"There are {mn} in {d.pick('each', 'every')} {box.one}."
    return f"{c} of {many}", f"Every {box.one} {d.pick('has', 'holds')} {mn} {many} in it."


def in_boxes(d: Story, k: int, m: int, box: Noun, x: Noun) -> int:
    return d.add("packs", f"The {box.many} hold @ {x.many}.", k, "*", m)


PERIODS = (("day", "days"), ("day", "days"), ("day", "days"), ("week", "weeks"), ("hour", "hours"))


def every(d: Story, k: int, m: int, x: str, unit: tuple[str, str]) -> str:
    """``m`` things a day for ``k`` days."""
    one, many = unit
    how = d.pick(f"a {one}", f"each {one}", f"every {one}", f"per {one}")
    if one == "hour":
        how = how.replace("a hour", "an hour")
    span = f"for {d.n(k)} {many}"
    if one == "day" and k == 7 and d.chance(0.5):
        span = d.pick("for a week", "for one week")
    elif d.chance(0.15):
        span = f"for the next {d.n(k)} {many}"
    return f"{d.n(m)} {x} {how} {span}"


# --- a collection --------------------------------------------------------------------------------


class Part(NamedTuple):
    """Something that happens: a phrase of the actor's, or a clause with its own subject."""

    phrase: str
    own: bool = False  # the clause has its own subject
    after: str = ""  # a sentence that must follow


THEN = ("Then", "Then", "Then", "After that,", "Later,", "Next,", "The next day,", "Afterwards,",
        "Later that day,", "Yesterday,", "Today,", "In the afternoon,", "Then,", "A week later,",
        "During the day,", "On Monday,", "On Saturday,", "Finally,")  # fmt: skip


def tell(d: Story, actor: Actor, parts: list[Part]) -> None:
    """Joins the parts to sentences in their order."""
    i, told = 0, False
    while i < len(parts):
        part = parts[i]
        subject = d.who(actor) if told else actor.first
        text = part.phrase if part.own else f"{subject} {part.phrase}"
        mentioned = told or not part.own
        i += 1
        while not part.after and i < len(parts) and d.chance(0.42):
            part = parts[i]
            i += 1
            last = i >= len(parts) or part.after or d.chance(0.6)
            if part.own:
                text += f"{d.pick(', and', ', then', ' and', ', and then', ', but')} {part.phrase}"
            elif not mentioned or text.count(" and "):
                text += f", {d.pick('and then', 'then', 'but then')} {actor.he} {part.phrase}"
            elif last:
                link = d.pick(" and", " and", " and then", ", and", ", then", " and", " but",
                              f", and {actor.he}", f" and {actor.he}", f", but {actor.he}",
                              f", then {actor.he}", f". {cap(actor.he)}")  # fmt: skip
                text += f"{link} {part.phrase}"
            else:
                text += f", {part.phrase}"
                if i < len(parts) and not parts[i].own:
                    text += f"{d.pick(' and', ', and', ' and then')} {parts[i].phrase}"
                    part = parts[i]
                    i += 1
                last = True
            if last:
                break
        if told and d.chance(0.3):
            text = f"{d.of(THEN)} {text}"
        d.text.append(f"{cap(text)}.")
        if part.after:
            d.text.append(part.after)
        told = True


def gain(d: Story, actor: Actor, x: Noun, value: int | None) -> tuple[Part, int]:
    """More of the things, or the first of them."""
    form, first = d.form(actor), value is None
    r = d._rng.random()
    after = ""
    if r < 0.62 or len(d.lines) >= MAX_STEPS - 2:
        k = d.size(2 if first else 1, 100)
        amount = more(d, k, x, first)
    elif r < 0.93:
        k, m = d.number(2, 12), d.number(2, 12)
        if d.chance(0.12):
            m = d.pick(20, 25, 15, 30, 50)
        box = d.of(w.CONTAINERS)
        amount, after = packed(d, k, m, box, x, "" if first or d.chance(0.7) else " more")
        k = in_boxes(d, k, m, box, x)
    elif r < 0.97 or first or value > 150:
        k, m, unit = d.number(2, 10), d.number(2, 12), d.of(PERIODS)
        amount = every(d, k, m, x.many, unit)
        k = d.add("daily", f"In {k} {unit[1]} it is @ {x.many}.", k, "*", m)
    else:
        factor, verb = d.pick((2, "double"), (2, "double"), (3, "triple"))
        phrase = w.conjugate(f"{verb} {d.pick('that number', f'{actor.his} collection')}")[form]
        value = d.add("times", f"Then {actor.name} {actor.has} @ {x.many}.", value, "*", factor)
        return Part(phrase), value
    if not first and r < 0.62 and d.chance(0.22):
        given = d.of(w.GIVEN)[PAST if d.past else THIRD]
        phrase = f"{d.relative(actor)} {given}".format(a=amount, him=actor.him)
        part = Part(phrase, own=True)
    else:
        bank = w.FOOD_GAINS if x.food and d.chance(0.3) else w.GAINS
        if first and not d.past and d.chance(0.3):
            bank = w.STARTS
        phrase = d.of(bank)[form]
        if (after or "," in amount) and not phrase.endswith("{a}"):
            phrase = w.GAINS[0][form]
        if "{r}" in phrase:
            phrase = phrase.replace("{r}", d.relative(actor))
        part = Part(phrase.format(a=amount, his=actor.his, him=actor.him), after=after)
    if first:
        return part, k
    return part, d.add("gain", f"Then {actor.name} {actor.has} @ {x.many}.", value, "+", k)


def fraction(d: Story, value: int) -> tuple[str, int, int] | None:
    """A share of ``value`` that is whole: its words, divisor and number of parts."""
    for _ in range(4):
        words, divisor, parts = d.of(w.FRACTIONS)
        if value % divisor == 0 and (parts == 1 or len(d.lines) < MAX_STEPS - 2):
            return words, divisor, parts
    return None


def take_share(d: Story, value: int, divisor: int, parts: int, things: str) -> int:
    """The steps to a share of ``value``."""
    k = d.add("share", f"One part is @ {things}." if parts > 1 else f"That is @ {things}.",
              value, "/", divisor)  # fmt: skip
    return d.add("parts", f"That is @ {things}.", k, "*", parts) if parts > 1 else k


def loss(d: Story, actor: Actor, x: Noun, value: int) -> tuple[Part, int]:
    form = d.form(actor)
    r = d._rng.random()
    after, own, phrase = "", False, ""
    left = f"Then {actor.name} {actor.has} @ {x.many} left."
    room = len(d.lines) < MAX_STEPS - 1
    if r < 0.16 and room and (share := fraction(d, value)):
        words, divisor, parts = share
        amount = f"{words} of {d.pick('them', 'them', 'the ' + x.many, f'{actor.his} {x.many}', 'those', f'the remaining {x.many}', f'all the {x.many}')}"
        k = take_share(d, value, divisor, parts, x.many)
    elif r < 0.28 and room and value >= 6:
        m = d.number(1, min(6, value // 2))
        k = d.number(2, max(2, min(25 if d.chance(0.2) else 10, value // m)))
        if m * k > value:
            raise ValueError("more than there are")
        friends = d.pick("friends", "friends", "friends", "cousins", "classmates", "neighbors",
                         "students", "children", "kids", "sisters", "brothers", "people")  # fmt: skip
        things, kn, mn = x.one if m == 1 else x.many, d.n(k), d.n(m)
        his = actor.his if friends != "people" else "the"
        phrase = w.conjugate(
            d.pick(
                f"give {mn} {things} to each of {his} {kn} {friends}",
                f"give {kn} {friends} {mn} {things} each",
                f"give each of {his} {kn} {friends} {mn} {things}",
                f"give {mn} to each of {his} {kn} {friends}",
                f"hand out {mn} {things} to each of {kn} {friends}",
                f"give {mn} {things} each to {kn} {friends}",
            )
        )[form]
        k = d.add("each", f"The {friends} get @ {x.many}.", k, "*", m)
    elif r < 0.34 and room and value >= 6:
        m = d.number(1, min(9, value // 2))
        k = d.number(2, max(2, min(9, value // m)))
        if m * k > value:
            raise ValueError("more than there are")
        unit = d.of(PERIODS)
        verb = "eat" if x.food else d.pick("use", "sell", "lose", "give away", "sell")
        phrase = w.conjugate(f"{verb} {every(d, k, m, x.one if m == 1 else x.many, unit)}")[form]
        k = d.add("daily", f"In {k} {unit[1]} it is @ {x.many}.", k, "*", m)
    elif r < 0.40 and room and value >= 8:
        m = d.number(2, min(10, value // 2))
        k = d.number(2, max(2, min(10, value // m)))
        if m * k > value:
            raise ValueError("more than there are")
        box = d.of(w.CONTAINERS)
        amount, after = packed(d, k, m, box, x)
        k = in_boxes(d, k, m, box, x)
    else:
        k = d.number(1, value) if d.chance(0.3) else d.number(1, min(value, 20))
        amount = some(d, k, x, actor.his)
        if r > 0.86:
            others = PAST if d.past else THIRD
            if k > 1 and d.chance(0.5):
                bank = w.FOOD_MISHAPS if x.food else w.MISHAPS
                phrase = f"{amount} {d.of(bank)[PAST if d.past else BASE]}"
            else:
                taken = d.of(w.FOOD_TAKEN if x.food and d.chance(0.7) else w.TAKEN)
                if d.chance(0.4):
                    people = d.pick("the kids", "the children", "some friends", "the guests", "we")
                    phrase = f"{people} {taken[PAST if d.past else BASE].format(a=amount)}"
                else:
                    phrase = f"{d.relative(actor)} {taken[others].format(a=amount)}"
            own = True
    if not phrase:
        phrase = d.of(w.FOOD_LOSSES if x.food and d.chance(0.45) else w.LOSSES)[form]
        if (after or "," in amount) and not phrase.endswith("{a}"):
            phrase = w.conjugate("sell {a}")[form]
        if "{r}" in phrase:
            phrase = phrase.replace("{r}", d.relative(actor))
        phrase = phrase.format(a=amount, his=actor.his, him=actor.him)
    return Part(phrase, own, after), d.add("loss", left, value, "-", k)


def two_losses(d: Story, actor: Actor, x: Noun, value: int) -> tuple[Part, int]:
    """Some to one and some to another: "gives 5 to Tom and 3 to Ana"."""
    k = d.number(1, value // 2)
    m = d.number(1, value - k)
    a, b = d.n(k), d.n(m)
    things = x.one if k == 1 else x.many
    form = d.form(actor)
    if d.chance(0.6):
        r, q = d.relative(actor), d.relative(actor)
        phrase = d.pick(
            f"give {a} {things} to {r} and {b} to {q}",
            f"give {a} to {r} and {b} to {q}",
            f"give {r} {a} {things} and {q} {b}",
            f"give {a} of them to {r} and {b} of them to {q}",
        )
    else:
        one, two = d.pick(
            ("in the morning", "in the afternoon"), ("on Monday", "on Tuesday"),
            ("on Saturday", "on Sunday"), ("yesterday", "today"), ("today", "tomorrow"),
        )  # fmt: skip
        verb = "eat" if x.food and d.chance(0.5) else d.pick("sell", "use", "lose", "give away")
        phrase = d.pick(
            f"{verb} {a} {things} {one} and {b} {two}",
            f"{verb} {a} {one} and {b} {two}",
            f"{verb} {a} of them {one} and {b} more {two}",
        )
    for lost in (k, m):
        value = d.add(
            "loss", f"Then {actor.name} {actor.has} @ {x.many} left.", value, "-", lost
        )
    return Part(w.conjugate(phrase)[form]), value


def start(d: Story, actor: Actor, x: Noun, high: int = 120) -> tuple[Part, int]:
    """What there is at first."""
    form, after = d.form(actor), ""
    if d.chance(0.2):
        k, m, box = d.number(2, 12), d.number(2, 12), d.of(w.CONTAINERS)
        amount, after = packed(d, k, m, box, x)
        value = in_boxes(d, k, m, box, x)
        phrase = w.STARTS[0][form]
    elif d.chance(0.04):
        k = d.number(2, 8)
        amount = f"{d.n(k)} dozen {x.many}"
        value = d.add("dozen", f"{k} dozen are @ {x.many}.", k, "*", 12)
        phrase = d.of(w.STARTS)[form]
    else:
        value = d.size(3, high)
        amount = f"{d.n(value)} {x.many}"
        r = d._rng.random()
        bank = w.STARTS if r < 0.75 else w.FOOD_GAINS if x.food else w.GAINS
        phrase = d.of(bank)[form]
        if r > 0.75 and not phrase.endswith("{a}"):
            phrase = d.of(w.STARTS)[form]
        elif r < 0.06:
            there = d.pick(f"there {'were' if d.past else 'are'} {amount} in {actor.owner} bag",
                           f"{actor.owner} basket {'had' if d.past else 'has'} {amount} in it")  # fmt: skip
            return Part(there.replace(actor.name, actor.first), own=True), value
        elif r < 0.2 and d.past:
            opening = d.pick("At first,", "In the morning,", "At the start,", "Yesterday,", "On Monday,",
                             "Last week,", "This morning,", "To begin with,")  # fmt: skip
            return Part(f"{opening} {actor.first} had {amount}", own=True), value
    return Part(phrase.format(a=amount, his=actor.his), after=after), value


def ask_left(d: Story, actor: Actor, many: str) -> None:
    who = d.who(actor)
    does = d.pick(actor.does, actor.does, "did") if d.past else actor.does
    d.end(
        f"How many {many} {does} {who} have left?",
        f"How many {many} {does} {who} have left?",
        f"How many {many} {does} {who} have now?",
        f"How many {many} {does} {who} have now?",
        f"How many {many} are left?",
        f"How many {many} are left?",
        "How many are left?",
        f"How many {does} {who} have left?",
        f"How many {many} remain?",
        f"How many {many} {actor.does} {who} still have?",
        f"How many {many} {does} {who} have in the end?",
        f"How many {many} {does} {who} have at the end?",
        f"What is the number of {many} {who} {actor.has} left?",
        f"How many {many} will {who} have left?",
        f"How many {many} {does} {who} have remaining?",
        f"How many {many} {does} {who} end up with?",
        f"How many of the {many} are left?",
        f"Find how many {many} {who} {actor.has} left.",
        f"Now how many {many} {actor.does} {who} have?",
        f"How many {many} are there now?",
    )


def ask_total(d: Story, actor: Actor, many: str) -> None:
    who = d.who(actor)
    does = d.pick(actor.does, actor.does, "did") if d.past else actor.does
    d.end(
        f"How many {many} {does} {who} have now?",
        f"How many {many} {does} {who} have now?",
        f"How many {many} {does} {who} have in total?",
        f"How many {many} {does} {who} have altogether?",
        f"How many {many} {does} {who} have in all?",
        f"How many {many} {does} {who} have?",
        f"What is the total number of {many} {who} {actor.has}?",
        f"How many {many} are there altogether?",
        f"How many {many} are there in total?",
        f"How many {does} {who} have now?",
        f"How many {many} will {who} have?",
        f"How many {many} {does} {who} end up with?",
        f"How many {many} {does} {who} have all together?",
        f"In total, how many {many} {does} {who} have?",
        f"How many {many} {does} {who} now have in total?",
        f"Find the total number of {many}.",
        f"How many {many} {does} {who} have in the end?",
    )


# --- what comes of a number of things: the end of many stories -----------------------------------


def shared(d: Story, actor: Actor, x: Noun, value: int) -> None:
    k = d.divisor(value)
    if k is None:
        raise ValueError("nothing divides it")
    who, he, form = d.who(actor), actor.he, d.form(actor)
    friends = d.pick("friends", "friends", "children", "classmates", "cousins", "kids", "people",
                     "students", "neighbors", "boys", "girls", "grandchildren", "sisters")  # fmt: skip
    kn, many = d.n(k), x.many
    verb = d.pick("share {them} equally among", "share {them} equally between", "divide {them} equally among",
                  "split {them} equally among", "give {them} equally to", "share {them} among",
                  "divide {them} evenly among", "split {them} evenly between", "share {them} with",
                  "hand {them} out equally to", "distribute {them} equally among")  # fmt: skip
    them = d.pick("them", "them", "all of them", f"the {many}", f"all the {many}")
    if len(d.lines) and d.shape[-1] in ("loss",):
        them = d.pick("the rest", "the rest", f"the remaining {many}", "them", f"the other {many}",
                      f"the {many} that were left", "what was left")  # fmt: skip
    verb = w.conjugate(verb.format(them=them))
    owner = f"{d.pick(actor.his, actor.his, '')} {kn} {friends}".strip()
    if d.chance(0.2):
        d.say(f"{who} {w.conjugate('want')[form]} to {verb[BASE]} {owner}.")
    elif d.chance(0.15):
        d.end(f"If {who} {verb[actor.form]} {owner}, how many {many} does each get?",
              f"If {who} {verb[actor.form]} {owner}, how many {many} will each one get?")  # fmt: skip
    else:
        then = d.pick("", "", "Then ", "After that, ", "Finally, ")
        if d.shape and d.text[-1].startswith((cap(he), cap(actor.name))) and d.chance(0.4):
            d.text[-1] = f"{d.text[-1][:-1]} and {d.pick('', '', 'then ')}{verb[form]} {owner}."
        else:
            d.say(f"{then}{who} {verb[form]} {owner}.")
    one = {"children": "child", "people": "person", "grandchildren": "grandchild"}.get(
        friends, friends[:-1]
    )
    if not d.question:
        d.end(
            f"How many {many} does each {one} get?",
            f"How many {many} does each {one} get?",
            f"How many {many} did each {one} get?",
            f"How many {many} will each {one} get?",
            f"How many {many} does each {one} receive?",
            f"How many {many} did each of them get?",
            f"How many {many} does each of them get?",
            "How many does each one get?",
            f"How many {many} will each of the {friends} have?",
            f"How many does each {one} get?",
        )
    d.add("shared", f"Each {one} gets @ {many}.", value, "/", k)


def boxed(d: Story, actor: Actor, x: Noun, value: int) -> None:
    """Into boxes of so many, or into so many boxes."""
    m = d.divisor(value)
    if m is None:
        raise ValueError("nothing divides it")
    box, who, form, many = d.of(w.CONTAINERS), d.who(actor), d.form(actor), x.many
    mn = d.n(m)
    verb = d.pick("put", "pack", "place", "put", "arrange", "sort", "divide", "split")
    rest = d.shape and d.shape[-1] == "loss"
    them = d.pick("the rest", f"the remaining {many}", "them") if rest else d.pick("them", "them", f"the {many}", "all of them")
    if d.chance(0.5):
        phrase = d.pick(
            f"into {box.many} of {mn}", f"in {box.many} of {mn}", f"in {box.many} with {mn} {many} each",
            f"into {box.many} that hold {mn} {many} each", f"into {box.many} with {mn} in each",
            f"into {box.many} of {mn} {many} each", f"in {box.many} of {mn} {many}",
        )  # fmt: skip
        d.say(f"{who} {w.conjugate(verb)[form]} {them} {phrase}.",
              f"{d.pick('Each', 'Every')} {box.one} {d.pick('holds', 'can hold', 'has room for')} {mn} {many}.")  # fmt: skip
        d.end(
            f"How many {box.many} {actor.does} {who} need?",
            f"How many {box.many} {actor.does} {who} need?",
            f"How many {box.many} can {who} fill?",
            f"How many {box.many} can {who} make?",
            f"How many {box.many} are there?",
            f"How many {box.many} {actor.does} {who} have?",
            f"How many {box.many} are needed?",
            f"How many {box.many} will {who} need?",
            f"How many {box.many} did {who} use?",
            f"How many {box.many} are needed for all the {many}?",
        )
        d.add("boxes", f"{actor.name} needs @ {box.many}." if actor.form == THIRD else f"{actor.name} need @ {box.many}.", value, "/", m)
    else:
        d.say(
            f"{who} {w.conjugate(verb)[form]} {them} equally into {mn} {box.many}.",
            f"{who} {w.conjugate(verb)[form]} {them} into {mn} {box.many} with the same number in each.",
            f"{who} {w.conjugate(verb)[form]} the same number of {many} in each of {mn} {box.many}.",
            f"{who} {w.conjugate(verb)[form]} {them} evenly into {mn} {box.many}.",
            f"{who} {w.conjugate(verb)[form]} {them} in {mn} equal {box.many}.",
        )
        d.end(
            f"How many {many} are in each {box.one}?",
            f"How many {many} are there in each {box.one}?",
            f"How many {many} does each {box.one} have?",
            f"How many {many} go in each {box.one}?",
            f"How many {many} are in one {box.one}?",
            f"How many {many} will be in each {box.one}?",
            f"How many {many} did {who} put in each {box.one}?",
        )
        d.add("inbox", f"Each {box.one} has @ {many}.", value, "/", m)


def sold(d: Story, actor: Actor, x: Noun, value: int) -> None:
    price, who, form = d.number(2, 9), d.who(actor), d.form(actor)
    if value > 150:
        raise ValueError("too many")
    usd = d.usd(price)
    rest = d.shape and d.shape[-1] == "loss"
    them = d.pick("the rest", f"the remaining {x.many}", "them") if rest else d.pick("them", "all of them", f"the {x.many}")
    d.say(f"{who} {w.conjugate('sell')[form]} {them} for {usd} each.",
          f"{who} {w.conjugate('sell')[form]} {them} at {usd} each.",
          f"{who} {w.conjugate('sell')[form]} {them} for {usd} per {x.one}.",
          f"{who} {w.conjugate('sell')[form]} each {x.one} for {usd}." if not rest else f"{who} {w.conjugate('sell')[form]} each of the remaining {x.many} for {usd}.")  # fmt: skip
    does = "did" if d.past else actor.does
    d.end(f"How much money {does} {who} make?", f"How much {does} {who} earn?",
          f"How much money {does} {who} get?", f"How many dollars {does} {who} earn?",
          f"How much money {does} {who} earn in total?", f"How much {does} {who} make altogether?")  # fmt: skip
    d.add("sold", f"{actor.name} {'gets' if actor.form == THIRD else 'get'} $@.", value, "*", price)


def wanted(d: Story, actor: Actor, x: Noun, value: int) -> None:
    goal = value + d.size(1, 60)
    who, form = d.who(actor), d.form(actor)
    if d.chance(0.3) and not goal % 10 == 0:
        goal += 10 - goal % 10
    verb = w.conjugate(d.pick("need", "want", "want to have", "need to have", "want to get"))[form]
    d.say(f"{who} {verb} {d.n(goal)} {x.many}.", f"{who} {verb} {d.n(goal)} {x.many} in total.",
          f"{who} {verb} {d.n(goal)} in all.")  # fmt: skip
    d.end(f"How many more {x.many} {actor.does} {who} need?",
          f"How many more {x.many} {actor.does} {who} still need?",
          f"How many more does {actor.name} need?" if actor.form == THIRD else f"How many more do {who} need?",
          f"How many {x.many} are still missing?",
          f"How many more {x.many} must {who} get?",
          f"How many {x.many} {actor.does} {who} still need?")  # fmt: skip
    d.add("goal", f"{actor.name} still {'needs' if actor.form == THIRD else 'need'} @ {x.many}.",
          goal, "-", value)  # fmt: skip


def compared(d: Story, actor: Actor, x: Noun, value: int) -> None:
    """Somebody else has so many: who has more, how many together."""
    other, many = d.someone(), x.many
    has = "had" if d.past and d.chance(0.5) else "has"
    if d.chance(0.6):
        k = d.size(2, 100)
        d.say(f"{other.name} {has} {d.n(k)} {many}.", f"{d.pick('Meanwhile, ', '')}{other.name} {has} {d.n(k)}.")
        other_value = k
    else:
        other_value = relate(d, x, other.name, value, actor.name if actor.he not in ("I", "you") else actor.him, has)
    r = d._rng.random()
    if r < 0.45 or other_value == value:
        who = d.pick("they", f"{actor.name} and {other.name}", "the two of them", "both of them")
        if actor.he in ("I", "you"):
            who = "we"
        d.end(f"How many {many} do {who} have together?", f"How many {many} do {who} have in total?",
              f"How many {many} do {who} have altogether?", f"How many {many} do {who} have in all?",
              f"What is the total number of {many} that {who} have?")  # fmt: skip
        d.add("both", f"Together they have @ {many}.", value, "+", other_value)
    else:
        a, b, hi, lo = actor.name, other.name, value, other_value
        if hi < lo:
            a, b, hi, lo = b, a, lo, hi
        does = "do" if a in ("I", "you") or " and " in a or a.startswith("the ") and actor.form == BASE else "does"
        has_more = "have" if does == "do" else "has"
        than = "me" if b == "I" else b
        if d.chance(0.25):
            small_does = "do" if b in ("I", "you") or " and " in b or b.startswith("the ") and actor.form == BASE else "does"
            d.end(f"How many fewer {many} {small_does} {b} have than {'me' if a == 'I' else a}?")
        else:
            d.end(f"How many more {many} {does} {a} have than {than}?",
                  f"How many more {many} {does} {a} have than {than}?",
                  f"How many more {does} {a} have than {than}?")  # fmt: skip
        d.add("diff", f"{a} {has_more} @ more {many}.", hi, "-", lo)


def relate(d: Story, x: Noun, other: str, value: int, than: str, has: str = "has") -> int:
    """Says what ``other`` has by what ``than`` has, and works it out."""
    many, r = x.many, d._rng.random()
    result = f"{other} {has} @ {many}."
    if r < 0.35:
        k = d.size(1, 50)
        d.say(f"{other} {has} {d.n(k)} more {many} than {than}.", f"{other} {has} {d.n(k)} more than {than}.",
              f"{other} {has} {d.n(k)} more {many} than {than} {'does' if has == 'has' else 'did'}.")  # fmt: skip
        return d.add("more", f"{other} has @ {many}.", value, "+", k)
    if r < 0.6 and value > 2:
        k = d.number(1, min(value - 1, 40))
        d.say(f"{other} {has} {d.n(k)} fewer {many} than {than}.", f"{other} {has} {d.n(k)} fewer than {than}.",
              f"{other} {has} {d.n(k)} less {many} than {than}.", f"{other} {has} {d.n(k)} less than {than}.")  # fmt: skip
        return d.add("fewer", f"{other} has @ {many}.", value, "-", k)
    if r < 0.87 or value % 2:
        words, k = d.of(w.MULTIPLES)
        d.say(f"{other} {has} {words} as many {many} as {than}.", f"{other} {has} {words} as many as {than}.",
              f"{other} {has} {words} the number of {many} that {than} has." if than not in ("me", "you", "them") else f"{other} {has} {words} as many {many} as {than}.")  # fmt: skip
        return d.add("times", result.replace(" had ", " has "), value, "*", k)
    d.say(f"{other} {has} half as many {many} as {than}.", f"{other} {has} half as many as {than}.")
    return d.add("half", f"{other} has @ {many}.", value, "/", 2)


def lasting(d: Story, actor: Actor, x: Noun, value: int) -> None:
    m = d.divisor(value)
    if m is None:
        raise ValueError("nothing divides it")
    one, many = d.pick(("day", "days"), ("day", "days"), ("week", "weeks"))
    verb = w.conjugate("eat" if x.food else d.pick("use", "sell", "give away"))
    who = d.who(actor)
    d.say(f"{who} {verb[actor.form]} {d.n(m)} {x.many} {d.pick('a', 'each', 'every', 'per')} {one}.",
          f"{d.pick('Each', 'Every')} {one} {who} {verb[actor.form]} {d.n(m)} of them.")  # fmt: skip
    d.end(f"How many {many} will the {x.many} last?", f"For how many {many} will they last?",
          f"In how many {many} will they be gone?", f"How many {many} will they last?",
          f"How long will the {x.many} last, in {many}?")  # fmt: skip
    d.add("last", f"They last @ {many}.", value, "/", m)


TAILS = (shared, shared, shared, boxed, boxed, boxed, sold, wanted, compared, compared, lasting)


@story(24)
def collection(d: Story) -> None:
    actor, x = d.actor(), d.noun()
    parts: list[Part] = []
    value: int | None = None
    if d.chance(0.75):
        part, value = start(d, actor, x)
        parts.append(part)
    events = d.pick(1, 1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 4)
    if value is None and events == 1:
        events = 2
    lost = False
    for _ in range(events):
        if len(d.lines) >= MAX_STEPS - 1:
            break
        if value is not None and value > 8 and len(d.lines) < MAX_STEPS - 2 and d.chance(0.09):
            part, value = two_losses(d, actor, x, value)
            lost = True
        elif value is not None and value > 2 and d.chance(0.55):
            part, value = loss(d, actor, x, value)
            lost = True
        elif value is None or value < 600:
            part, value = gain(d, actor, x, value)
        parts.append(part)
    assert value is not None
    if value == 0 or value > 999:
        raise ValueError("nothing is left, or too much")
    if d.chance(0.2) and value > 1 and len(d.lines) < MAX_STEPS - 1:
        tell(d, actor, parts)
        d.of(TAILS)(d, actor, x, value)
    else:
        if d.chance(0.06) and not any(part.after for part in parts) and not d.past:
            d.text.append(cap("if " + _clause(d, actor, parts)))
            d.text[-1] += f", how many {x.many} {actor.does} {actor.he} have{' left' if lost else ''}?"
            d.question = " ".join(d.text)
            return
        tell(d, actor, parts)
        (ask_left if lost and d.chance(0.8) else ask_total)(d, actor, x.many)


def _clause(d: Story, actor: Actor, parts: list[Part]) -> str:
    """All the parts as one clause."""
    told, text = False, ""
    for i, part in enumerate(parts):
        subject = "" if part.own else (actor.he if told else actor.first) + " "
        link = "" if i == 0 else " and " if i == len(parts) - 1 else ", "
        text += f"{link}{subject}{part.phrase}"
        told = True
    return text


@story(8)
def groups(d: Story) -> None:
    """Only boxes of so many, and what is done with them."""
    actor, x, box = d.actor(), d.noun(), d.of(w.CONTAINERS)
    k, m = d.number(2, 12), d.number(2, 12)
    if d.chance(0.2):
        m = d.pick(15, 20, 24, 25, 30, 40, 50, 100, 18, 16)
    amount, after = packed(d, k, m, box, x)
    r = d._rng.random()
    be = "were" if d.past else "are"
    impersonal = r < 0.35
    if impersonal:
        d.text.append(cap(f"there {be} {amount}."))
    else:
        phrase = d.of(w.STARTS[:6] + w.GAINS[:6])[d.form(actor)]
        if not phrase.endswith("{a}"):
            phrase = w.STARTS[0][d.form(actor)]
        d.text.append(cap(f"{actor.first} {phrase.format(a=amount, his=actor.his)}."))
    if after:
        d.text.append(after)
    value = in_boxes(d, k, m, box, x)
    r = d._rng.random()
    if impersonal or r < 0.35:
        if d.chance(0.35):
            j = d.number(1, min(value - 1, 20))
            amount = some(d, j, x)
            if j == 1:
                amount = "one of them"
            bank = w.FOOD_MISHAPS if x.food else w.MISHAPS
            form = (PAST if d.past else BASE) if j > 1 else THIRD
            event = d.of(bank)[form]
            if d.chance(0.4):
                d.text.append(f"If {amount} {event}, how many {d.pick('', 'good ') if x.food else ''}{x.many} are {d.pick('left', 'there', 'left')}?")
                d.question = " ".join(d.text)
            else:
                d.say(f"{amount} {event}.")
                d.end(f"How many {x.many} are left?", "How many are left?", f"How many {x.many} remain?",
                      f"How many good {x.many} are left?" if x.food else f"How many {x.many} are still there?")  # fmt: skip
            d.add("loss", f"There are @ {x.many} left.", value, "-", j)
        elif d.chance(0.3):
            j = d.size(1, 40)
            d.say(f"There {be if j > 1 else ('was' if d.past else 'is')} also {d.n(j)} {x.one if j == 1 else x.many} {d.pick('outside', 'on the table', 'on the floor', 'not in a ' + box.one)}.")
            d.end(f"How many {x.many} are there in total?", f"How many {x.many} are there altogether?",
                  f"How many {x.many} are there in all?")  # fmt: skip
            d.add("plus", f"There are @ {x.many}.", value, "+", j)
        else:
            d.end(f"How many {x.many} are there in total?", f"How many {x.many} are there altogether?",
                  f"How many {x.many} are there?", f"How many {x.many} are there in all?",
                  f"What is the total number of {x.many}?", f"How many {x.many} are in the {box.many}?")  # fmt: skip
    elif r < 0.5:
        ask_total(d, actor, x.many)
    else:
        d.of(TAILS)(d, actor, x, value)


@story(5)
def simple_share(d: Story) -> None:
    """A number of things, shared or packed."""
    actor, x = d.actor(), d.noun()
    k, m = d.number(2, 12), d.number(2, 12)
    value = k * m
    d.say(f"{actor.first} {w.STARTS[0][d.form(actor)]}.".format(a=f"{d.n(value)} {x.many}"),
          f"{actor.first} {d.of(w.FOOD_GAINS[:3] if x.food else w.GAINS[:4])[d.form(actor)]}.".format(a=f"{d.n(value)} {x.many}"),
          )  # fmt: skip
    if d.chance(0.3):
        lost = d.number(1, 15)
        d.text[-1] = ""
        total = value + lost
        keep = d.pick(f"keep {d.n(lost)} for {{h}}", f"eat {d.n(lost)}" if x.food else f"lose {d.n(lost)}", f"give {d.n(lost)} to {d.relative(actor)}", f"keep {d.n(lost)} {x.many} for {{h}}")
        own = {"she": "herself", "he": "himself", "I": "myself", "you": "yourself"}.get(actor.he, "themselves")
        keep = w.conjugate(keep.format(h=own))[d.form(actor)]
        d.text[-1] = cap(f"{actor.first} {w.STARTS[0][d.form(actor)].format(a=f'{d.n(total)} {x.many}')}.")
        d.add("loss", f"Then {actor.name} {actor.has} @ {x.many} left.", total, "-", lost)
        d.say(f"{d.who(actor)} {keep}.", f"{d.who(actor)} {keep}.")
    (shared if d.chance(0.6) else boxed)(d, actor, x, value)


@story(2)
def remainder(d: Story) -> None:
    """What is over when things are shared or packed."""
    actor, x = d.actor(), d.noun()
    k, m = d.number(2, 10), d.number(2, 10)
    over = d.number(1, k - 1)
    total = k * m + over
    many, who, form = x.many, d.who(actor), d.form(actor)
    d.say(f"{actor.first} {w.STARTS[0][form].format(a=f'{d.n(total)} {many}')}.")
    if d.chance(0.5):
        friends = d.pick("friends", "children", "students", "cousins", "kids")
        d.say(f"{who} {w.conjugate('share')[form]} them equally among {d.n(k)} {friends}.",
              f"{who} {w.conjugate('give')[form]} {d.n(k)} {friends} the same number of {many}, as many as possible.",
              f"{who} {w.conjugate('divide')[form]} them equally between {d.n(k)} {friends}.")  # fmt: skip
        d.end(f"How many {many} are left over?", "How many are left over?", f"How many {many} remain?",
              f"What is the number of {many} left over?")  # fmt: skip
        used = d.add("fit", f"With {m} each the {friends} get @ {many}.", k, "*", m)
    else:
        box = d.of(w.CONTAINERS)
        d.say(f"{who} {w.conjugate('pack')[form]} them into {box.many} of {d.n(k)}.",
              f"{who} {w.conjugate('put')[form]} them in {box.many} of {d.n(k)} {many} each.")  # fmt: skip
        d.end(f"How many {many} are left over?", "How many are left over?",
              f"How many {many} do not fit in a full {box.one}?")  # fmt: skip
        used = d.add("fit", f"In {m} full {box.many} there are @ {many}.", m, "*", k)
    d.add("over", f"There are @ {many} left over.", total, "-", used)


@story(9)
def place(d: Story) -> None:
    """Birds in a tree, people on a bus: some come, some go."""
    where = d.of(w.PLACES)
    x, spot = d.of(where.nouns), d.of(where.where)
    value, high = 0, d.pick(20, 30, 50, 90)
    be, form = ("were", PAST) if d.past else ("are", BASE)
    if d.chance(0.15):
        if x.one in w.HUMANS:
            a, b = d.pick(("young", "old"), ("tall", "short"), ("happy", "quiet"), ("new", "older"))
        else:
            a, b = d.two(w.COLORS) if d.chance(0.6) else d.pick(("small", "big"), ("old", "new"))
        k, m = d.number(2, high), d.number(2, high)
        d.say(f"There {be} {d.n(k)} {a} {x.many} and {d.n(m)} {b} {x.many} {spot}.",
              f"{cap(spot)} there {be} {d.n(k)} {a} {x.many} and {d.n(m)} {b} ones.")  # fmt: skip
        value = d.add("kinds", f"There are @ {x.many} at first.", k, "+", m)
    else:
        value = d.number(4, high)
        sat = d.pick(be, be, be, "sat" if d.past else "sit") if x.one in ("bird", "frog", "pigeon", "crow") else be
        d.say(f"There {be} {d.n(value)} {x.many} {spot}.", f"There {be} {d.n(value)} {x.many} {spot}.",
              f"{d.n(value)} {x.many} {sat} {spot}.")  # fmt: skip
    for i in range(d.pick(1, 1, 1, 2, 2, 2, 3)):
        r, then = d._rng.random(), ""
        if i:
            then = d.pick("Then ", "After that, ", "Later, ", "", "Next, ")
        elif d.chance(0.25):
            then = d.pick("Then ", "After a while, ", "After an hour, ", "In the afternoon, ")
        if r < 0.5 and value > 3:
            if d.chance(0.2) and len(d.lines) < 3 and (share := fraction(d, value)):
                words, divisor, parts = share
                k = take_share(d, value, divisor, parts, x.many)
                amount = f"{words} of {d.pick('them', 'the ' + x.many)}"
            else:
                k = d.number(2, value - 1)
                amount = some(d, k, x)
            event = f"{amount} {d.of(where.go)[form]}"
            value = d.add("go", f"Then there are @ {x.many} left.", value, "-", k)
        else:
            k = d.number(2, high)
            event = f"{more(d, k, x, False)} {d.of(where.come)[form]}"
            value = d.add("come", f"Then there are @ {x.many}.", value, "+", k)
        if i and d.chance(0.35):
            d.text[-1] = f"{d.text[-1][:-1]}{d.pick(' and', ', and', ' and then', ', but', ', then')} {event}."
        else:
            d.text.append(cap(f"{then}{event}."))
    if value == 0:
        raise ValueError("nobody is left")
    many = x.many
    left = d.shape[-1] == "go"
    d.end(f"How many {many} are {spot} now?", f"How many {many} are there now?", f"How many {many} are now {spot}?",
          f"How many {many} are left?" if left else f"How many {many} are there in all?",
          f"How many {many} are left {spot}?" if left else f"How many {many} are there altogether?",
          "How many are left?" if left else f"How many {many} are there?",
          f"How many {many} remain?" if left else f"How many {many} are {spot} in total?",
          f"How many {many} are still {spot}?" if left else f"How many {many} are there in total?")  # fmt: skip


# --- several amounts, each by itself or told by another -------------------------------------------


@story(9)
def comparison(d: Story) -> None:
    """Two or three people; each has so many, or so many more than another."""
    x = d.noun()
    people = [d.someone() for _ in range(d.pick(2, 2, 2, 3))]
    if d.chance(0.15):
        people[0] = Actor("I", "I", "I", "my", "me", BASE)
    has = "had" if d.past and d.chance(0.3) else "has"
    verb = has
    a = people[0]
    values = [d.size(2, 90)]
    verb0 = ("had" if has == "had" else a.has)
    order = d.chance(0.2) and len(people) == 2
    kind = "" if d.chance(0.75) else d.pick("collected", "found", "picked", "made", "bought", "sold")
    first = f"{a.name} {kind or verb0} {d.n(values[0])} {x.many}."
    d.text.append(first)
    if kind:
        verb = kind
    for person in people[1:]:
        than = d.of(people[: len(values)])
        base = values[people.index(than)]
        than_name = than.him if than.he == "I" else than.name
        if d.chance(0.12):
            k = d.size(2, 90)
            d.text.append(f"{person.name} {verb} {d.n(k)}{d.pick('', f' {x.many}')}.")
            values.append(k)
        else:
            values.append(relate(d, x, person.name, base, than_name, verb))
        if max(values) > 500:
            raise ValueError("too many")
    if order:  # the known amount last
        d.text.reverse()
    elif len(people) == 2 and d.chance(0.15):
        d.text = [f"{d.text[0][:-1]} and {d.text[1]}" if d.text[1][0] != "I" else " ".join(d.text)]
    many, last = x.many, people[-1].name
    r = d._rng.random()
    does = "did" if kind else "does"
    have = {"collected": "collect", "found": "find", "picked": "pick", "made": "make",
            "bought": "buy", "sold": "sell"}.get(kind, "have")  # fmt: skip
    if r < 0.4 and d.lines and d.lines[-1].startswith(last):
        d.end(f"How many {many} {does} {last} {have}?", f"How many {does} {last} {have}?",
              f"How many {many} {does} {last} {have}?")  # fmt: skip
    elif r < 0.8 or len(set(values)) < len(values):
        if a.he == "I":
            they = "we"
        else:
            they = d.pick("they", "they", " and ".join(p.name for p in people) if len(people) == 2 else "the three of them")
        do = "did" if kind else "do"
        d.end(f"How many {many} {do} {they} {have} together?", f"How many {many} {do} {they} {have} altogether?",
              f"How many {many} {do} {they} {have} in total?", f"How many {many} {do} {they} {have} in all?",
              f"What is the total number of {many}?")  # fmt: skip
        total = values[0]
        for i, value in enumerate(values[1:], 1):
            text = f"Together they have @ {many}." if i == len(values) - 1 else f"The first two have @ {many}."
            total = d.add("sum", text, total, "+", value)
    else:
        ranked = sorted(zip(values, people), key=lambda pair: pair[0])
        (lo, b), (hi, c) = ranked[0], ranked[-1]
        if len(people) == 3:
            (lo, b), (hi, c) = d.pick((ranked[0], ranked[2]), (ranked[0], ranked[1]), (ranked[1], ranked[2]))
        than = "me" if b.he == "I" else b.name
        do = "did" if kind else c.does
        d.end(f"How many more {many} {do} {c.name} {have} than {than}?",
              f"How many more {do} {c.name} {have} than {than}?",
              f"What is the difference between the number of {many} of {c.name if c.he != 'I' else 'mine'} and {than}?")  # fmt: skip
        d.add("diff", f"{c.name} {c.has} @ more {many}.", hi, "-", lo)


@story(3)
def backward_comparison(d: Story) -> None:
    """Mia has 12, which is 4 more than Ben: how many has Ben?"""
    a, b, x = d.someone(), d.someone(), d.noun()
    many = x.many
    k, has = d.size(2, 40), "has"
    r = d._rng.random()
    if r < 0.45:
        value = k + d.size(1, 60)
        d.say(f"{a.name} {has} {d.n(value)} {many}. {d.pick(cap(a.he), a.name)} has {d.n(k)} more {many} than {b.name}.",
              f"{a.name} {has} {d.n(value)} {many}, which is {d.n(k)} more than {b.name} has.",
              f"{a.name} {has} {d.n(value)} {many}. That is {d.n(k)} more than {b.name}.",
              f"{a.name} {has} {d.n(value)} {many}. {cap(a.he)} has {d.n(k)} more than {b.name}.")  # fmt: skip
        other = d.add("backmore", f"{b.name} has @ {many}.", value, "-", k)
    elif r < 0.7:
        value = d.size(2, 60)
        d.say(f"{a.name} {has} {d.n(value)} {many}. {cap(a.he)} has {d.n(k)} fewer {many} than {b.name}.",
              f"{a.name} {has} {d.n(value)} {many}, which is {d.n(k)} fewer than {b.name} has.",
              f"{a.name} {has} {d.n(value)} {many}. That is {d.n(k)} less than {b.name}.")  # fmt: skip
        other = d.add("backfewer", f"{b.name} has @ {many}.", value, "+", k)
    else:
        words, f = d.of(w.MULTIPLES)
        other = d.number(2, 30)
        value = other * f
        d.say(f"{a.name} {has} {d.n(value)} {many}. {cap(a.he)} has {words} as many {many} as {b.name}.",
              f"{a.name} {has} {d.n(value)} {many}, which is {words} as many as {b.name} has.",
              f"{a.name} {has} {words} as many {many} as {b.name}. {a.name} has {d.n(value)} {many}.")  # fmt: skip
        other = d.add("backtimes", f"{b.name} has @ {many}.", value, "/", f)
    if d.chance(0.7):
        d.end(f"How many {many} does {b.name} have?", f"How many does {b.name} have?")
    else:
        d.end(f"How many {many} do they have together?", f"How many {many} do they have in total?")
        d.add("both", f"Together they have @ {many}.", value, "+", other)


DOINGS = (  # what is done by so many: verb, things, longer time units first
    ("read", "pages"), ("read", "pages"), ("read", "pages"), ("run", "miles"), ("run", "kilometers"),
    ("walk", "miles"), ("walk", "kilometers"), ("ride", "miles"), ("bike", "miles"), ("swim", "laps"),
    ("write", "words"), ("write", "pages"), ("solve", "problems"), ("bake", "cookies"),
    ("score", "points"), ("score", "goals"), ("sell", "tickets"), ("sell", "cups of lemonade"),
    ("collect", "cans"), ("collect", "shells"), ("pick", "apples"), ("do", "push-ups"),
    ("do", "sit-ups"), ("plant", "trees"), ("catch", "fish"), ("drink", "glasses of water"),
    ("drive", "miles"), ("make", "bracelets"), ("paint", "pictures"), ("wash", "cars"),
    ("learn", "words"), ("eat", "cookies"), ("answer", "questions"), ("build", "models"),
    ("see", "birds"), ("find", "coins"), ("deliver", "packages"), ("take", "photos"),
    ("bake", "muffins"), ("bake", "loaves of bread"), ("make", "sandwiches"), ("watch", "movies"),
    ("sell", "muffins"), ("swim", "meters"), ("practice", "minutes"), ("study", "hours"),
    ("knit", "scarves"), ("draw", "pictures"), ("count", "stars"), ("feed", "animals"),
)  # fmt: skip


@story(7)
def periods(d: Story) -> None:
    """So many on Monday, so many on Tuesday: the total, and what comes of it."""
    actor = d.actor()
    verb, things = d.of(DOINGS)
    form = PAST if d.chance(0.85) else actor.form
    verbs = w.conjugate(verb)[form]
    count = d.pick(2, 2, 2, 3, 3)
    i = d.number(0, len(w.DAYS) - count)
    times = d.pick(
        [f"on {day}" for day in w.DAYS[i : i + count]],
        [f"on {day}" for day in w.DAYS[i : i + count]],
        ["in the morning", "in the afternoon", "in the evening"][:count],
        ["yesterday", "today", "this evening"][:count] if form == PAST else ["on the first day", "on the second day", "on the third day"][:count],
        [f"in {month}" for month in w.MONTHS[i : i + count]],
        ["on the first day", "on the second day", "on the third day"][:count],
        ["in the first week", "in the second week", "in the third week"][:count],
        ["last week", "this week", "today"][:count] if form == PAST else [f"in {m}" for m in w.MONTHS[i : i + count]],
    )
    if verb == "score":
        times = ["in the first game", "in the second game", "in the third game"][:count]
        if d.chance(0.4):
            times = ["in the first half", "in the second half", "in overtime"][:count]
    values = [d.size(2, 90)]
    d.text.append(cap(f"{actor.first} {verbs} {d.n(values[0])} {things} {times[0]}."))
    for j in range(1, count):
        r = d._rng.random()
        base, when, he = values[-1], times[j], d.who(actor)
        that = times[j - 1]
        step = f"{cap(when)} it is @ {things}."
        if r < 0.55:
            k = d.size(2, 90)
            values.append(k)
            if d.chance(0.6):  # one sentence
                link = d.pick(" and", ", and", " and", ",") if j == count - 1 else ","
                if link == "," and j == count - 1:
                    link = " and"
                d.text[-1] = f"{d.text[-1][:-1]}{link} {d.n(k)}{d.pick('', '', ' more', f' {things}')} {when}."
                if j < count - 1 and not d.chance(0.5):
                    continue
            else:
                d.say(f"{when}, {he} {verbs} {d.n(k)}.", f"{he} {verbs} {d.n(k)} {things} {when}.",
                      f"{he} {verbs} {d.n(k)} more {when}.", f"{when}, {he} {verbs} {d.n(k)} {things}.")  # fmt: skip
        elif r < 0.68:
            k = d.size(1, 30)
            values.append(d.add("more", step, base, "+", k))
            d.say(f"{when} {he} {verbs} {d.n(k)} more {things} than {that}.", f"{when}, {he} {verbs} {d.n(k)} more than {that}.",
                  f"{he} {verbs} {d.n(k)} more {things} {when} than {that}.")  # fmt: skip
        elif r < 0.8 and base > 2:
            k = d.number(1, min(base - 1, 30))
            values.append(d.add("fewer", step, base, "-", k))
            d.say(f"{when} {he} {verbs} {d.n(k)} fewer {things} than {that}.", f"{when}, {he} {verbs} {d.n(k)} fewer than {that}.",
                  f"{when} {he} {verbs} {d.n(k)} less than {that}.")  # fmt: skip
        elif r < 0.93 or base % 2:
            words, k = d.of(w.MULTIPLES)
            values.append(d.add("times", step, base, "*", k))
            d.say(f"{when} {he} {verbs} {words} as many {things} as {that}.", f"{when}, {he} {verbs} {words} as many.",
                  f"{he} {verbs} {words} as many {things} {when}.", f"{when}, {he} {verbs} {words} as many as {that}.")  # fmt: skip
        else:
            values.append(d.add("half", step, base, "/", 2))
            d.say(f"{when} {he} {verbs} half as many {things} as {that}.", f"{when}, {he} {verbs} half as many.",
                  f"{when}, {he} {verbs} half that number.")  # fmt: skip
    who, does = d.who(actor), "did" if form == PAST else actor.does
    r = d._rng.random()
    if r < 0.15 and len(set(values)) > 1 and count == 2:
        (lo, b), (hi, a) = sorted(zip(values, times))
        d.end(f"How many more {things} {does} {who} {verb} {a} than {b}?")
        d.add("diff", f"The difference is @ {things}.", hi, "-", lo)
        return
    if r < 0.3 and d.lines:
        d.end(f"How many {things} {does} {who} {verb} {times[-1]}?")
        if not d.lines[-1].startswith(cap(times[-1])):
            raise ValueError("that was given")
        return
    total = values[0]
    for j, value in enumerate(values[1:], 1):
        text = f"In total it is @ {things}." if j == count - 1 else f"So far it is @ {things}."
        total = d.add("sum", text, total, "+", value)
    if r < 0.55 and len(d.lines) < MAX_STEPS:
        if d.chance(0.35) and (k := d.divisor(total)):
            if k == count and d.chance(0.9):
                d.end(f"What is the average number of {things} {d.pick('per day', 'a day')}?" if "on " in times[0] else "What is the average?")
                d.add("mean", "The average is @.", total, "/", k)
                return
            raise ValueError("no average")
        goal = total + d.size(1, 80)
        if things == "pages":
            d.text.insert(d.pick(0, len(d.text)) if not actor.first.startswith("a ") else len(d.text), f"The {d.pick('book', 'story', 'novel')} has {goal} pages.")
            d.end(f"How many pages {actor.does} {who} still have to read?" if verb == "read" else f"How many pages are left to {verb}?",
                  f"How many pages are left to {verb}?", "How many pages are left?", f"How many more pages {actor.does} {who} have to {verb}?",
                  f"How many pages {actor.does} {who} have left to {verb}?")  # fmt: skip
        else:
            d.say(f"{who} {w.conjugate('want')[form]} to {verb} {d.n(goal)} {things} in total.",
                  f"{cap(actor.his)} goal is {d.n(goal)} {things}.", f"{who} {w.conjugate('have')[form]} to {verb} {d.n(goal)} {things}.")  # fmt: skip
            d.end(f"How many more {things} {actor.does} {who} need to {verb}?", f"How many {things} are left?",
                  f"How many more {things} must {who} {verb}?")  # fmt: skip
        d.add("goal", f"There are @ {things} left.", goal, "-", total)
        return
    if r < 0.75 and len(d.lines) < MAX_STEPS and things in ("loaves of bread", "sandwiches", "cookies", "muffins", "apples", "cans", "shells", "bracelets", "fish"):
        k = d.number(1, total)
        d.say(f"{who} then {w.conjugate(d.pick('sell', 'give away', 'lose', 'use'))[form]} {d.n(k)} of them.",
              f"{who} {w.conjugate(d.pick('sell', 'give away'))[form]} {d.n(k)} {things}.")  # fmt: skip
        ask_left(d, actor, things)
        d.add("loss", f"Then there are @ {things} left.", total, "-", k)
        return
    d.end(f"How many {things} {does} {who} {verb} in total?", f"How many {things} {does} {who} {verb} altogether?",
          f"How many {things} {does} {who} {verb} in all?", f"How many {things} {does} {who} {verb}?",
          f"What is the total number of {things}?", f"In total, how many {things} {does} {who} {verb}?",
          f"How many {things} {does} {who} {verb} {'in the two' if count == 2 else 'in the three'} {'days' if 'on ' in times[0] else 'times'} together?")  # fmt: skip


@story(4)
def kinds(d: Story) -> None:
    """Red, blue and green ones: the total, or the rest."""
    actor, x = d.actor(), d.noun()
    count = d.pick(2, 3, 3, 4)
    form = d.form(actor)
    if d.chance(0.55):
        kind = d._rng.sample(w.COLORS, count)
        labels = [f"{c} {x.many}" for c in kind]
        many = x.many
    else:
        group, many = d.pick(("foods", "pieces of fruit"), ("animals", "animals"), ("items", "items"), ("flowers", "flowers"))
        bank = {"foods": w.FOODS[:18], "animals": w.ANIMALS, "items": w.ITEMS, "flowers": w.FLOWERS[:7]}[group]
        labels = kind = [noun.many for noun in d._rng.sample(bank, count)]
    values = [d.size(2, 60) for _ in kind]
    listed = [f"{d.n(v)} {label}" for v, label in zip(values, labels)]
    be = "were" if d.past else "are"
    total = sum(values)
    have = w.conjugate(d.pick("have", "have", "have", "buy", "see", "count", "get"))[form]
    r = d._rng.random()
    if r < 0.55:
        text = f"{', '.join(listed[:-1])}{d.pick(' and', ' and', ', and')} {listed[-1]}"
        personal = d.chance(0.6)
        if personal:
            d.say(f"{actor.first} {have} {text}.")
        else:
            spot = d.pick("in a box", "in a garden", "on a farm", "in a store", "in a bag", "on the table", "in the park", "in a bowl", "in a basket")
            d.say(f"There {be} {text} {spot}.", f"{spot} there {be} {text}.")
        s = values[0]
        for i, v in enumerate(values[1:], 1):
            s = d.add("sum", f"In total there are @ {many}." if i == count - 1 else f"So far there are @ {many}.", s, "+", v)
        if d.chance(0.3) and len(d.lines) < MAX_STEPS:
            if personal and d.chance(0.75):
                d.of(TAILS if d.chance(0.4) else (wanted,))(d, actor, Noun(many[:-1], many), s)
                return
            k = d.number(1, s - 1)
            bank = d.pick("break", "get lost", "be taken", "be sold", "go missing", "disappear", "pop" if many == "balloons" else "be given away")
            d.say(f"{d.n(k)} of {d.pick('them', 'the ' + many)} {w.conjugate(bank)[PAST if d.past else BASE if k > 1 else THIRD]}.")
            d.end(f"How many {many} are left?", f"How many {many} are there now?", f"How many {many} {actor.does} {d.who(actor)} have now?" if personal else "How many are left?")
            d.add("loss", f"Then there are @ {many} left.", s, "-", k)
        elif personal:
            who = d.who(actor)
            d.end(f"How many {many} {actor.does} {who} have in total?", f"How many {many} {actor.does} {who} have altogether?",
                  f"How many {many} {actor.does} {who} have in all?", f"How many {many} are there in total?",
                  f"What is the total number of {many}?")  # fmt: skip
        else:
            d.end(f"How many {many} are there in total?", f"How many {many} are there altogether?",
                  f"How many {many} are there in all?", f"What is the total number of {many}?", f"How many {many} are there?")  # fmt: skip
    else:
        rest = labels[-1]
        parts = listed[:-1]
        if len(parts) > 1 and d.chance(0.3):
            told = f"{', '.join(f'{d.n(v)} {be} {k}' for v, k in zip(values, kind[:-1]))} and the rest {be} {kind[-1]}"
        else:
            told = f"{' and '.join(f'{d.n(v)} {be} {k}' for v, k in zip(values, kind[:-1]))}"
            told += d.pick(f" and the rest {be} {kind[-1]}", f", and the others {be} {kind[-1]}", f". The rest {be} {kind[-1]}", f". The remaining ones {be} {kind[-1]}")
        d.say(f"{actor.first} {have} {d.n(total)} {many}.", f"There {be} {d.n(total)} {many} in a {d.pick('box', 'bag', 'room', 'store', 'garden', 'basket')}.")
        d.text.append(cap(told + "."))
        d.end(f"How many {rest} are there?", f"How many {many} are {kind[-1]}?", f"How many are {kind[-1]}?", f"How many {rest} {actor.does} {actor.name} have?" if d.text[0].startswith(cap(actor.first)) else f"How many {rest} are there?")
        left = total
        for i, v in enumerate(values[:-1]):
            left = d.add("rest", f"Without the {kind[i]} there are @ {many} left.", left, "-", v)


@story(4)
def two_groups(d: Story) -> None:
    """Girls and boys, seats taken and empty: a whole and its parts."""
    be = "were" if d.past and d.chance(0.5) else "are"
    whole, first, second, place_ = d.pick(
        ("students", "girls", "boys", "in a class"), ("students", "boys", "girls", "in the class"),
        ("children", "boys", "girls", "at a party"), ("students", "girls", "boys", "in the school choir"),
        ("people", "adults", "children", "at the pool"), ("people", "men", "women", "in a room"),
        ("people", "children", "adults", "on a bus"), ("animals", "cows", "horses", "on a farm"),
        ("animals", "dogs", "cats", "in a shelter"), ("students", "boys", "girls", "on the school bus"),
        ("fruits", "apples", "oranges", "in a basket"), ("cars", "red cars", "blue cars", "in a parking lot"),
        ("players", "girls", "boys", "on a team"), ("flowers", "roses", "tulips", "in a vase"),
        ("kids", "girls", "boys", "in the club"), ("books", "novels", "comics", "on a shelf"),
    )  # fmt: skip
    r = d._rng.random()
    total = d.size(6, 120)
    if r < 0.45:
        k = d.number(2, total - 1)
        d.say(f"There {be} {d.n(total)} {whole} {place_}.", f"There {be} {d.n(total)} {whole} {place_}.")
        d.say(f"{d.n(k)} of them {be} {first}.", f"{d.n(k)} {be} {first}.", f"{d.n(k)} of the {whole} {be} {first} and the rest {be} {second}.",
              f"If {d.n(k)} of them {be} {first}, how many {second} {be} there?")  # fmt: skip
        if d.text[-1].endswith("?"):
            d.question = " ".join(d.text)
        else:
            d.end(f"How many {second} are there?", f"How many of them are {second}?", f"How many {second} {be} there?",
                  f"How many {whole} are {second}?")  # fmt: skip
        d.add("part", f"There are @ {second}.", total, "-", k)
        return
    if r < 0.6:
        a, b = d.size(3, 60), d.size(3, 60)
        d.say(f"There {be} {d.n(a)} {first} and {d.n(b)} {second} {place_}.", f"{cap(place_)} there {be} {d.n(a)} {first} and {d.n(b)} {second}.")
        if d.chance(0.6):
            d.end(f"How many {whole} are there in total?", f"How many {whole} {be} there altogether?", f"How many {whole} are there in all?",
                  f"How many {whole} are there?")  # fmt: skip
            d.add("sum", f"There are @ {whole}.", a, "+", b)
            return
        if a == b:
            raise ValueError("no difference")
        hi, lo, big, small = (a, b, first, second) if a > b else (b, a, second, first)
        d.end(f"How many more {big} than {small} are there?", f"How many more {big} are there than {small}?",
              f"How many fewer {small} than {big} are there?")  # fmt: skip
        d.add("diff", f"There are @ more {big}.", hi, "-", lo)
        return
    share = fraction(d, total)
    if not share or total < 6:
        raise ValueError("no share")
    words, divisor, parts = share
    d.say(f"There {be} {d.n(total)} {whole} {place_}.", f"There {be} {d.n(total)} {whole} {place_}.")
    d.say(f"{words} of them {be} {first}.", f"{words} of the {whole} {be} {first}.", f"{words} of the {whole} {be} {first} and the rest {be} {second}.")
    k = take_share(d, total, divisor, parts, first)
    if d.chance(0.6):
        d.end(f"How many {second} are there?", f"How many {whole} are not {first}?", f"How many {second} {be} there?")
        d.add("part", f"There are @ {second}.", total, "-", k)
    else:
        d.end(f"How many {first} are there?", f"How many of the {whole} are {first}?")


@story(1.5)
def seats(d: Story) -> None:
    """Of so many places some are taken."""
    where, thing, taken = d.pick(
        ("a bus", "seats", "people are sitting on the bus"), ("a theater", "seats", "seats are taken"),
        ("a parking lot", "spaces", "cars are parked there"), ("a bus", "seats", "seats are occupied"),
        ("a hotel", "rooms", "rooms are occupied"), ("a classroom", "desks", "students are sitting"),
        ("a plane", "seats", "passengers are on board"), ("an egg carton", "places", "eggs are in it"),
        ("a boat", "seats", "people are in it"), ("a restaurant", "tables", "tables are taken"),
        ("a cinema", "seats", "people came to the movie"), ("a photo album", "pages", "pages are full"),
    )  # fmt: skip
    if d.chance(0.5):
        k, m = d.number(2, 20), d.number(2, 20)
        d.say(f"{where} has {d.n(k)} rows of {thing} with {d.n(m)} {thing} in each row.", f"{where} has {d.n(k)} rows with {d.n(m)} {thing} in each.",
              f"{where} has {d.n(k)} rows of {d.n(m)} {thing}.")  # fmt: skip
        total = d.add("rows", f"There are @ {thing}.", k, "*", m)
    else:
        total = d.size(5, 200)
        d.say(f"{where} has {d.n(total)} {thing}.", f"There are {d.n(total)} {thing} in {where}.")
    k = d.number(2, total - 1)
    d.say(f"{d.n(k)} {taken}.", f"{d.n(k)} {taken}.", f"Right now, {d.n(k)} {taken}.")
    d.end(f"How many {thing} are {d.pick('empty', 'free', 'left', 'still free', 'available')}?", f"How many {thing} are {d.pick('empty', 'free', 'left')}?")
    d.add("free", f"There are @ {thing} free.", total, "-", k)


# --- money ---------------------------------------------------------------------------------------


def priced(d: Story, k: int, price: int, x: Noun) -> str:
    """``k`` things at a price each."""
    n, usd, things = d.n(k), d.usd(price), x.one if k == 1 else x.many
    if k == 1:
        return d.pick(f"a {x.one} for {usd}", f"a {x.one} that costs {usd}", f"one {x.one} for {usd}", f"a {usd} {x.one}" if not d.dollars else f"a {x.one} for {usd}").replace("a a", "an a").replace("a o", "an o").replace("a e", "an e").replace("a i", "an i").replace("a u", "an u")  # fmt: skip
    return d.pick(f"{n} {things} for {usd} each", f"{n} {things} at {usd} each", f"{n} {things} that cost {usd} each", f"{n} {things} for {usd} each",
                  f"{n} {things} costing {usd} each", f"{n} {things}, which cost {usd} each", f"{n} {things}, each costing {usd}")  # fmt: skip


def usd_form(d: Story, word: str) -> str:
    return d.pick(f"How much money {word}", f"How much {word}", f"How much money {word}", f"How many dollars {word}")


@story(9)
def wallet(d: Story) -> None:
    """Money that comes and goes."""
    actor = d.actor()
    form = d.form(actor)
    parts: list[Part] = []
    if d.chance(0.8):
        value = d.pick(d.size(5, 200), d.number(1, 20) * 5, d.number(1, 10) * 10)
        phrase = d.of(w.MONEY_STARTS)[form]
        parts.append(Part(_money(d, phrase, actor, d.usd(value))))
    else:
        m, k, unit = d.number(2, 20), d.number(2, 12), d.of(PERIODS)
        amount = _each(d, k, m, unit)
        value = d.add("daily", f"In {k} {unit[1]} it is $@.", k, "*", m)
        parts.append(Part(w.conjugate(d.pick(f"save {amount}", f"earn {amount}", f"save {amount}"))[form]))
    events = d.pick(1, 1, 1, 2, 2, 3)
    for _ in range(events):
        if len(d.lines) >= MAX_STEPS - 1:
            break
        r = d._rng.random()
        if r < 0.6 and value > 3:
            if r < 0.2 and value >= 6 and len(d.lines) < MAX_STEPS - 1:
                x = d.of(w.PRICED)
                k = d.number(2, min(9, value // 2))
                price = d.number(1, min(20, value // k))
                cost = d.add("cost", f"The {x.many} cost $@.", k, "*", price)
                parts.append(Part(w.conjugate(f"buy {priced(d, k, price, x)}")[form]))
            elif r < 0.27 and len(d.lines) < MAX_STEPS - 1 and (share := fraction(d, value)):
                words, divisor, pieces = share
                on = d.pick("a book", "food", "a gift", "clothes", "a game", "lunch", "toys")
                parts.append(Part(w.conjugate(f"spend {words} of {d.pick('it', 'the money', f'{actor.his} money')} on {on}")[form]))
                cost = take_share(d, value, divisor, pieces, "dollars")
            else:
                cost = d.number(1, value)
                parts.append(Part(_money(d, d.of(w.MONEY_LOSSES)[form], actor, d.usd(cost))))
            value = d.add("spend", f"Then {actor.name} {actor.has} $@ left.", value, "-", cost)
        elif value < 600:
            if r > 0.85 and len(d.lines) < MAX_STEPS - 1:
                m, k, unit = d.number(2, 15), d.number(2, 10), d.of(PERIODS)
                parts.append(Part(w.conjugate(d.pick(f"earn {_each(d, k, m, unit)}", f"save {_each(d, k, m, unit)}"))[form]))
                got = d.add("daily", f"In {k} {unit[1]} it is $@.", k, "*", m)
            elif r > 0.78 and len(d.lines) < MAX_STEPS - 1:
                k, m = d.number(2, 10), d.number(2, 15)
                job = d.pick("mow {k} lawns", "wash {k} cars", "sell {k} cups of lemonade", "walk {k} dogs", "sell {k} cakes", "sell {k} old books")
                parts.append(Part(w.conjugate(f"{job.format(k=d.n(k))} for {d.usd(m)} each")[form]))
                got = d.add("jobs", f"That brings $@.", k, "*", m)
            else:
                got = d.size(1, 100)
                if d.chance(0.25):
                    given = w.conjugate(d.pick("give {him} {a}", "give {him} {a}", "send {him} {a}", "pay {him} {a}", "give {him} another {a}"))
                    text = given[PAST if d.past else THIRD].format(him=actor.him, a=d.usd(got))
                    parts.append(Part(f"{d.relative(actor)} {text}", own=True))
                else:
                    parts.append(Part(_money(d, d.of(w.MONEY_GAINS)[form], actor, d.usd(got))))
            value = d.add("earn", f"Then {actor.name} {actor.has} $@.", value, "+", got)
    if not d.lines or value == 0:
        raise ValueError("nothing happened, or all is spent")
    tell(d, actor, parts)
    who = d.who(actor)
    does = d.pick(actor.does, actor.does, "did") if d.past else actor.does
    r = d._rng.random()
    if r < 0.15 and len(d.lines) < MAX_STEPS:
        goal = value + d.size(2, 100)
        thing = d.of(w.COSTLY)
        d.say(f"{who} {w.conjugate('want')[form]} to buy a {thing} that costs {d.usd(goal)}.", f"{cap(who)} would like to buy a {thing} for {d.usd(goal)}.",
              f"A {thing} costs {d.usd(goal)}.")  # fmt: skip
        d.end(f"How much more money {actor.does} {who} need?", f"How much more {actor.does} {who} need to buy it?",
              f"How much money {actor.does} {who} still need?", f"How many more dollars {actor.does} {who} need to buy the {thing}?")  # fmt: skip
        d.add("goal", f"{actor.name} still {'needs' if actor.form == THIRD else 'need'} $@.", goal, "-", value)
    elif r < 0.22 and len(d.lines) < MAX_STEPS and (price := d.divisor(value)):
        x = d.of(w.PRICED)
        d.say(f"{x.many} cost {d.usd(price)} each.", f"A {x.one} costs {d.usd(price)}.", f"One {x.one} costs {d.usd(price)}.")
        d.end(f"How many {x.many} can {who} buy with {d.pick('the money', 'the rest', 'the money that is left')}?", f"How many {x.many} can {who} buy?")
        d.add("buys", f"{actor.name} can buy @ {x.many}.", value, "/", price)
    elif d.shape[-1] == "earn" and d.chance(0.7):
        d.end(f"{usd_form(d, does)} {who} have now?", f"{usd_form(d, does)} {who} have in total?", f"{usd_form(d, does)} {who} have altogether?",
              f"{usd_form(d, does)} {who} have in all?", f"{usd_form(d, does)} {who} have?")  # fmt: skip
    else:
        d.end(f"{usd_form(d, does)} {who} have left?", f"{usd_form(d, does)} {who} have left?", f"{usd_form(d, does)} {who} have now?",
              "How much money is left?", f"How much is left?", f"{usd_form(d, actor.does)} {who} still have?", f"{usd_form(d, does)} {who} have in the end?",
              f"How much money {actor.does} {who} have remaining?")  # fmt: skip


def _each(d: Story, k: int, m: int, unit: tuple[str, str]) -> str:
    return every(d, k, m, "dollars", unit) if d.dollars else f"${every(d, k, m, '', unit).replace('  ', ' ')}" if not d.wordy else every(d, k, m, "dollars", unit)


def _money(d: Story, phrase: str, actor: Actor, amount: str) -> str:
    if "{one}" in phrase:
        phrase = phrase.replace("a {one}", article(d.of(w.PRICED).one))
    if "{r}" in phrase:
        phrase = phrase.replace("{r}", d.relative(actor))
    return phrase.format(a=amount, his=actor.his, him=actor.him)


def article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


@story(9)
def shopping(d: Story) -> None:
    """One to three kinds of things at their prices: the sum, the change, the discount, a share."""
    actor = d.actor()
    form = d.form(actor)
    who = d.who(actor)
    count = d.pick(1, 1, 2, 2, 2, 3)
    xs = d._rng.sample(w.PRICED, count)
    ks = [d.number(2, 9) if d.chance(0.72) or count == 1 else 1 for _ in xs]
    prices = [d.price() if k > 1 else d.price() + d.number(0, 15) for k in ks]
    does = "did" if d.past else actor.does
    if d.chance(0.35) and count < 3:
        listed = [f"{article(x.one)} costs {d.usd(p)}" for x, p in zip(xs, prices)]
        d.say(f"{' and '.join(listed)}.", ". ".join(cap(t) for t in listed) + ".", f"{cap(xs[0].many)} cost {d.usd(prices[0])} each{''.join(f' and {x.many} cost {d.usd(p)} each' for x, p in zip(xs[1:], prices[1:]))}.")
        things = " and ".join(f"{d.n(k) if k > 1 else d.pick('1', 'a', 'one')} {x.one if k == 1 else x.many}" for x, k in zip(xs, ks))
        if d.chance(0.4):
            things_question = True
            if d.chance(0.4):
                d.text[-1] = f"If {d.pick(' and '.join(listed), f'one {xs[0].one} costs {d.usd(prices[0])}' if count == 1 else ' and '.join(listed))},"
        else:
            things_question = False
            d.say(f"{actor.first} {w.conjugate(d.pick('buy', 'buy', 'order', 'get', 'want to buy' if not d.past else 'purchase'))[form]} {things}.")
    else:
        things_question = False
        listed = [priced(d, k, p, x) for k, p, x in zip(ks, prices, xs)]
        text = listed[0] if count == 1 else f"{', '.join(listed[:-1])}{d.pick(' and', ' and', ', and')} {listed[-1]}"
        verb = w.conjugate(d.pick("buy", "buy", "buy", "order", "purchase", "get"))[form]
        if count == 2 and d.chance(0.2):
            d.say(f"{actor.first} {verb} {listed[0]}. {cap(d.who(actor))} also {verb} {listed[1]}.")
        else:
            d.say(f"{actor.first} {verb} {text}.", f"{actor.first} {verb} {text}.", f"{d.pick('At the store,', 'At the market,', 'In a shop,')} {actor.first} {verb} {text}.")
    costs = [d.add("cost", f"The {x.many} cost $@.", k, "*", p) if k > 1 else p for x, k, p in zip(xs, ks, prices)]
    total = costs[0]
    for i, cost in enumerate(costs[1:], 1):
        total = d.add("sum", "In total it costs $@." if i == count - 1 else "So far it costs $@.", total, "+", cost)
    r = d._rng.random()
    if things_question:
        if d.text[-1].startswith("If "):
            d.text[-1] += d.pick(
                f" how much do {things} cost?", f" how much will {things} cost?",
                f" how much do {things} cost in total?", f" what is the price of {things}?",
            )  # fmt: skip
            d.question = " ".join(d.text)
            return
        d.end(f"How much do {things} cost?", f"How much do {things} cost together?", f"What is the total cost of {things}?", f"What is the price of {things}?",
              f"How much does it cost to buy {things}?", f"How much would {things} cost?")  # fmt: skip
    elif r < 0.5 or len(d.lines) >= MAX_STEPS:
        d.end(f"How much {does} {who} spend?", f"How much {does} {who} pay?", f"How much {does} {who} spend in total?", f"How much money {does} {who} spend altogether?",
              f"What is the total cost?", f"How much {actor.does} {who} have to pay?", f"How much {does} {who} pay in total?", f"How much {does} {who} spend altogether?",
              f"What is the total price?", f"How much money {actor.does} {who} need?", "How much does it cost in total?", f"How much {does} it cost altogether?".replace("do it", "does it"))  # fmt: skip
    elif r < 0.78:
        bills = [b for b in (10, 20, 50, 100, 200) if b > total]
        paid = bills[0] if bills and d.chance(0.7) else total + d.number(1, 40)
        bill = d.chance(0.5)
        if bill and paid in (10, 20, 50, 100):
            d.say(f"{who} {w.conjugate('pay')[form]} with a ${paid} bill.", f"{who} {w.conjugate('give')[form]} the {d.pick('cashier', 'clerk', 'seller')} a ${paid} bill.",
                  f"{who} {w.conjugate('hand')[form]} over a ${paid} bill.", f"{who} {w.conjugate('pay')[form]} with a {paid} dollar bill.",
                  f"{who} {w.conjugate('pay')[form]} with {d.usd(paid)}.")  # fmt: skip
            change = True
        elif bill:
            d.say(f"{who} {w.conjugate('pay')[form]} with {d.usd(paid)}.", f"{who} {w.conjugate('give')[form]} the {d.pick('cashier', 'clerk', 'seller')} {d.usd(paid)}.")
            change = True
        else:
            had = f"{actor.first} {w.conjugate(d.pick('have', 'have', 'start with', 'go to the store with'))[form]} {d.usd(paid)}."
            d.text.insert(0, cap(had)) if d.chance(0.7) and not actor.first.startswith("a ") else d.say(f"{who} {w.conjugate('have')[form]} {d.usd(paid)}.")
            change = False
        if change:
            d.end(f"How much change {does} {who} get?", f"How much change {does} {who} get back?", f"How much change {does} {who} receive?", f"How much change should {who} get?",
                  f"What is {actor.his} change?", f"How much money {does} {who} get back?", f"How much change will {who} get?")  # fmt: skip
            d.add("change", f"The change is $@.", paid, "-", total)
        else:
            d.end(f"How much money {does} {who} have left?", f"How much {does} {who} have left?", "How much money is left?", f"How many dollars {does} {who} have left?",
                  f"How much money {actor.does} {who} have now?", f"How much money will {who} have left?")  # fmt: skip
            d.add("left", f"{actor.name} {actor.has} $@ left.", paid, "-", total)
    elif r < 0.9:
        off = d.number(1, min(20, total - 1))
        d.say(f"{who} {w.conjugate('have')[form]} a coupon for {d.usd(off)} off.", f"{who} {w.conjugate('use')[form]} a {d.pick('coupon', 'discount')} of {d.usd(off)}.",
              f"{who} {w.conjugate('get')[form]} a discount of {d.usd(off)}.")  # fmt: skip
        d.end(f"How much {does} {who} pay?", f"How much {actor.does} {who} have to pay?", f"What is the total cost?", f"How much {does} {who} pay in the end?")
        d.add("off", "After the discount it costs $@.", total, "-", off)
    else:
        k = d.divisor(total)
        if k is None:
            raise ValueError("no share")
        d.say(f"The cost {'was' if d.past else 'is'} split equally between {d.n(k)} friends.", f"{d.n(k)} people share the cost equally.", f"{d.n(k)} friends split the bill evenly.")
        d.end("How much does each person pay?", "How much does each of them pay?", "How much does each one have to pay?", "How much did each of them pay?")
        d.add("split", "Each person pays $@.", total, "/", k)


@story(3)
def simple_money(d: Story) -> None:
    """Change from one thing, the price of one of many, splitting a bill, what is still needed."""
    actor = d.actor()
    form, who = d.form(actor), d.who(actor)
    x = d.of(w.PRICED)
    does = "did" if d.past else actor.does
    r = d._rng.random()
    if r < 0.3:
        price = d.number(1, 95)
        bills = [b for b in (5, 10, 20, 50, 100) if b > price]
        paid = bills[0]
        d.say(f"{actor.first} {w.conjugate('buy')[form]} {article(x.one)} for {d.usd(price)} and {w.conjugate('pay')[form]} with a ${paid} bill.",
              f"{actor.first} {w.conjugate('pay')[form]} for {article(x.one)} that costs {d.usd(price)} with a ${paid} bill.",
              f"{cap(article(x.one))} costs {d.usd(price)}. {cap(actor.first)} {w.conjugate('pay')[form]} with a ${paid} bill.",
              f"{actor.first} {w.conjugate('pay')[form]} for a ${price} {x.one} with a ${paid} bill.",
              f"{actor.first} {w.conjugate('use')[form]} a {paid} dollar bill to buy {article(x.one)} for {d.usd(price)}.",
              f"{actor.first} {w.conjugate('give')[form]} the cashier {d.usd(paid)} for {article(x.one)} that costs {d.usd(price)}.")  # fmt: skip
        d.end(f"How much change {does} {who} get?", f"How much change {does} {who} get back?", f"How much change {does} {who} receive?", f"How much money {does} {who} get back?",
              f"What is {actor.his} change?", f"How much change should {who} get?")  # fmt: skip
        d.add("change", "The change is $@.", paid, "-", price)
    elif r < 0.5:
        k, price = d.number(2, 12), d.number(2, 25)
        total = k * price
        d.say(f"{actor.first} {w.conjugate('pay')[form]} {d.usd(total)} for {d.n(k)} {x.many}.", f"{d.n(k)} {x.many} cost {d.usd(total)}.",
              f"{actor.first} {w.conjugate('buy')[form]} {d.n(k)} {x.many} for {d.usd(total)}.", f"{actor.first} {w.conjugate('spend')[form]} {d.usd(total)} on {d.n(k)} {x.many}.")  # fmt: skip
        if d.chance(0.6):
            d.end(f"How much does one {x.one} cost?", f"How much does each {x.one} cost?", f"What is the price of one {x.one}?", f"How much is one {x.one}?",
                  f"How much did each {x.one} cost?", f"What is the cost of each {x.one}?", f"If each {x.one} costs the same, how much is one {x.one}?")  # fmt: skip
            d.add("unit", f"One {x.one} costs $@.", total, "/", k)
        else:
            j = d.number(2, 12)
            d.end(f"How much do {d.n(j)} {x.many} cost?", f"How much would {d.n(j)} {x.many} cost?", f"What is the price of {d.n(j)} {x.many}?")
            each = d.add("unit", f"One {x.one} costs $@.", total, "/", k)
            d.add("cost", f"The {j} {x.many} cost $@.", j, "*", each)
    elif r < 0.65:
        k, each = d.number(2, 12), d.number(2, 25)
        people = d.pick("friends", "friends", "people", "students", "coworkers", "sisters", "roommates")
        bill = d.pick("bill", "meal", "dinner", "pizza", "gift", "present", "taxi ride", "trip", "lunch")
        was = "was" if d.past else "is"
        d.say(f"{d.n(k)} {people} {'went' if d.past else 'go'} to a restaurant. The bill {was} {d.usd(k * each)} and they split it {d.pick('evenly', 'equally')}.",
              f"{d.n(k)} {people} {'shared' if d.past else 'share'} the cost of a {bill} equally. It {'cost' if d.past else 'costs'} {d.usd(k * each)}.",
              f"{d.n(k)} {people} split a {bill} that {'cost' if d.past else 'costs'} {d.usd(k * each)} equally.",
              f"The {bill} {'cost' if d.past else 'costs'} {d.usd(k * each)}. {cap(d.n(k))} {people} split the cost {d.pick('evenly', 'equally')}.")  # fmt: skip
        d.end("How much does each person pay?", "How much did each of them pay?", "How much does each of them have to pay?", "How much does each one pay?", "How much should each person pay?")
        d.add("split", "Each person pays $@.", k * each, "/", k)
    elif r < 0.85:
        thing, goal = d.of(w.COSTLY), d.size(20, 300)
        have = d.number(2, goal - 1)
        d.say(f"{actor.first} {w.conjugate('want')[form]} to buy a {thing} that costs {d.usd(goal)}.", f"{actor.first} {w.conjugate('want')[form]} to buy a {thing} for {d.usd(goal)}.",
              f"A {thing} costs {d.usd(goal)}. {cap(actor.first)} {w.conjugate('want')[form]} to buy it.", f"{actor.first} {w.conjugate('need')[form]} {d.usd(goal)} for a {thing}.")  # fmt: skip
        d.say(f"{who} already {w.conjugate('have')[form]} {d.usd(have)}.", f"{who} {w.conjugate('have')[form]} {d.usd(have)}.", f"{who} {actor.has} saved {d.usd(have)}.", f"So far {who} {actor.has} {d.usd(have)}.")
        need = goal - have
        d.add("goal", f"{actor.name} still {'needs' if actor.form == THIRD else 'need'} $@.", goal, "-", have)
        if d.chance(0.4) and (k := d.divisor(need, 2, 25)):
            d.say(f"{who} {w.conjugate('save')[form]} {d.usd(k)} {d.pick('a', 'each', 'every', 'per')} week.", f"{who} can save {d.usd(k)} a week.")
            d.end(f"How many weeks {actor.does} {who} need?", f"How many weeks will it take?", f"In how many weeks can {who} buy the {thing}?", f"How many weeks will it take to save enough?")
            d.add("weeks", "It takes @ weeks.", need, "/", k)
        else:
            d.end(f"How much more money {actor.does} {who} need?", f"How much more {actor.does} {who} need?", f"How much money {actor.does} {who} still need?",
                  f"How much more money must {who} save?", f"How many more dollars {actor.does} {who} need?")  # fmt: skip
    else:
        k, price = d.number(2, 20), d.number(2, 15)
        total = k * price
        d.say(f"{actor.first} {w.conjugate('have')[form]} {d.usd(total)}. {cap(article(x.one))} costs {d.usd(price)}.", f"{cap(article(x.one))} costs {d.usd(price)}. {cap(actor.first)} {w.conjugate('have')[form]} {d.usd(total)}.",
              f"{actor.first} {w.conjugate('spend')[form]} {d.usd(total)} on {x.many} that cost {d.usd(price)} each.")  # fmt: skip
        if "spen" in d.text[0]:
            d.end(f"How many {x.many} {does} {who} buy?")
        else:
            d.end(f"How many {x.many} can {who} buy?", f"How many {x.many} can {who} get?")
        d.add("buys", f"{actor.name} can buy @ {x.many}.", total, "/", price)


@story(3)
def discount(d: Story) -> None:
    """So many percent off, or so many dollars."""
    actor, x = d.actor(), d.pick(*(Noun(t, t + "s") for t in w.COSTLY[:18]), d.of(w.PRICED))
    words, divisor, parts = d.pick(("10%", 10, 1), ("20%", 5, 1), ("25%", 4, 1), ("50%", 2, 1), ("10%", 10, 1), ("20%", 5, 1), ("25%", 4, 1), ("50%", 2, 1),
                                   ("30%", 10, 3), ("40%", 5, 2), ("75%", 4, 3), ("60%", 5, 3), ("70%", 10, 7))  # fmt: skip
    price = divisor * d.number(1, 240 // divisor)
    one, usd = x.one, d.usd(price)
    if d.chance(0.15):
        words = f"{words[:-1]} percent"
    r = d._rng.random()
    if r < 0.6:
        d.say(f"{article(one)} costs {usd}. It is on sale for {words} off.", f"{article(one)} costs {usd} and is {words} off.", f"{article(one)} that costs {usd} is {words} off.",
              f"The price of {article(one)} is {usd}. There is a {words} discount.", f"{article(one)} normally costs {usd}. Today it is {words} off.",
              f"{article(one)} is priced at {usd}. The store gives a {words} discount.", f"The regular price of {article(one)} is {usd}. It is on sale for {words} off.",
              f"{actor.first} {w.conjugate('buy')[d.form(actor)]} {article(one)} with a {words} discount. The price {'was' if d.past else 'is'} {usd} before the discount.",
              f"{article(one)} costs {usd}. The store takes {words} off the price.")  # fmt: skip
        k = d.add("share", "One part is $@." if parts > 1 else "The discount is $@.", price, "/", divisor)
        if parts > 1:
            k = d.add("parts", "The discount is $@.", k, "*", parts)
        if d.chance(0.12):
            d.end("How much is the discount?", "How much money do you save?", "How much is saved?")
            return
        d.end("What is the sale price?", "How much does it cost now?", "What is the new price?", f"How much does the {one} cost now?", f"What is the price of the {one} after the discount?",
              f"How much is the {one} now?", "What is the final price?", f"How much {actor.does} {actor.name} pay for it?" if actor.name in d.text[0] else "How much do you pay?", "What does it cost on sale?",
              f"What is the sale price of the {one}?")  # fmt: skip
        d.add("off", "The new price is $@.", price, "-", k)
    elif r < 0.8:
        off = d.number(1, price - 1)
        d.say(f"{article(one)} costs {usd}. It is {d.usd(off)} off.", f"{article(one)} normally costs {usd}, but today it is {d.usd(off)} cheaper.", f"The price of {article(one)} was {usd}. It was reduced by {d.usd(off)}.")
        d.end("How much does it cost now?", "What is the new price?", f"How much is the {one} now?")
        d.add("off", "The new price is $@.", price, "-", off)
    else:
        d.say(f"{article(one)} {'cost' if d.past else 'costs'} {usd}. The price {d.pick('goes up', 'rises', 'increases')} by {words}.", f"The price of {article(one)} is {usd}. It {d.pick('goes up', 'rises', 'increases')} by {words}.")
        k = d.add("share", "One part is $@." if parts > 1 else "The increase is $@.", price, "/", divisor)
        if parts > 1:
            k = d.add("parts", "The increase is $@.", k, "*", parts)
        d.end("What is the new price?", "How much does it cost now?", f"What is the new price of the {one}?")
        d.add("up", "The new price is $@.", price, "+", k)


@story(4)
def wages(d: Story) -> None:
    """So much an hour, for so many hours on so many days; and what remains of it."""
    actor = d.actor()
    form, who = d.form(actor), d.who(actor)
    wage = d.number(4, 25)
    does = "did" if d.past else actor.does
    d.say(f"{actor.first} {w.conjugate(d.pick('earn', 'make', 'earn', 'get'))[form]} {d.usd(wage)} {d.pick('an hour', 'per hour', 'for each hour of work', 'every hour', 'an hour')}.",
          f"{actor.first} {w.conjugate('work')[form]} for {d.usd(wage)} {d.pick('an hour', 'per hour')}.",
          f"{actor.first} {'was' if d.past and actor.form == THIRD else 'were' if d.past else 'is' if actor.form == THIRD else 'am' if actor.he == 'I' else 'are'} paid {d.usd(wage)} {d.pick('an hour', 'per hour')}.".replace("I were", "I was"))  # fmt: skip
    r = d._rng.random()
    worked = w.conjugate("work")[form]
    if r < 0.35:
        a, b = d.number(2, 10), d.number(2, 10)
        i, j = sorted(d._rng.sample(range(7), 2))
        one, two = w.DAYS[i], w.DAYS[j]
        d.say(f"{who} {worked} {d.n(a)} hours on {one} and {d.n(b)} hours on {two}.", f"On {one} {who} {worked} {d.n(a)} hours and on {two} {d.n(b)} hours.",
              f"{who} {worked} for {d.n(a)} hours on {one} and {d.n(b)} on {two}.")  # fmt: skip
        hours = d.add("hours", f"{actor.name} {w.conjugate('work')[actor.form]} @ hours.", a, "+", b)
    elif r < 0.65:
        hours, days = d.number(2, 9), d.number(2, 6)
        d.say(f"{who} {worked} {d.n(hours)} hours {d.pick('a', 'per', 'each', 'every')} day for {d.n(days)} days.", f"{who} {worked} {d.n(days)} days for {d.n(hours)} hours {d.pick('a day', 'each day')}.",
              f"{who} {worked} {d.n(hours)} hours a day, {d.n(days)} days a week.")  # fmt: skip
        week = "a week" in d.text[-1]
        hours = d.add("hours", f"{actor.name} {w.conjugate('work')[actor.form]} @ hours.", hours, "*", days)
        if week:
            d.end(f"How much {actor.does} {who} earn {d.pick('in a week', 'per week', 'each week', 'a week')}?", f"How much money {actor.does} {who} make in one week?")
            d.add("pay", f"{actor.name} {w.conjugate('earn')[actor.form]} $@.", hours, "*", wage)
            return
    else:
        hours = d.number(2, 40)
        if d.chance(0.4):
            d.end(f"How much {actor.does} {who} earn in {d.n(hours)} hours?", f"How much will {who} make in {d.n(hours)} hours?", f"How much money {actor.does} {who} make for {d.n(hours)} hours of work?")
            d.add("pay", f"{actor.name} {w.conjugate('earn')[actor.form]} $@.", hours, "*", wage)
            return
        d.say(f"{who} {worked} {d.n(hours)} hours {d.pick('this week', 'last week', 'in total', 'yesterday') if d.past else 'this week'}.", f"{who} {worked} for {d.n(hours)} hours.")
    total = d.add("pay", f"{actor.name} {w.conjugate('earn')[actor.form]} $@.", hours, "*", wage)
    if d.chance(0.3):
        k = d.number(1, min(total - 1, 100))
        d.say(f"{who} {w.conjugate('spend')[form]} {d.usd(k)}{d.pick(' on food', ' on a gift', '', ' on clothes', ' for rent')}.")
        d.end(f"How much money {does} {who} have left?", f"How much {actor.does} {who} have left?", "How much money is left?")
        d.add("spend", f"Then {actor.name} {actor.has} $@ left.", total, "-", k)
    else:
        d.end(f"How much {does} {who} earn?", f"How much money {does} {who} make?", f"How much {does} {who} earn in total?", f"How much money {does} {who} earn altogether?",
              f"How much {does} {who} get paid?", f"How much money {does} {who} make in total?")  # fmt: skip


# --- products: rows, legs, days, speed -----------------------------------------------------------

PER = (  # a thing, its parts, a number of parts or 0 for any
    ("spider", "legs", 8), ("dog", "legs", 4), ("cat", "legs", 4), ("cow", "legs", 4), ("horse", "legs", 4), ("chicken", "legs", 2), ("bird", "wings", 2), ("ant", "legs", 6),
    ("insect", "legs", 6), ("octopus", "arms", 8), ("car", "wheels", 4), ("bicycle", "wheels", 2), ("tricycle", "wheels", 3), ("table", "legs", 4), ("chair", "legs", 4), ("bike", "wheels", 2),
    ("class", "students", 0), ("room", "windows", 0), ("house", "windows", 0), ("page", "photos", 0), ("shelf", "books", 0), ("row", "seats", 0), ("team", "players", 0), ("table", "chairs", 0),
    ("bus", "students", 0), ("tent", "campers", 0), ("tree", "apples", 0), ("garden", "flowers", 0), ("floor", "rooms", 0), ("shirt", "buttons", 0), ("flower", "petals", 0), ("bush", "roses", 0),
    ("hive", "bees", 0), ("nest", "eggs", 0), ("cake", "candles", 0), ("pizza", "slices", 0), ("van", "people", 0), ("boat", "people", 0), ("vase", "flowers", 0), ("album", "pictures", 0),
    ("book", "pages", 0), ("box", "crayons", 0), ("building", "apartments", 0), ("month", "lessons", 0), ("song", "minutes", 0), ("lesson", "minutes", 0), ("necklace", "beads", 0), ("bracelet", "beads", 0),
    ("train car", "passengers", 0), ("basket", "eggs", 0), ("classroom", "desks", 0), ("train", "wagons", 0), ("hand", "fingers", 5), ("week", "days", 7), ("day", "hours", 24), ("hour", "minutes", 60),
    ("minute", "seconds", 60), ("dozen", "eggs", 12), ("year", "months", 12), ("triangle", "sides", 3), ("square", "sides", 4), ("starfish", "arms", 5), ("pair of shoes", "shoes", 2),
)  # fmt: skip


def _many(one: str) -> str:
    irregular = {"octopus": "octopuses", "shelf": "shelves", "pair of shoes": "pairs of shoes", "starfish": "starfish"}
    return irregular.get(one) or w._plural(one)


@story(7)
def each_has(d: Story) -> None:
    """Each class has so many students: how many in so many classes, and what then."""
    one, parts, fixed = d.of(PER)
    ones = _many(one)
    k = d.number(2, 12) if d.chance(0.8) else d.number(5, 30)
    m = fixed or (d.number(2, 12) if d.chance(0.6) else d.number(5, 40))
    kn, mn, total = d.n(k), d.n(m), k * m
    r = d._rng.random()
    if fixed and r < 0.4 or r < 0.2:
        d.say(f"{article(one)} has {mn} {parts}.", f"Each {one} has {mn} {parts}.", f"There are {mn} {parts} in {article(one)}." if one not in ("spider", "dog", "cat") else f"One {one} has {mn} {parts}.")
        d.end(f"How many {parts} do {kn} {ones} have?", f"How many {parts} are there in {kn} {ones}?", f"How many {parts} do {kn} {ones} have in total?", f"How many {parts} do {kn} {ones} have altogether?")
        d.add("product", f"The {ones} have @ {parts}.", k, "*", m)
        return
    if fixed and r < 0.55 and fixed not in (7, 24, 60):
        d.end(f"How many {parts} do {kn} {ones} have?", f"How many {parts} do {kn} {ones} have in total?", f"How many {parts} are on {kn} {ones}?")
        d.add("product", f"The {ones} have @ {parts}.", k, "*", m)
        return
    if fixed in (7, 24, 60, 12, 2, 3, 5):
        d.end(f"How many {parts} are in {kn} {ones}?", f"How many {parts} are there in {kn} {ones}?", f"{kn} {ones} have how many {parts}?")
        d.add("product", f"The {ones} have @ {parts}.", k, "*", m)
        return
    where = d.pick("a school", "a building", "the hall", "a town", "the park", "a store", "the house", "a hotel", "the library", "a farm")
    r = d._rng.random()
    backward = r > 0.8
    if backward:
        d.say(f"There are {d.n(total)} {parts} in {kn} {ones}.", f"{kn} {ones} have {d.n(total)} {parts} in total.", f"{d.n(total)} {parts} are divided equally among {kn} {ones}.")
        d.end(f"How many {parts} are in each {one}?", f"How many {parts} does each {one} have?", f"If every {one} has the same number, how many {parts} are in each {one}?")
        d.add("quotient", f"Each {one} has @ {parts}.", total, "/", k)
        return
    if r > 0.68:
        d.say(f"There are {d.n(total)} {parts}. Each {one} has {mn} {parts}.", f"Each {one} {d.pick('holds', 'can hold', 'has')} {mn} {parts}. There are {d.n(total)} {parts} in total.")
        d.end(f"How many {ones} are there?", f"How many {ones} are needed?", f"How many {ones} do they need?")
        d.add("count", f"There are @ {ones}.", total, "/", m)
        return
    d.say(f"{where} has {kn} {ones} with {mn} {parts} in each {one}.", f"{where} has {kn} {ones}. Each {one} has {mn} {parts}.", f"There are {kn} {ones}, and each {one} has {mn} {parts}.",
          f"There are {kn} {ones} in {where}. Each {one} has {mn} {parts}.", f"There are {kn} {ones} with {mn} {parts} each.", f"{where} has {kn} {ones}, each with {mn} {parts}.",
          f"There are {mn} {parts} in each of the {kn} {ones}.", f"Each of {kn} {ones} has {mn} {parts}.")  # fmt: skip
    value = d.add("product", f"The {ones} have @ {parts}.", k, "*", m)
    r = d._rng.random()
    if r < 0.6:
        d.end(f"How many {parts} are there in total?", f"How many {parts} are there altogether?", f"How many {parts} are there?", f"How many {parts} are there in all?", f"What is the total number of {parts}?",
              f"How many {parts} are in {where}?" if where in d.text[-1].lower() else f"How many {parts} do the {ones} have?")  # fmt: skip
    elif r < 0.8:
        j = d.number(1, value - 1)
        d.say(f"{d.n(j)} of the {parts} are {d.pick('gone', 'missing', 'broken', 'new', 'old', 'absent', 'taken', 'empty')}.")
        word = d.text[-1][:-1].split()[-1]
        d.end(f"How many {parts} are not {word}?")
        d.add("rest", f"Then @ {parts} are not {word}.", value, "-", j)
    else:
        j = d.number(2, 30)
        d.say(f"{d.pick('Then', 'Later,', 'This year,')} {d.n(j)} more {parts} {d.pick('are added', 'come', 'join')}.")
        d.end(f"How many {parts} are there now?", f"How many {parts} are there then?")
        d.add("plus", f"Then there are @ {parts}.", value, "+", j)


@story(3)
def legs(d: Story) -> None:
    """Two kinds with their numbers of legs or wheels."""
    what, kinds_ = d.pick(
        ("legs", (("cow", 4), ("chicken", 2), ("horse", 4), ("duck", 2), ("dog", 4), ("cat", 4), ("sheep", 4), ("spider", 8), ("bird", 2), ("pig", 4), ("hen", 2), ("goat", 4), ("ant", 6), ("goose", 2), ("rabbit", 4))),
        ("wheels", (("car", 4), ("bike", 2), ("bicycle", 2), ("tricycle", 3), ("motorcycle", 2), ("truck", 6), ("scooter", 2))),
    )  # fmt: skip
    (a, i), (b, j) = d._rng.sample(kinds_, 2)
    if i == j and d.chance(0.7):
        raise ValueError("the same")
    special = {"sheep": "sheep", "goose": "geese"}
    aa, bb = special.get(a) or w._plural(a), special.get(b) or w._plural(b)
    x, y = d.number(2, 20), d.number(2, 20)
    actor = d.actor()
    have = w.conjugate(d.pick("have", "have", "see", "count", "own"))[d.form(actor)]
    d.say(f"{actor.first} {have} {d.n(x)} {aa} and {d.n(y)} {bb}.", f"There are {d.n(x)} {aa} and {d.n(y)} {bb} {'on a farm' if what == 'legs' else 'in a garage'}.",
          f"{'On a farm' if what == 'legs' else 'In a parking lot'} there are {d.n(x)} {aa} and {d.n(y)} {bb}.")  # fmt: skip
    group = "animals" if what == "legs" else "vehicles"
    d.end(f"How many {what} are there in total?", f"How many {what} do the {group} have in total?", f"How many {what} do they have altogether?", f"How many {what} are there altogether?",
          f"How many {what} do all the {group} have?", f"How many {what} are there?", f"What is the total number of {what}?")  # fmt: skip
    p = d.add("product", f"The {aa} have @ {what}.", x, "*", i)
    q = d.add("product", f"The {bb} have @ {what}.", y, "*", j)
    d.add("sum", f"In total there are @ {what}.", p, "+", q)


@story(6)
def rate(d: Story) -> None:
    """So many a day, for so many days; in weeks; the time for a total."""
    actor = d.actor()
    verb, things = d.of(DOINGS)
    form = d.form(actor)
    m, k = (d.number(2, 15), d.number(2, 12)) if d.chance(0.7) else (d.number(5, 40), d.number(2, 20))
    one, many = d.pick(("day", "days"), ("day", "days"), ("day", "days"), ("hour", "hours"), ("week", "weeks"), ("minute", "minutes"), ("month", "months"), ("night", "nights"), ("morning", "mornings"))
    mn, who = d.n(m), d.who(actor)
    a = "an" if one == "hour" else "a"
    verbs = w.conjugate(verb)[form]
    per = d.pick(f"{a} {one}", f"each {one}", f"every {one}", f"per {one}", f"every {one}")
    d.say(f"{actor.first} {verbs} {mn} {things} {per}.", f"{actor.first} {verbs} {mn} {things} {per}.", f"{d.pick('Each', 'Every')} {one} {actor.first} {verbs} {mn} {things}.",
          f"{actor.first} can {verb} {mn} {things} {per}.")  # fmt: skip
    does = actor.does
    r = d._rng.random()
    if r < 0.4:
        kn = f"{d.n(k)} {many}"
        if one in ("day", "night", "morning") and d.chance(0.4):
            j = d.number(1, 6)
            kn = d.pick("a week", "one week") if j == 1 else f"{d.n(j)} weeks"
            k = 7 if j == 1 else d.add("weekdays", f"{j} weeks are @ days.", j, "*", 7)
        elif one == "month" and d.chance(0.3):
            kn, k = "a year", 12
        d.end(f"How many {things} {does} {who} {verb} in {kn}?", f"How many {things} {does} {who} {verb} in {kn}?", f"How many {things} will {who} {verb} in {kn}?", f"How many {things} will {who} {verb} {d.pick('after', 'in')} {kn}?",
              f"How many {things} can {who} {verb} in {kn}?", f"How many {things} will {who} have {w.conjugate(verb)[PAST] if verb not in ('swim', 'write', 'run', 'see', 'ride', 'drive', 'take', 'eat', 'draw', 'do', 'drink') else 'done'} after {kn}?", f"In {kn}, how many {things} {does} {who} {verb}?")  # fmt: skip
        d.add("total", f"In {kn.replace('one week', 'a week')} it is @ {things}." if kn.startswith(("a ", "one w")) or k == 12 else f"In {k} {many if one in ('hour', 'week', 'minute', 'month') else 'days'} it is @ {things}.", k, "*", m)
    elif r < 0.6:
        total = k * m
        d.end(f"How many {many} will it take to {verb} {d.n(total)} {things}?", f"How many {many} {does} {who} need to {verb} {d.n(total)} {things}?", f"How long will it take {actor.him} to {verb} {d.n(total)} {things}?",
              f"In how many {many} will {who} {verb} {d.n(total)} {things}?", f"How many {many} does it take to {verb} {d.n(total)} {things}?")  # fmt: skip
        d.add("time", f"It takes @ {many}.", total, "/", m)
    elif r < 0.75:
        total = k * m + d.size(1, 60)
        goal = d.pick(f"{who} {w.conjugate('want')[form]} to {verb} {d.n(total)} {things}.", f"{cap(actor.his)} goal is {d.n(total)} {things}.")
        if things == "pages":
            goal = f"The book has {d.n(total)} pages."
        d.text.insert(d.pick(0, 1) if things == "pages" and not actor.first.startswith("a ") else 1, cap(goal))
        d.end(f"How many {things} are left after {d.n(k)} {many}?", f"How many {things} are left to {verb} after {d.n(k)} {many}?", f"After {d.n(k)} {many}, how many {things} are left?", f"How many more {things} {does} {who} have to {verb} after {d.n(k)} {many}?")
        s = d.add("total", f"In {k} {many} it is @ {things}.", k, "*", m)
        d.add("left", f"There are @ {things} left.", total, "-", s)
    else:
        other = d.someone()
        j = d.number(1, 15)
        times = d.chance(0.4)
        if times:
            words, j = d.of(w.MULTIPLES)
            d.say(f"{other.name} {w.conjugate(verb)[PAST if d.past else THIRD]} {words} as many {per}.", f"{other.name} {w.conjugate(verb)[PAST if d.past else THIRD]} {words} as many {things}.")
            o = d.add("times", f"For {other.name} it is @ {things}.", m, "*", j)
        else:
            d.say(f"{other.name} {w.conjugate(verb)[PAST if d.past else THIRD]} {d.n(j)} more {per}.", f"{other.name} {w.conjugate(verb)[PAST if d.past else THIRD]} {d.n(j)} more {things} {per}.")
            o = d.add("more", f"For {other.name} it is @ {things}.", m, "+", j)
        d.end(f"How many {things} does {other.name} {verb} in {d.n(k)} {many}?", f"How many {things} will {other.name} {verb} in {d.n(k)} {many}?")
        d.add("total", f"In {k} {many} it is @ {things}.", k, "*", o)


@story(5)
def travel(d: Story) -> None:
    """Speed, time, distance; there and back; the rest of the way."""
    unit, per = d.pick(("miles", "miles per hour"), ("miles", "miles an hour"), ("kilometers", "kilometers per hour"), ("km", "km per hour"), ("km", "km/h"), ("miles", "mph"))
    r = d._rng.random()
    subject = d.pick("a train", "a car", "a bus", "a plane", "a truck", "a boat", "a ship", "a cyclist", "a bike", d.someone().name, d.someone().name, "a runner", "a ferry")
    name = subject.replace("a ", "the ", 1) if subject.startswith("a ") else subject
    it = "it" if subject.startswith("a ") and "cyclist" not in subject and "runner" not in subject else name
    go = d.pick("travel", "drive" if "plane" not in subject and "train" not in subject and "boat" not in subject else "move", "go", "move", "travel", "run" if "train" in subject else "go")
    if r < 0.55:
        speed = d.pick(d.number(2, 20), d.number(1, 12) * 10, d.number(4, 24) * 5)
        hours = d.number(2, 9)
        verb = w.conjugate(go)[PAST if d.past else THIRD]
        d.say(f"{subject} {verb} at {speed} {per}.", f"{subject} {verb} at a speed of {speed} {per}.", f"{subject} {verb} {speed} {unit} {d.pick('an hour', 'in one hour', 'every hour', 'per hour')}.",
              f"The speed of {subject} is {speed} {per}.")  # fmt: skip
        q = d._rng.random()
        if q < 0.55:
            d.end(f"How far does {it} {go} in {d.n(hours)} hours?", f"How many {unit} does {it} {go} in {d.n(hours)} hours?", f"How far will {it} {go} in {d.n(hours)} hours?", f"What distance does {it} cover in {d.n(hours)} hours?",
                  f"How far can {it} {go} in {d.n(hours)} hours?", f"How many {unit} will {it} {go} in {d.n(hours)} hours?", f"How far has {it} gone after {d.n(hours)} hours?")  # fmt: skip
            d.add("distance", f"In {hours} hours it is @ {unit}.", speed, "*", hours)
        elif q < 0.8:
            total = speed * hours
            d.end(f"How long does {it} need for {total} {unit}?", f"How many hours does {it} need to {go} {total} {unit}?", f"How long does it take to {go} {total} {unit}?", f"How many hours will it take to {go} {total} {unit}?")
            d.add("time", "It takes @ hours.", total, "/", speed)
        else:
            total = speed * hours + d.size(2, 100)
            d.say(f"The trip is {total} {unit} long.", f"The distance is {total} {unit}.", f"The whole way is {total} {unit}.")
            d.end(f"How many {unit} are left after {d.n(hours)} hours?", f"How far is it still after {d.n(hours)} hours?")
            s = d.add("distance", f"In {hours} hours it is @ {unit}.", speed, "*", hours)
            d.add("left", f"There are @ {unit} left.", total, "-", s)
    elif r < 0.8:
        actor = d.actor()
        form = d.form(actor)
        a, b = d.number(2, 40), d.number(2, 40)
        verb = d.pick("drive", "walk", "ride", "bike", "run", "travel")
        same = d.chance(0.5)
        days = d.number(2, 6) if d.chance(0.6) else 1
        places = d.pick("work", "school", "the store", "the park", "the gym", "the library")
        if same:
            b = a
            d.say(f"{actor.first} {w.conjugate(verb)[form]} {a} {unit} to {places} and {a} {unit} back{' every day' if days > 1 else ''}.", f"{actor.first} {w.conjugate(verb)[form]} {a} {unit} to {places} and the same way back{' every day' if days > 1 else ''}.",
                  f"{d.pick('Every day ', 'Each day ') if days > 1 else ''}{actor.first} {w.conjugate(verb)[form]} {a} {unit} to {places} and {a} {unit} back home.")  # fmt: skip
        else:
            d.say(f"{actor.first} {w.conjugate(verb)[form]} {a} {unit} to {places} and then {b} {unit} to a friend's house{' every day' if days > 1 else ''}.", f"{d.pick('Every day ', 'Each day ') if days > 1 else ''}{actor.first} {w.conjugate(verb)[form]} {a} {unit} in the morning and {b} {unit} in the evening.")
        s = d.add("sum", f"{'In a day' if days > 1 else 'In total'} it is @ {unit}.", a, "+", b)
        who = d.who(actor)
        if days > 1:
            d.end(f"How many {unit} {actor.does} {who} {verb} in {d.n(days)} days?", f"How far {actor.does} {who} {verb} in {d.n(days)} days?", f"How many {unit} is that in {d.n(days)} days?")
            d.add("total", f"In {days} days it is @ {unit}.", days, "*", s)
        else:
            d.end(f"How many {unit} {actor.does} {who} {verb} in total?", f"How far {actor.does} {who} {verb} altogether?", f"How many {unit} {'did' if d.past else actor.does} {who} {verb} in all?")
    else:
        speed, hours = d.number(3, 80), d.number(2, 9)
        total = speed * hours
        d.say(f"{subject} {w.conjugate(go)[PAST]} {total} {unit} in {d.n(hours)} hours.", f"{subject} {w.conjugate('take')[THIRD]} {d.n(hours)} hours for {total} {unit}.", f"It takes {subject} {d.n(hours)} hours to {go} {total} {unit}.")
        d.end(f"How many {unit} per hour is that?", f"What is the speed in {unit} per hour?", f"How fast does {it} {go}?", f"What is {'its' if it == 'it' else 'the'} average speed?", f"What was the speed of {name}?")
        d.add("speed", f"In one hour it is @ {unit}.", total, "/", hours)


@story(3)
def machine(d: Story) -> None:
    """A machine, a tap, a bakery: so many a minute, and what is there after a time."""
    what, verb, things = d.pick(("a machine", "make", "toys"), ("a printer", "print", "pages"), ("a factory", "make", "cars"), ("a bakery", "bake", "loaves of bread"), ("a machine", "pack", "boxes"),
                                ("a pump", "fill in", "liters"), ("a tap", "fill in", "liters of water"), ("a hen", "lay", "eggs"), ("a shop", "sell", "cups of coffee"), ("a tree", "grow", "apples"),
                                ("a factory", "produce", "bottles"), ("a cow", "give", "liters of milk"), ("a store", "sell", "books"), ("a restaurant", "serve", "meals"), ("a robot", "build", "chairs"),
                                ("a hose", "pour in", "gallons of water"), ("a truck", "carry", "boxes"), ("a dog", "eat", "treats"), ("a plant", "grow", "centimeters"), ("a snail", "crawl", "meters"))  # fmt: skip
    one, many = d.pick(("minute", "minutes"), ("hour", "hours"), ("day", "days"), ("week", "weeks"), ("day", "days"))
    m, k = d.number(2, 20) if d.chance(0.8) else d.number(2, 9) * 10, d.number(2, 12)
    name = what.replace("a ", "the ", 1)
    it = d.pick("it", name)
    per = d.pick(f"{'an' if one == 'hour' else 'a'} {one}", f"each {one}", f"every {one}", f"per {one}")
    verbs = w.conjugate(verb)[THIRD]
    r = d._rng.random()
    if things.startswith(("liters", "gallons")) and "milk" not in things and r < 0.75:
        unit = things.split()[0]
        vessel = d.pick("tank", "pool", "bathtub", "barrel", "pond", "bucket", "aquarium", "water tank")
        whole = m * k + d.size(1, 90)
        d.say(f"a {vessel} holds {whole} {unit} of water.", f"a {vessel} can hold {whole} {unit}.", f"There is room for {whole} {unit} of water in a {vessel}.")
        if r < 0.25:
            whole = m * k
            d.text[-1] = f"A {vessel} holds {whole} {unit} of water."
            d.say(f"It is filled with {d.n(m)} {unit} {per}.", f"{what} fills in {d.n(m)} {unit} {per}.")
            d.end(f"How many {many} does it take to fill it?", f"After how many {many} is it full?", f"How many {many} until the {vessel} is full?", f"How long does it take to fill the {vessel}?")
            d.add("time", f"It takes @ {many}.", whole, "/", m)
            return
        empties = r > 0.55
        if empties:
            d.text[-1] = f"There are {whole} {unit} of water in a {vessel}."
            d.say(f"It loses {d.n(m)} {unit} {per}.", f"{d.n(m)} {unit} leak out {per}.", f"{d.n(m)} {unit} flow out {per}.")
            d.end(f"How many {unit} are left after {d.n(k)} {many}?", f"How much water is left after {d.n(k)} {many}?", f"How many {unit} of water are still in it after {d.n(k)} {many}?")
        else:
            d.say(f"It is filled with {d.n(m)} {unit} {per}.", f"{what} fills in {d.n(m)} {unit} {per}.", f"{d.n(m)} {unit} flow in {per}.")
            d.end(f"How many {unit} are missing after {d.n(k)} {many}?", f"How much water is missing after {d.n(k)} {many}?", f"How many more {unit} are needed to fill it after {d.n(k)} {many}?", f"How much water is still missing after {d.n(k)} {many}?", f"How many {unit} still fit in after {d.n(k)} {many}?")
        s = d.add("total", f"In {k} {many} it is @ {unit}.", k, "*", m)
        d.add("left", f"There are @ {unit} left.", whole, "-", s)
        return
    count, group = 1, what
    if d.chance(0.3):
        count = d.number(2, 9)
        noun = what[2:]
        group = f"{d.n(count)} {w._plural(noun)}"
    d.say(f"{what} {verbs} {d.n(m)} {things} {per}.", f"{what} can {verb} {d.n(m)} {things} {per}.", f"{d.pick('Each', 'Every')} {one} {what} {verbs} {d.n(m)} {things}.")
    if count > 1:
        d.end(f"How many {things} do {group} {verb} in {d.n(k)} {many}?", f"How many {things} can {group} {verb} in {d.n(k)} {many}?")
        s = d.add("all", f"Together it is @ {things} in one {one}.", count, "*", m)
        d.add("total", f"In {k} {many} it is @ {things}.", k, "*", s)
    elif r < 0.35 and things not in ("centimeters", "meters"):
        d.end(f"How many {many} does {it} need for {d.n(m * k)} {things}?", f"How long does it take to {verb} {d.n(m * k)} {things}?", f"How many {many} does it take to {verb} {d.n(m * k)} {things}?")
        d.add("time", f"It takes @ {many}.", m * k, "/", m)
    else:
        d.end(f"How many {things} does {it} {verb} in {d.n(k)} {many}?", f"How many {things} can {it} {verb} in {d.n(k)} {many}?", f"How many {things} will {it} {verb} in {d.n(k)} {many}?")
        d.add("total", f"In {k} {many} it is @ {things}.", k, "*", m)


# --- measures ------------------------------------------------------------------------------------


@story(4)
def ages(d: Story) -> None:
    a = d.someone()
    i = d.chance(0.12)
    if i:
        a = Actor("I", "I", "I", "my", "me", BASE)
    age = d.number(3, 40)
    other = d.someone().name if d.chance(0.45) else f"{a.his if i else d.pick(a.his, a.his, a.owner)} {d.of(w.RELATIONS)}"
    is_ = "am" if i else "is"
    than = a.him if i or d.chance(0.2) else a.name
    d.say(f"{a.name} {is_} {d.n(age)} years old.", f"{a.name} {is_} {d.n(age)}.", f"{a.name} {is_} {d.n(age)} years old.")
    r = d._rng.random()
    if r < 0.2:
        k = d.number(2, 30)
        be = f"{is_} {a.he}"
        if d.chance(0.55):
            d.end(f"How old will {a.he} be in {d.n(k)} years?", f"How old will {a.name} be in {d.n(k)} years?", f"How old will {a.name} be {d.n(k)} years from now?", f"What will be {a.his} age in {d.n(k)} years?")
            d.add("later", f"In {k} years {a.name} will be @ years old.", age, "+", k)
        else:
            k = d.number(1, age - 1)
            were = "was"
            d.end(f"How old {were} {a.he} {d.n(k)} years ago?", f"How old {were} {a.name} {d.n(k)} years ago?", f"What {were} {a.his} age {d.n(k)} years ago?")
            d.add("ago", f"{k} years ago {a.name} was @ years old.", age, "-", k)
        return
    kind = d._rng.random()
    if kind < 0.35:
        k = d.number(1, 30)
        text = f"{d.n(k)} {d.pick('years', 'years') if k > 1 else 'year'} older than {than}"
        step = ("older", age, "+", k)
        ratio = f"{d.n(k)} {'years' if k > 1 else 'year'} older"
    elif kind < 0.6 and age > 4:
        k = d.number(1, age - 2)
        text = f"{d.n(k)} {'years' if k > 1 else 'year'} younger than {than}"
        step = ("younger", age, "-", k)
        ratio = f"{d.n(k)} {'years' if k > 1 else 'year'} younger"
    elif kind < 0.9 or age % 2:
        words, k = d.of(w.MULTIPLES[:11])
        if age * k > 110:
            raise ValueError("too old")
        text = f"{words} as old as {than}"
        step = ("times", age, "*", k)
        ratio = f"{words} as old"
    else:
        text = ratio = f"half as old as {than}"
        step = ("half", age, "/", 2)
    if d.chance(0.2):
        d.text[-1] = f"{d.text[-1][:-1]} and {other} is {ratio if i or d.chance(0.5) else text}."
    else:
        d.say(f"{other} is {text}.", f"{other} is {text}.", f"{other} is {ratio}.")
        if d.chance(0.15):
            d.text.reverse()
    value = d.add(step[0], f"{other} is @ years old.", *step[1:])
    q = d._rng.random()
    if q < 0.55:
        d.end(f"How old is {other}?", f"How old is {other}?", f"What is the age of {other}?")
    elif q < 0.75:
        d.end("What is the sum of their ages?", "How old are they together?", "What is the total of their ages?", "How many years old are they together?")
        d.add("sum", "Together they are @ years old.", age, "+", value)
    else:
        k = d.number(2, 20)
        d.end(f"How old will {other} be in {d.n(k)} years?", f"How old will {other} be {d.n(k)} years from now?")
        d.add("later", f"In {k} years {other} will be @ years old.", value, "+", k)


@story(4)
def time_(d: Story) -> None:
    """Minutes and hours, days and weeks."""
    actor = d.actor()
    form, who = d.form(actor), d.who(actor)
    r = d._rng.random()
    if r < 0.3:
        h, m = d.number(1, 6), d.number(1, 11) * 5
        hours = f"{d.n(h)} {'hour' if h == 1 else 'hours'}"
        what = d.pick("a movie", "a flight", "a concert", "a trip", "a game", "a lesson", "the train ride", "a show", "a meeting", "the drive", "the bus ride")
        d.say(f"{what} {'lasted' if d.past else 'lasts'} {hours} and {d.n(m)} minutes.", f"{what} is {hours} and {d.n(m)} minutes long.", f"{what} takes {hours} and {d.n(m)} minutes.")
        d.end("How many minutes is that?", "How many minutes is that in total?", f"How long is it in minutes?", "How many minutes does it last?", "How many minutes is it long?")
        x = d.add("hours", f"{h} {'hour is' if h == 1 else 'hours are'} @ minutes.", h, "*", 60)
        d.add("sum", "In total it is @ minutes.", x, "+", m)
    elif r < 0.5:
        big, small, k = d.pick(("hour", "minutes", 60), ("day", "hours", 24), ("week", "days", 7), ("minute", "seconds", 60), ("year", "months", 12), ("meter", "centimeters", 100), ("foot", "inches", 12), ("kilometer", "meters", 1000), ("week", "days", 7), ("dollar", "cents", 100), ("kilogram", "grams", 1000), ("yard", "feet", 3))
        bigs = "feet" if big == "foot" else w._plural(big)
        j = d.number(2, 9)
        if d.chance(0.75):
            d.end(f"How many {small} are in {d.n(j)} {bigs}?", f"How many {small} are there in {d.n(j)} {bigs}?", f"How many {small} is {d.n(j)} {bigs}?", f"{d.n(j)} {bigs} are how many {small}?", f"Convert {d.n(j)} {bigs} to {small}.")
            d.add("convert", f"{j} {bigs} are @ {small}.", j, "*", k)
        else:
            d.end(f"How many {bigs} are {j * k} {small}?", f"{j * k} {small} are how many {bigs}?", f"How many {bigs} is {j * k} {small}?")
            d.add("convert", f"{j * k} {small} are @ {bigs}.", j * k, "/", k)
    elif r < 0.8:
        tasks = d._rng.sample(("homework", "piano practice", "math", "reading", "cleaning the room", "dinner", "a shower", "walking the dog", "playing outside", "science", "breakfast", "watching TV", "exercise", "spelling", "art"), d.pick(2, 2, 3))
        values = [d.number(1, 12) * 5 if d.chance(0.8) else d.number(2, 59) for _ in tasks]
        verb = w.conjugate("spend")[form]
        listed = [f"{d.n(v)} minutes on {t}" for v, t in zip(values, tasks)]
        d.say(f"{actor.first} {verb} {', '.join(listed[:-1])} and {listed[-1]}.")
        s = values[0]
        for i, v in enumerate(values[1:], 1):
            s = d.add("sum", "In total it is @ minutes." if i == len(values) - 1 else "So far it is @ minutes.", s, "+", v)
        if d.chance(0.3):
            total = s + d.number(1, 12) * 5
            d.say(f"{who} {w.conjugate('have')[form]} {total} minutes.", f"{who} {w.conjugate('have')[form]} {total} minutes in total.")
            d.end("How many minutes are left?", f"How many minutes {actor.does} {who} have left?", f"How much time is left, in minutes?")
            d.add("left", "There are @ minutes left.", total, "-", s)
        else:
            d.end("How many minutes is that in total?", f"How many minutes {'did' if d.past else actor.does} {who} spend in total?", "How many minutes is that altogether?", f"How much time in minutes {'did' if d.past else actor.does} {who} spend?")
    else:
        m, k = d.number(2, 30), d.number(2, 12)
        job, things = d.pick(("read a page", "pages"), ("bake a cake", "cakes"), ("wash a car", "cars"), ("paint a picture", "pictures"), ("solve a problem", "problems"), ("make a bracelet", "bracelets"), ("fold a shirt", "shirts"), ("fix a bike", "bikes"), ("plant a tree", "trees"), ("write a page", "pages"))
        verb = job.split()[0]
        d.say(f"It takes {actor.name if actor.he not in ('I',) else 'me'} {d.n(m)} minutes to {job}.", f"{actor.first} {w.conjugate('need')[form]} {d.n(m)} minutes to {job}.", f"{actor.first} can {job} in {d.n(m)} minutes.")
        d.end(f"How many minutes {actor.does} {who} need for {d.n(k)} {things}?", f"How long does it take to {verb} {d.n(k)} {things}?", f"How many minutes does it take to {verb} {d.n(k)} {things}?", f"How many minutes will {d.n(k)} {things} take?")
        d.add("total", "It takes @ minutes.", k, "*", m)


@story(4)
def shapes(d: Story) -> None:
    unit = d.pick("meters", "meters", "feet", "cm", "centimeters", "inches", "m", "yards", "units")
    square = {"m": "square meters", "cm": "square centimeters"}.get(unit, f"square {unit}")
    thing = d.pick("garden", "room", "rectangle", "rectangle", "field", "yard", "park", "playground", "floor", "rug", "poster", "table", "picture", "pool", "wall", "lawn")
    r = d._rng.random()
    a, b = d.number(2, 20), d.number(2, 20)
    if d.chance(0.2):
        a, b = d.number(2, 12) * 5, d.number(2, 9)
    if r < 0.62:
        if a < b:
            a, b = b, a
        shape = thing if thing == "rectangle" else d.pick(f"rectangular {thing}", thing, f"rectangular {thing}")
        d.say(f"a {shape} is {d.n(a)} {unit} long and {d.n(b)} {unit} wide.", f"a {shape} has a length of {d.n(a)} {unit} and a width of {d.n(b)} {unit}.", f"a {shape} measures {d.n(a)} {unit} by {d.n(b)} {unit}.",
              f"The length of a {shape} is {d.n(a)} {unit} and its width is {d.n(b)} {unit}.", f"a {shape} is {d.n(b)} {unit} wide and {d.n(a)} {unit} long.")  # fmt: skip
        q = d._rng.random()
        if q < 0.45:
            d.end("What is its area?", "What is the area?", f"What is the area of the {thing}?", f"How many {square} is the {thing}?", f"What is the area in {square}?", "Find the area.", "How big is the area?", f"Find the area of the {thing}.")
            d.add("area", f"The area is @ {square}.", a, "*", b)
        elif q < 0.85:
            fence = d.chance(0.25)
            if fence:
                d.end(f"How many {unit} of fence are needed to go around it?", f"How much fence is needed to go around the {thing}?", f"How long is a fence around the {thing}?")
            else:
                d.end("What is its perimeter?", "What is the perimeter?", f"What is the perimeter of the {thing}?", "Find the perimeter.", f"How long is the way around the {thing}?", f"What is the perimeter in {unit}?")
            s = d.add("sides", f"Length and width are @ {unit}.", a, "+", b)
            d.add("perimeter", f"The perimeter is @ {unit}.", s, "*", 2)
        else:
            price = d.number(2, 9)
            d.say(f"{d.pick('Grass', 'Carpet', 'Paint', 'A tile')} costs {d.usd(price)} per {square.replace('feet', 'foot').rstrip('s')}.")
            d.end(f"How much does it cost to cover the {thing}?", "How much does it cost in total?", f"What is the cost for the whole {thing}?")
            s = d.add("area", f"The area is @ {square}.", a, "*", b)
            d.add("cost", "It costs $@.", s, "*", price)
    elif r < 0.82:
        d.say(f"The side of a square is {d.n(a)} {unit}{d.pick(' long', '')}.", f"a square has sides of {d.n(a)} {unit}.", f"a square has a side length of {d.n(a)} {unit}.", f"Each side of a square is {d.n(a)} {unit}.", f"a square {thing if thing != 'rectangle' else 'garden'} has sides of {d.n(a)} {unit}.")
        if d.chance(0.5):
            d.end("What is its area?", "What is the area?", "What is the area of the square?", "Find the area.")
            d.add("area", f"The area is @ {square}.", a, "*", a)
        else:
            d.end("What is its perimeter?", "What is the perimeter?", "What is the perimeter of the square?", "Find its perimeter.")
            d.add("perimeter", f"The perimeter is @ {unit}.", a, "*", 4)
    elif r < 0.92:
        c = d.number(2, 20)
        d.say(f"The sides of a triangle are {a}, {b} and {c} {unit} long.", f"a triangle has sides of {a} {unit}, {b} {unit} and {c} {unit}.")
        d.end("What is its perimeter?", "What is the perimeter?", "What is the perimeter of the triangle?")
        s = d.add("sides", f"The first two sides are @ {unit}.", a, "+", b)
        d.add("perimeter", f"The perimeter is @ {unit}.", s, "+", c)
    else:
        d.say(f"a rectangle has an area of {a * b} {square} and a length of {a} {unit}.", f"The area of a rectangle is {a * b} {square}. Its length is {a} {unit}.")
        d.end("What is its width?", "How wide is it?", "What is the width?")
        d.add("width", f"The width is @ {unit}.", a * b, "/", a)


@story(3)
def level(d: Story) -> None:
    """A temperature, a height, a score that goes up and down."""
    kind = d.pick("temperature", "floor", "tank", "plant", "score", "weight", "rope", "battery")
    value = d.size(10, 100)
    past_ = d.past
    steps = d.pick(1, 1, 2, 2, 3)
    subject, unit, ups, downs, ask = {
        "temperature": ("The temperature", "degrees", ("rose by", "went up", "increased by", "rose"), ("fell by", "dropped", "went down", "dropped by"), ("What is the temperature now?", "What was the temperature then?", "What is the temperature in the end?")),
        "floor": ("An elevator", "floor", ("went up",), ("went down",), ("On which floor is it now?", "What floor is it on now?")),
        "tank": ("A tank", "liters", ("was filled with", "got"), ("lost", "leaked"), ("How many liters are in it now?", "How much water is in the tank now?", "How many liters of water does it hold now?")),
        "plant": ("A plant", "cm", ("grew", "grew another", "grew by"), ("lost", "was cut by"), ("How tall is it now?", "How tall is the plant now?", "What is its height now?")),
        "score": ("A player", "points", ("won", "gained", "scored", "got"), ("lost",), ("How many points does the player have now?", "What is the score now?", "How many points are there in the end?")),
        "weight": ("A dog", "pounds", ("gained",), ("lost",), ("How much does it weigh now?", "How many pounds does the dog weigh now?", "What is its weight now?")),
        "rope": ("A rope", "meters", ("was extended by",), ("was shortened by", "was cut by"), ("How long is it now?", "How long is the rope now?", "What is the length of the rope now?")),
        "battery": ("A phone battery", "percent", ("gained", "was charged by"), ("lost", "used"), ("How many percent are left?", "What is the charge now?")),
    }[kind]  # fmt: skip
    opening = {
        "temperature": d.pick("{s} was {n} degrees in the morning.", "{s} was {n} degrees.", "In the morning the temperature was {n} degrees.", "At noon the temperature was {n} degrees."),
        "floor": "{s} was on floor {n}.", "tank": d.pick("{s} had {n} liters of water.", "{s} contained {n} liters of water."),
        "plant": d.pick("{s} was {n} cm tall.", "{s} had a height of {n} cm."), "score": d.pick("{s} had {n} points.", "{s} started with {n} points."),
        "weight": "{s} weighed {n} pounds.", "rope": "{s} was {n} meters long.", "battery": "{s} was at {n} percent.",
    }[kind]  # fmt: skip
    d.say(opening.format(s=subject, n=value))
    it = "it"
    for i in range(steps):
        if value > 3 and d.chance(0.5):
            k = d.number(1, value - 1) if d.chance(0.4) else d.number(1, min(value - 1, 15))
            verb, op = d.of(downs), "-"
        else:
            k, op = d.number(1, 30), "+"
            verb = d.of(ups)
        things = {"floor": "floors", "temperature": "degrees"}.get(kind, unit)
        if k == 1:
            things = things.rstrip("s") if kind in ("floor", "temperature", "score", "weight", "tank", "rope") else things
        event = f"{it if d.chance(0.7) else subject.lower().replace('a ', 'the ', 1).replace('an ', 'the ', 1)} {verb} {d.n(k)} {things}"
        when = d.pick("", "Then ", "Later ", "In the evening ", "After that, ", "The next day ", "By noon ")
        if i and d.chance(0.5):
            d.text[-1] = f"{d.text[-1][:-1]}{d.pick(' and then', ' and', ', then', ', but then')} {event}."
        else:
            d.text.append(cap(f"{when}{event}."))
        value = d.add("up" if op == "+" else "down", f"Then it is @ {'' if kind == 'floor' else unit}.".replace(" .", ".") if kind != "floor" else "Then it is on floor @.", value, op, k)
    d.end(*ask)


@story(3)
def needed(d: Story) -> None:
    """Recipes and supplies: so many for each, for so many; how many more."""
    actor = d.actor()
    who, form = d.who(actor), d.form(actor)
    what, ing = d.pick(("cake", "eggs"), ("cake", "cups of flour"), ("pie", "apples"), ("batch of cookies", "cups of sugar"), ("pizza", "tomatoes"), ("sandwich", "slices of bread"), ("salad", "tomatoes"),
                       ("glass of lemonade", "lemons"), ("smoothie", "bananas"), ("dress", "meters of cloth"), ("table", "boards"), ("bracelet", "beads"), ("goody bag", "candies"), ("pot of soup", "carrots"),
                       ("birdhouse", "nails"), ("bouquet", "flowers"), ("omelet", "eggs"), ("toy car", "wheels"), ("pancake breakfast", "eggs"), ("child", "pencils"), ("student", "sheets of paper"), ("guest", "cupcakes"))  # fmt: skip
    whats = {"batch of cookies": "batches of cookies", "glass of lemonade": "glasses of lemonade", "pot of soup": "pots of soup", "child": "children"}.get(what) or w._plural(what)
    m, k = d.number(2, 12), d.number(2, 12)
    mn, kn = d.n(m), d.n(k)
    person = what in ("child", "student", "guest")
    if person:
        if d.chance(0.5):
            k = d.number(5, 30)
            kn = d.n(k)
        d.say(f"Each {what} needs {mn} {ing}.", f"{actor.first} {w.conjugate('give')[form]} {mn} {ing} to each {what}.", f"Every {what} gets {mn} {ing}.")
        d.say(f"There are {kn} {whats}.")
    else:
        d.say(f"{article(what)} needs {mn} {ing}.", f"{actor.first} {w.conjugate('need')[form]} {mn} {ing} for one {what}.", f"Each {what} needs {mn} {ing}.", f"It takes {mn} {ing} to make {article(what)}.", f"{actor.first} {w.conjugate('use')[form]} {mn} {ing} for each {what}.", f"{article(what)} takes {mn} {ing}.")
        if d.chance(0.5):
            d.say(f"{actor.first if actor.first not in d.text[0].lower() and actor.first not in d.text[0] else who} {w.conjugate('make')[form]} {kn} {whats}.", f"{actor.name} {w.conjugate('want')[form]} to make {kn} {whats}.")
    told = len(d.text) == 2
    total = d.add("product", f"For {k} {whats} it is @ {ing}.", k, "*", m)
    r = d._rng.random()
    if r < 0.45:
        d.end(f"How many {ing} are needed?" if told else f"How many {ing} are needed for {kn} {whats}?", f"How many {ing} {actor.does} {actor.name} need?" if told else f"How many {ing} {actor.does} {actor.name} need for {kn} {whats}?",
              f"How many {ing} are needed in total?" if told else f"How many {ing} are needed to make {kn} {whats}?" if not person else f"How many {ing} are needed for {kn} {whats}?")  # fmt: skip
    else:
        if not told:
            d.say(f"{actor.name} {w.conjugate('want')[form]} to make {kn} {whats}.")
        if r < 0.75:
            have = d.number(1, total - 1)
            d.say(f"{actor.name} {w.conjugate('have')[form]} {d.n(have)} {ing}.", f"{actor.name} already {w.conjugate('have')[form]} {d.n(have)} {ing}.")
            d.end(f"How many more {ing} {actor.does} {who} need?", f"How many more {ing} are needed?", f"How many {ing} are missing?")
            d.add("goal", f"{actor.name} still {'needs' if actor.form == THIRD else 'need'} @ {ing}.", total, "-", have)
        else:
            have = total + d.number(1, 40)
            d.say(f"{actor.name} {w.conjugate('have')[form]} {d.n(have)} {ing}.")
            d.end(f"How many {ing} are left?", f"How many {ing} {actor.does} {who} have left?", f"How many {ing} will be left?")
            d.add("left", f"Then {actor.name} {actor.has} @ {ing} left.", have, "-", total)


@story(2.5)
def unknown_start(d: Story) -> None:
    """Some apples, an event, and what there is then: how many at first?"""
    actor = d.actor()
    form, who = d.form(actor), d.who(actor)
    money = d.chance(0.3)
    x = d.noun()
    many = x.many
    end = d.size(1, 80)
    k = d.number(1, 40)
    had = w.conjugate("have")[form]
    amount = (lambda v: d.usd(v)) if money else (lambda v: f"{d.n(v)} {many if v != 1 else x.one}")
    start_ = "some money" if money else f"some {many}"
    does = "did" if d.past else actor.does
    now = d.pick(f"Now {actor.he} {actor.has} {amount(end)}{d.pick('', ' left')}.", f"{cap(actor.he)} {'had' if d.past else actor.has} {amount(end)} left.", f"Now {actor.he} {actor.has} {amount(end)}.")
    if d.chance(0.6):
        phrase = w.conjugate(d.pick(f"spend {amount(k)}", f"spend {amount(k)} on lunch", f"give {amount(k)} to {d.relative(actor)}") if money else d.pick(f"give {amount(k)} to {d.relative(actor)}", f"lose {amount(k)}", f"sell {amount(k)}", f"give away {amount(k)}", f"use {amount(k)}", f"eat {amount(k)}" if x.food else f"break {amount(k)}"))[form]
        op = "+"
    else:
        phrase = w.conjugate(d.pick(f"earn {amount(k)}", f"get {amount(k)} from {d.relative(actor)}", f"find {amount(k)}") if money else d.pick(f"buy {d.n(k)} more", f"find {d.n(k)} more {many}", f"get {amount(k)} from {d.relative(actor)}", f"buy {d.n(k)} more {many}"))[form]
        end += k
        now = f"Now {actor.he} {actor.has} {amount(end)}."
        op = "-"
    link = d.pick(f"{cap(actor.first)} {had} {start_}. {cap(actor.he)} {phrase}. {now}", f"{cap(actor.first)} {had} {start_}. {cap(actor.he)} {phrase} and now {actor.he} {actor.has} {amount(end)}.",
                  f"{cap(actor.first)} {had} {start_} and {phrase}. {now}", f"After {actor.first} {phrase}, {actor.he} {had} {amount(end)}{' left' if op == '+' else ''}.")  # fmt: skip
    d.text.append(link)
    q = "How much money" if money else f"How many {many}"
    d.end(f"{q} {does} {who} have at first?", f"{q} {does} {who} have at the start?", f"{q} did {who} have in the beginning?", f"{q} did {who} have before?", f"{q} did {who} start with?", f"{q} did {who} have at first?")
    d.add("before", f"At first it was $@." if money else f"At first it was @ {many}.", end, op, k)


@story(2.5)
def transfer(d: Story) -> None:
    """Two people; one gives some to the other."""
    a, b, x = d.someone(), d.someone(), d.noun()
    many = x.many
    p, q = d.size(5, 80), d.size(2, 80)
    k = d.number(1, min(p - 1, 25))
    give = "gave" if d.past else "gives"
    has = "had" if d.past else "has"
    d.say(f"{a.name} {has} {d.n(p)} {many} and {b.name} {has} {d.n(q)}.", f"{a.name} {has} {d.n(p)} {many} and {b.name} {has} {d.n(q)} {many}.", f"{a.name} {has} {d.n(p)} {many}. {b.name} {has} {d.n(q)} {many}.")
    d.say(f"{a.name} {give} {d.n(k)} of them to {b.name}.", f"{a.name} {give} {b.name} {d.n(k)} {many if k > 1 else x.one}.", f"{a.name} {give} {d.n(k)} {many if k > 1 else x.one} to {b.name}.", f"Then {a.name} {give} {b.name} {d.n(k)}.")
    r = d._rng.random()
    if r < 0.4:
        d.end(f"How many {many} does {b.name} have now?", f"How many does {b.name} have now?", f"How many {many} does {b.name} have then?")
        d.add("gain", f"Then {b.name} has @ {many}.", q, "+", k)
    elif r < 0.7:
        d.end(f"How many {many} does {a.name} have now?", f"How many {many} does {a.name} have left?")
        d.add("loss", f"Then {a.name} has @ {many} left.", p, "-", k)
    else:
        u = d.add("loss", f"Then {a.name} has @ {many} left.", p, "-", k)
        v = d.add("gain", f"Then {b.name} has @ {many}.", q, "+", k)
        if u == v:
            raise ValueError("the same")
        hi, lo, c, e = (u, v, a, b) if u > v else (v, u, b, a)
        d.end(f"How many more {many} does {c.name} have than {e.name} now?", f"How many more {many} does {c.name} now have than {e.name}?")
        d.add("diff", f"{c.name} has @ more {many}.", hi, "-", lo)


@story(2.5)
def together(d: Story) -> None:
    """Two people's things put together, then used, packed or shared."""
    a, b, x = d.someone(), d.someone(), d.noun()
    verb = w.conjugate(d.pick("have", "have", "pick", "collect", "find", "bake", "make", "buy", "get") if x.food else d.pick("have", "have", "collect", "find", "make", "buy"))
    v = verb[PAST if d.past else THIRD]
    p, many = d.size(2, 60), x.many
    d.text.append(f"{a.name} {v} {d.n(p)} {many}.")
    if d.chance(0.5):
        q = d.size(2, 60)
        d.text[0] = d.pick(f"{a.name} {v} {d.n(p)} {many} and {b.name} {v} {d.n(q)}.", f"{a.name} {v} {d.n(p)} {many} and {b.name} {v} {d.n(q)} {many}.", f"{a.name} {v} {d.n(p)} {many}. {b.name} {v} {d.n(q)}.")
    else:
        q = relate(d, x, b.name, p, a.name, v)
    total = d.add("both", f"Together they have @ {many}.", p, "+", q)
    they = Actor("they", "they", "they", "their", "them", BASE)
    r = d._rng.random()
    if r < 0.4:
        k = d.number(1, total - 1)
        phrase = w.conjugate(d.pick("eat {a}" if x.food else "lose {a}", "give away {a}", "sell {a}", "use {a}"))[d.form(they)]
        d.say(f"{d.pick('Together they', 'They', 'Then they')} {phrase.format(a=some(d, k, x))}.")
        ask_left(d, they, many)
        d.add("loss", f"Then they have @ {many} left.", total, "-", k)
    else:
        (shared if r < 0.6 else boxed if r < 0.8 else wanted if r < 0.9 else sold)(d, they, x, total)


# --- without a story -----------------------------------------------------------------------------


@story(4)
def drill(d: Story) -> None:
    """Plain arithmetic in words and signs."""
    r = d._rng.random()
    if r < 0.3:
        a, b, op, text = d.size(2, 300), d.size(2, 300), "+", d.pick("{a} + {b}", "{a} plus {b}", "the sum of {a} and {b}", "{a} + {b}", "{a}+{b}")
    elif r < 0.55:
        a = d.size(5, 400)
        b, op, text = d.number(1, a), "-", d.pick("{a} - {b}", "{a} minus {b}", "the difference between {a} and {b}", "{a} - {b}", "{a}-{b}")
    elif r < 0.75:
        a, b, op, text = d.number(2, 25), d.number(2, 12), "*", d.pick("{a} * {b}", "{a} times {b}", "the product of {a} and {b}", "{a} x {b}", "{a} multiplied by {b}", "{a}*{b}")
    elif r < 0.9:
        b, k = d.number(2, 12), d.number(2, 25)
        a, op, text = b * k, "/", d.pick("{a} / {b}", "{a} divided by {b}", "{a} / {b}")
    else:
        words, divisor, parts = d.of(w.FRACTIONS)
        a = divisor * d.number(1, 30)
        link = d.pick(f"What is {words} of {a}?", f"How much is {words} of {a}?", f"Find {words} of {a}.", f"Calculate {words} of {a}.")
        d.end(link)
        k = d.add("share", "One part is @." if parts > 1 else "The result is @.", a, "/", divisor)
        if parts > 1:
            d.add("parts", "The result is @.", k, "*", parts)
        return
    expression = text.format(a=a, b=b)
    if d.chance(0.2) and " " in expression and expression[0].isdigit():
        value = d.add(op, "First it is @.", a, op, b)
        k = d.number(1, min(60, max(1, value)))
        op2, sign = d.pick(("+", d.pick("+", "plus")), ("-", d.pick("-", "minus")))
        if op in "+-" or text[4] in "*/x":
            d.end(f"What is {expression} {sign} {k}?", f"Calculate {expression} {sign} {k}.")
            d.add(op2, "The result is @.", value, op2, k)
            return
        raise ValueError("unclear")
    d.end(f"What is {expression}?", f"What is {expression}?", f"How much is {expression}?", f"Calculate {expression}.", f"What does {expression} equal?", f"Compute {expression}.", f"{expression} = ?", f"Find {expression}.")
    d.add(op, "The result is @.", a, op, b)


# --- more ways to meet the same arithmetic -------------------------------------------------------


@story(4)
def capacity(d: Story) -> None:
    """So many for each van, table, team: how many are needed."""
    who = d.pick("kids", "students", "people", "children", "players", "campers", "guests", "girls", "boys", "passengers", "scouts", "soldiers", "friends", "workers", "members", "tourists", "fans", "hikers")
    k, m = d.number(2, 15), d.number(2, 12)
    if d.chance(0.2):
        m = d.pick(15, 20, 25, 30, 40, 50)
    total = k * m
    r = d._rng.random()
    if r < 0.5:
        one, verb = d.pick(("van", "take"), ("bus", "carry"), ("car", "hold"), ("table", "seat"), ("boat", "carry"), ("tent", "hold"), ("cabin", "hold"), ("bench", "seat"), ("room", "hold"), ("taxi", "take"), ("elevator", "carry"),
                           ("minivan", "fit"), ("raft", "take"), ("canoe", "hold"), ("row", "seat"), ("train car", "carry"))  # fmt: skip
        ones = _many(one)
        d.say(f"There are {d.n(total)} {who} {d.pick('going on a trip', 'at a party', 'at a camp', 'in a club', 'waiting', 'on a field trip', 'at the school', '')}".rstrip() + ".", f"{d.n(total)} {who} {d.pick('want to go', 'are going', 'go')} {d.pick('to the zoo', 'on a trip', 'to the museum', 'camping', 'to a game', 'to the beach')}.",
              f"A school takes {d.n(total)} {who} {d.pick('on a trip', 'to the zoo', 'to the museum')}.")  # fmt: skip
        d.say(f"Each {one} can {verb} {d.n(m)} {who}.", f"Each {one} {w.conjugate(verb)[THIRD]} {d.n(m)} {who}.", f"{d.n(m)} {who} fit in one {one}.", f"Each {one} can {verb} {d.n(m)}.", f"Every {one} has {d.pick('room', 'space')} for {d.n(m)} {who}.")
        if d.chance(0.2):
            d.text.reverse()
        d.end(f"How many {ones} are needed?", f"How many {ones} do they need?", f"How many {ones} are needed for all the {who}?", f"How many {ones} will they need?", f"How many {ones} are necessary?")
        d.add("count", f"They need @ {ones}.", total, "/", m)
    else:
        group = d.pick("groups", "teams", "groups", "teams", "pairs", "rows", "lines")
        if group == "pairs":
            m, total = 2, 2 * k
        head = d.pick(f"A class of {d.n(total)} {who}", f"{cap(d.n(total))} {who}", f"A group of {d.n(total)} {who}", f"The {d.n(total)} {who} of a class", f"There are {d.n(total)} {who}. They")
        be = "are" if head.endswith(who) and not head.startswith("A ") or head.endswith("They") or head.startswith("The ") else "is"
        if head.startswith("The "):
            be = "are"
        verb = d.pick("divided", "split", "put", "separated", "arranged")
        one = group[:-1]
        if d.chance(0.55) or group == "pairs":
            size = f"into {group} of {d.n(m)}" if group != "pairs" else "into pairs"
            d.text.append(cap(f"{head} {be} {verb} {size}."))
            d.end(f"How many {group} are there?", f"How many {group} {'will there be' if d.chance(0.5) else 'are there'}?", f"How many {group} can they make?", f"How many {group} are there in total?", f"What is the number of {group}?")
            d.add("count", f"There are @ {group}.", total, "/", m)
        else:
            d.text.append(cap(f"{head} {be} {verb} {d.pick('equally ', 'evenly ', '')}into {d.n(m)} {d.pick('equal ', '')}{group}."))
            d.end(f"How many {who} are in each {one}?", f"How many {who} are there in each {one}?", f"How many {who} does each {one} have?", f"How many {who} will be in one {one}?")
            d.add("inbox", f"Each {one} has @ {who}.", total, "/", m)


@story(4)
def pieces(d: Story) -> None:
    """Cut into equal pieces: their number, their length, what is left of them."""
    actor = d.actor()
    form, who = d.form(actor), d.who(actor)
    k, m = d.number(2, 12), d.number(2, 12)
    if d.chance(0.45):
        thing, unit = d.pick(("rope", "feet"), ("ribbon", "inches"), ("string", "cm"), ("board", "feet"), ("rope", "meters"), ("wire", "meters"), ("stick", "inches"), ("log", "feet"), ("piece of cloth", "meters"), ("pipe", "feet"), ("ribbon", "centimeters"), ("wooden plank", "feet"))
        total = k * m
        d.say(f"a {thing} is {d.n(total)} {unit} long.", f"{actor.first} {w.conjugate('have')[form]} a {thing} that is {d.n(total)} {unit} long.", f"{actor.first} {w.conjugate('have')[form]} {d.n(total)} {unit} of {thing}." if thing in ("rope", "ribbon", "string", "wire") else f"a {thing} has a length of {d.n(total)} {unit}.")
        cut = d.pick("It is cut", f"{cap(who)} {w.conjugate('cut')[form]} it") if actor.name in d.text[0] or cap(actor.first) in d.text[0] else "It is cut"
        if d.chance(0.55):
            d.say(f"{cut} into {d.n(k)} {d.pick('equal pieces', 'pieces of the same length', 'equal parts')}.")
            d.end("How long is each piece?", f"How many {unit} long is each piece?", "What is the length of each piece?", "How long is one piece?", f"How many {unit} is each piece?")
            d.add("unit", f"Each piece is @ {unit} long.", total, "/", k)
        else:
            d.say(f"{cut} into pieces of {d.n(m)} {unit}.", f"{cut} into pieces that are {d.n(m)} {unit} long.", f"{cut} into pieces of {d.n(m)} {unit} each.")
            d.end("How many pieces are there?", f"How many pieces {'does' if 'It is' in cut or actor.form == THIRD else 'do'} {'it make' if 'It is' in cut else who + ' get'}?", "How many pieces are there in total?")
            d.add("count", f"There are @ pieces.", total, "/", m)
        return
    thing, piece = d.pick(("pizza", "slices"), ("cake", "pieces"), ("pie", "slices"), ("board", "pieces"), ("apple", "slices"), ("sandwich", "pieces"), ("watermelon", "slices"), ("orange", "wedges"), ("loaf of bread", "slices"), ("chocolate bar", "pieces"), ("log", "pieces"), ("pizza", "slices"), ("ribbon", "pieces"))
    things = {"loaf of bread": "loaves of bread"}.get(thing) or w._plural(thing)
    verb = d.pick("buy", "have", "order", "make", "get", "have")
    d.say(f"{actor.first} {w.conjugate(verb)[form]} {d.n(k)} {things}.", f"There {'were' if d.past else 'are'} {d.n(k)} {things}.")
    d.say(f"Each {thing} {'was' if d.past else 'is'} cut into {d.n(m)} {piece}.", f"{cap(who) if cap(actor.first) in d.text[0] else 'They'} {w.conjugate('cut')[form if cap(actor.first) in d.text[0] else (PAST if d.past else BASE)]} each {thing} into {d.n(m)} {piece}.", f"Each {thing} {d.pick('had', 'has') if d.past else 'has'} {d.n(m)} {piece}.", f"Every {thing} {'was' if d.past else 'is'} cut in {d.n(m)} {piece}.")
    if d.chance(0.35):
        d.text = [f"{d.text[0][:-1]} and {d.text[1][0].lower() if not d.text[1].startswith(('I ', actor.name)) else d.text[1][0]}{d.text[1][1:]}"]
    total = d.add("product", f"There are @ {piece}.", k, "*", m)
    if d.chance(0.65):
        j = d.number(1, total - 1)
        people = d.pick("the family", "the children", "the kids", "the guests", "we", "they", "their friends", "everyone", d.relative(actor))
        verb = d.pick("eat", "eat", "use", "take") if thing not in ("board", "log", "ribbon") else d.pick("use", "sell", "lose")
        subject = people if thing not in ("board", "log", "ribbon") else who if cap(actor.first) in d.text[0] else "they"
        many = subject in ("the children", "the kids", "the guests", "we", "they", "their friends") or (subject == who and actor.form == BASE)
        d.say(f"{subject} {w.conjugate(verb)[PAST if d.past else BASE if many else THIRD]} {some(d, j, Noun(piece[:-1], piece))}.")
        d.end(f"How many {piece} are left?", f"How many {piece} {'were' if d.past else 'are'} left?", f"How many {piece} remain?", "How many are left?", f"How many {piece} are left over?", f"How many {piece} are still there?")
        d.add("loss", f"There are @ {piece} left.", total, "-", j)
    elif d.chance(0.4) and (j := d.divisor(total)):
        d.say(f"{d.n(j)} {d.pick('friends', 'children', 'people', 'kids')} share them equally.")
        d.end(f"How many {piece} does each get?", f"How many {piece} does each of them get?", f"How many {piece} does each one get?")
        d.add("shared", f"Each one gets @ {piece}.", total, "/", j)
    else:
        d.end(f"How many {piece} are there?", f"How many {piece} are there in total?", f"How many {piece} are there altogether?")


@story(3)
def three_factors(d: Story) -> None:
    """So many cats, each eats so much a day, for so many days."""
    one, verb, things = d.pick(("cat", "eat", "cans of food"), ("dog", "eat", "cups of food"), ("horse", "eat", "carrots"), ("hen", "lay", "eggs"), ("worker", "make", "toys"), ("child", "drink", "glasses of milk"), ("rabbit", "eat", "carrots"), ("student", "read", "pages"), ("monkey", "eat", "bananas"),
                               ("cow", "give", "liters of milk"), ("baker", "bake", "cakes"), ("player", "score", "points"), ("friend", "collect", "shells"), ("machine", "make", "parts"), ("fish", "eat", "flakes"), ("bird", "eat", "worms"), ("student", "solve", "problems"), ("truck", "carry", "boxes"), ("bee", "visit", "flowers"))  # fmt: skip
    ones = {"child": "children", "fish": "fish"}.get(one) or w._plural(one)
    k, m, j = d.number(2, 10), d.number(2, 8), d.number(2, 10)
    unit, units = d.pick(("day", "days"), ("day", "days"), ("day", "days"), ("week", "weeks"), ("hour", "hours"))
    a = "an" if unit == "hour" else "a"
    verbs = w.conjugate(verb)[THIRD]
    actor = d.actor()
    have = w.conjugate(d.pick("have", "own", "have", "take care of"))[actor.form]
    per = d.pick(f"{a} {unit}", f"each {unit}", f"every {unit}", f"per {unit}")
    d.say(f"{actor.first} {have} {d.n(k)} {ones}. Each {one} {verbs} {d.n(m)} {things} {per}.", f"There are {d.n(k)} {ones}. Each {one} {verbs} {d.n(m)} {things} {per}.", f"{actor.first} {have} {d.n(k)} {ones}. Each of them {verbs} {d.n(m)} {things} {per}.", f"{d.n(k)} {ones} each {verb} {d.n(m)} {things} {per}.", f"Each of {d.n(k)} {ones} {verbs} {d.n(m)} {things} {per}.", f"A {one} {verbs} {d.n(m)} {things} {per}. There are {d.n(k)} {ones}.")
    span = f"{d.n(j)} {units}"
    if unit == "day" and d.chance(0.3):
        span, j = d.pick("a week", "one week"), 7
    x = d.add("all", f"Together it is @ {things} in one {unit}.", k, "*", m)
    if d.chance(0.2):
        d.end(f"How many {things} do they {verb} {per}?", f"How many {things} do the {ones} {verb} {per}?", f"How many {things} do they {verb} in one {unit}?")
        return
    d.end(f"How many {things} do the {ones} {verb} in {span}?", f"How many {things} do they {verb} in {span}?", f"How many {things} do all the {ones} {verb} in {span}?", f"How many {things} will they {verb} in {span}?", f"How many {things} is that in {span}?")
    d.add("total", f"In {'a week' if 'week' in span and unit == 'day' else f'{j} {units}'} it is @ {things}.", x, "*", j)


@story(4)
def two_kinds(d: Story) -> None:
    """So many monkeys and twice as many parrots."""
    where, bank, group = d.pick(
        ("In a zoo", ("monkeys", "parrots", "lions", "tigers", "snakes", "penguins", "bears", "zebras", "elephants", "giraffes"), "animals"), ("On a farm", ("cows", "sheep", "hens", "goats", "pigs", "horses", "ducks", "rabbits"), "animals"),
        ("In a garden", ("roses", "tulips", "daisies", "lilies", "sunflowers", "violets"), "flowers"), ("In a basket", ("apples", "oranges", "pears", "bananas", "lemons", "peaches", "plums"), "pieces of fruit"),
        ("In a class", ("girls", "boys"), "students"), ("In a parking lot", ("cars", "trucks", "vans", "motorcycles", "bikes"), "vehicles"), ("In a box", ("red balls", "blue balls", "green balls", "yellow balls"), "balls"),
        ("In a bag", ("red marbles", "blue marbles", "white marbles", "green marbles"), "marbles"), ("In a pet store", ("cats", "dogs", "birds", "fish", "hamsters", "rabbits"), "animals"), ("In a bakery", ("muffins", "cookies", "cakes", "pies", "rolls", "donuts"), "things"),
        ("In a library", ("novels", "comics", "picture books", "magazines"), "books"), ("In a room", ("chairs", "tables", "lamps", "desks"), "pieces of furniture"), ("On a plate", ("cookies", "brownies", "muffins", "cupcakes"), "treats"), ("In a drawer", ("spoons", "forks", "knives"), "pieces"),
    )  # fmt: skip
    a, b = d.two(bank)
    value = d.size(2, 60)
    be = "were" if d.past else "are"
    has = f"{where} there {be}"
    if d.chance(0.3):
        place_ = where.split(" ", 1)[1]
        has = f"{cap(place_)} {'had' if d.past else 'has'}"
    elif d.chance(0.3):
        actor = d.actor()
        has = f"{cap(actor.first)} {w.conjugate(d.pick('have', 'see', 'count', 'buy'))[d.form(actor)]}"
    first = f"{d.n(value)} {a}"
    r = d._rng.random()
    if r < 0.45:
        words, k = d.of(w.MULTIPLES)
        relation, step = (f"{words} as many {b}", f"{words} as many {b} as {a}"), ("times", value, "*", k)
    elif r < 0.7:
        k = d.size(1, 40)
        relation, step = (f"{d.n(k)} more {b} than {a}", f"{d.n(k)} more {b} than {a}"), ("more", value, "+", k)
    elif r < 0.9 and value > 2:
        k = d.number(1, value - 1)
        word = d.pick("fewer", "less")
        relation, step = (f"{d.n(k)} {word} {b} than {a}", f"{d.n(k)} {word} {b} than {a}"), ("fewer", value, "-", k)
    elif value % 2 == 0:
        relation, step = (f"half as many {b}", f"half as many {b} as {a}"), ("half", value, "/", 2)
    else:
        raise ValueError("no half")
    if d.chance(0.5):
        d.text.append(f"{has} {first} and {relation[d.pick(0, 1)]}.")
    elif d.chance(0.25):
        d.text.append(f"{has} {relation[1]}. There {be} {first}.")
    else:
        d.text.append(f"{has} {first}. There {be} {relation[1]}.")
    other = d.add(step[0], f"There are @ {b}.", *step[1:])
    if d.chance(0.4):
        d.end(f"How many {b} are there?", f"How many {b} {be} there?")
        return
    d.end(f"How many {a} and {b} are there in total?", f"How many {group} are there in total?", f"How many {group} {be} there altogether?", f"How many {a} and {b} are there altogether?", f"How many {group} are there?", f"What is the total number of {group}?", f"How many {group} are there in all?")
    d.add("sum", f"In total there are @ {group}.", value, "+", other)


@story(2.5)
def packed_before(d: Story) -> None:
    """So many full boxes and some over: how many before."""
    actor, x, box = d.actor(), d.noun(), d.of(w.CONTAINERS)
    k, m, over = d.number(2, 12), d.number(2, 12), d.number(1, 15)
    form, who, many = d.form(actor), d.who(actor), x.many
    c = f"{d.n(k)} {box.many}"
    left = d.pick(f"{w.conjugate('have')[form]} {d.n(over)} left", f"{w.conjugate('have')[form]} {d.n(over)} {many if over > 1 else x.one} left over", f"still {w.conjugate('have')[form]} {d.n(over)} {many if over > 1 else x.one}", f"{w.conjugate('have')[form]} {d.n(over)} more")
    d.say(f"{actor.first} {w.conjugate(d.pick('fill', 'make', 'pack'))[form]} {c} with {d.n(m)} {many} each and {left}.", f"{actor.first} {w.conjugate('put')[form]} {d.n(m)} {many} in each of {c} and {left}.", f"Each {box.one} holds {d.n(m)} {many}. {cap(actor.first)} {w.conjugate('fill')[form]} {c} and {left}.",
          f"Each {box.one} has {d.n(m)} {many}. {cap(actor.first)} {w.conjugate('make')[form]} {c} and {left}.", f"{actor.first} {w.conjugate('have')[form]} {c} of {d.n(m)} {many} and {d.n(over)} {d.pick('single', 'loose', 'extra')} {many if over > 1 else x.one}.")  # fmt: skip
    value = in_boxes(d, k, m, box, x)
    d.end(f"How many {many} did {who} have at first?", f"How many {many} {actor.does} {who} have in total?", f"How many {many} {actor.does} {who} have altogether?", f"How many {many} are there in total?", f"How many {many} were there at the start?", f"How many {many} {actor.does} {who} have in all?", f"How many {many} did {who} have in the beginning?")
    d.add("plus", f"In total there are @ {many}.", value, "+", over)


@story(3)
def tickets(d: Story) -> None:
    """Adults and children pay different prices."""
    d.euros = d.chance(0.08)
    a, b, aa, bb = d.pick(("an adult", "a child", "adults", "children"), ("an adult", "a child", "adults", "children"), ("an adult", "a student", "adults", "students"), ("a grown-up", "a kid", "grown-ups", "kids"))
    p, q, x, y = d.number(4, 25), d.number(2, 15), d.number(1, 9), d.number(1, 9)
    what = d.pick("ticket", "museum ticket", "movie ticket", "zoo ticket", "train ticket", "circus ticket", "pass", "bus ticket")
    an = lambda word: word.split(" ", 1)[1]  # noqa: E731
    d.say(f"a {what} for {a} costs {d.usd(p)} and for {b} {d.usd(q)}.", f"a {what} costs {d.usd(p)} for {a} and {d.usd(q)} for {b}.", f"{cap(an(a))} tickets cost {d.usd(p)} and {an(b)} tickets cost {d.usd(q)}.", f"{cap(aa)} pay {d.usd(p)} and {bb} pay {d.usd(q)} for a {what}.", f"a {what} costs {d.usd(p)} for {aa} and {d.usd(q)} for {bb}.",
          f"The {d.pick('zoo', 'museum', 'pool', 'cinema')} charges {d.usd(p)} for {a} and {d.usd(q)} for {b}.")  # fmt: skip
    group = f"{d.n(x)} {aa if x > 1 else an(a)} and {d.n(y)} {bb if y > 1 else an(b)}"
    if d.chance(0.5):
        d.end(f"How much do {group} pay?", f"How much do {group} pay in total?", f"How much do {group} have to pay?", f"What is the total cost for {group}?", f"How much does it cost for {group}?", f"How much do tickets for {group} cost?")
    else:
        actor = d.actor()
        d.say(f"a {d.pick('family', 'group')} has {group}.", f"{actor.first} {w.conjugate('buy')[d.form(actor)]} tickets for {group}.", f"{group} {'went' if d.past else 'go'} to the {d.pick('zoo', 'movies', 'museum', 'pool')}.")
        d.end("How much do they pay?", "How much do the tickets cost?", "How much do the tickets cost in total?", "What is the total cost?", "How much do they pay altogether?", "How much do they have to pay in total?")
    s = d.add("cost", f"The {aa} pay $@.", x, "*", p)
    t = d.add("cost", f"The {bb} pay $@.", y, "*", q)
    d.add("sum", "In total it costs $@.", s, "+", t)


@story(3)
def in_each(d: Story) -> None:
    """Three goals in each of seven games; and on top of it."""
    actor = d.actor()
    verb, things = d.of(DOINGS)
    form = d.form(actor)
    k, m = d.number(2, 12), d.number(2, 15)
    unit = d.pick("games", "days", "weeks", "matches", "months", "hours", "lessons", "rounds")
    verbs = w.conjugate(verb)[form]
    subject = actor.first
    does, who, his = ("did" if d.past else actor.does), d.who(actor), actor.his
    if verb == "score" and d.chance(0.6):
        subject, who, does, his = d.pick("the team", "a team", "the soccer team", "the school team"), d.pick("it", "the team"), "did" if d.past else "does", "its"
        verbs = w.conjugate(verb)[PAST if d.past else THIRD]
    d.say(f"{subject} {verbs} {d.n(m)} {things} in each of {d.pick(his + ' ', 'the ', '')}{d.n(k)} {unit}.", f"In each of {d.n(k)} {unit}, {subject} {verbs} {d.n(m)} {things}.", f"{subject} {verbs} {d.n(m)} {things} in every one of {d.n(k)} {unit}.", f"For {d.n(k)} {unit}, {subject} {verbs} {d.n(m)} {things} in each.")
    value = d.add("total", f"In {k} {unit} it is @ {things}.", k, "*", m)
    if d.chance(0.25):
        j = d.number(1, 30)
        d.say(f"Then {who} {verbs} {d.n(j)} more.", f"After that, {who} {verbs} another {d.n(j)} {things}.")
        d.add("plus", f"In total it is @ {things}.", value, "+", j)
    d.end(f"How many {things} {does} {who} {verb}?", f"How many {things} {does} {who} {verb} in total?", f"How many {things} {does} {who} {verb} altogether?", f"How many {things} {does} {who} {verb} in all?", f"How many {things} is that in total?")


@story(3)
def measure(d: Story) -> None:
    """Two lengths, weights or volumes: how much longer, how much together."""
    kind, unit, adjective, verb = d.pick(("length", d.pick("cm", "meters", "feet", "inches"), "longer", "is {n} {u} long"), ("height", d.pick("cm", "feet", "inches", "meters"), "taller", "is {n} {u} tall"), ("weight", d.pick("pounds", "kg", "kilograms", "grams"), "heavier", "weighs {n} {u}"),
                                         ("volume", d.pick("liters", "cups", "gallons"), "more", "holds {n} {u}"), ("time", "minutes", "longer", "takes {n} {u}"), ("distance", d.pick("miles", "km"), "farther", "is {n} {u} away"))  # fmt: skip
    bank = {
        "length": ("a red ribbon|a blue ribbon", "a pencil|a pen", "a snake|a worm", "one rope|the other rope", "a bridge|a tunnel", "a table|a bench", "the first road|the second road", "a truck|a car"),
        "height": ("a tree|a bush", "a tower|a house", "{p}|{q}", "{p}|{q}", "a giraffe|a horse", "a building|a tree", "a lamp|a door", "{p}|{q}"),
        "weight": ("a dog|a cat", "a melon|a pumpkin", "{p}|{q}", "a red box|a blue box", "a bag of rice|a bag of flour", "a suitcase|a backpack", "a goat|a sheep"),
        "volume": ("a bucket|a tub", "a big tank|a small tank", "a pot|a pitcher", "a barrel|a can", "a red bottle|a green bottle"),
        "time": ("the bus ride|the train ride", "the first movie|the second movie", "the walk|the bike ride", "the math test|the reading test"),
        "distance": ("the school|the library", "the lake|the park", "the beach|the mall", "the zoo|the museum"),
    }[kind]  # fmt: skip
    pair = d.of(bank)
    if "{p}" in pair:
        pair = f"{d.someone().name}|{d.someone().name}"
    a, b = pair.split("|")
    x, y = d.size(2, 120), d.size(2, 120)
    the = lambda t: t.replace("a ", "the ", 1) if t.startswith("a ") else t  # noqa: E731
    say = lambda t, v: f"{t} {verb.format(n=d.n(v), u=unit)}"  # noqa: E731
    r = d._rng.random()
    if r < 0.45:
        d.say(f"{say(a, x)} and {say(b, y)}.", f"{say(a, x)}. {cap(say(b, y))}.")
        if x == y:
            raise ValueError("the same")
        hi, lo, big, small = (x, y, a, b) if x > y else (y, x, b, a)
        is_ = {"weight": "is", "volume": "does", "time": "is", "length": "is", "height": "is", "distance": "is"}[kind]
        if kind == "volume":
            d.end(f"How many more {unit} does {the(big)} hold than {the(small)}?", f"How much more does {the(big)} hold than {the(small)}?")
        else:
            d.end(f"How much {adjective} is {the(big)} than {the(small)}?", f"How many {unit} {adjective} {is_} {the(big)} than {the(small)}?", f"By how many {unit} is {the(big)} {adjective} than {the(small)}?")
        d.add("diff", f"The difference is @ {unit}.", hi, "-", lo)
    elif r < 0.7:
        d.say(f"{say(a, x)} and {say(b, y)}.", f"{say(a, x)}. {cap(say(b, y))}.")
        if kind == "weight":
            d.end("How much do they weigh together?", f"How many {unit} do they weigh together?", "What is their total weight?", "How much do they weigh in total?")
        elif kind == "volume":
            d.end("How much do they hold together?", f"How many {unit} do they hold together?", f"How many {unit} do both hold in total?")
        else:
            d.end(f"How many {unit} is that together?", f"How many {unit} is that in total?", f"What is the total {kind}?", f"What is the sum in {unit}?")
        d.add("sum", f"Together it is @ {unit}.", x, "+", y)
    elif kind == "volume" or kind == "time" or kind == "distance":
        raise ValueError("only for things that are long or heavy")
    elif r < 0.85:
        k = d.number(1, 30)
        if d.chance(0.6) or k >= x:
            d.say(f"{say(a, x)}. {cap(the(b) if not b.startswith('a ') else b)} is {d.n(k)} {unit} {adjective}.", f"{say(a, x)}. {cap(b)} is {d.n(k)} {unit} {adjective} than {the(a)}.")
            value = d.add("more", f"{the(b)} {verb.format(n='@', u=unit)}.", x, "+", k)
        else:
            less = {"longer": "shorter", "taller": "shorter", "heavier": "lighter"}[adjective]
            d.say(f"{say(a, x)}. {cap(b)} is {d.n(k)} {unit} {less} than {the(a)}.", f"{say(a, x)} and {b} is {d.n(k)} {unit} {less}.")
            value = d.add("less", f"{the(b)} {verb.format(n='@', u=unit)}.", x, "-", k)
        d.end(f"How {({'length': 'long', 'height': 'tall', 'weight': 'heavy'})[kind]} is {the(b)}?", f"What is the {kind} of {the(b)}?", f"How much does {the(b)} weigh?" if kind == "weight" else f"What is the {kind} of {the(b)} in {unit}?")
    else:
        k = d.number(2, 12)
        one = d.pick("box", "brick", "bag", "book", "stone", "package") if kind == "weight" else d.pick("block", "brick", "box", "stick", "board")
        x = d.number(2, 30)
        ones = _many(one)
        d.say(f"{article(one)} {verb.format(n=d.n(x), u=unit)}.", f"One {one} {verb.format(n=d.n(x), u=unit)}.", f"Each {one} {verb.format(n=d.n(x), u=unit)}.")
        if kind == "weight":
            d.end(f"How much do {d.n(k)} {ones} weigh?", f"How many {unit} do {d.n(k)} {ones} weigh?", f"What is the weight of {d.n(k)} {ones}?", f"How much do {d.n(k)} {ones} weigh together?")
        elif kind == "height":
            d.end(f"How tall is a stack of {d.n(k)} {ones}?", f"How high is a tower of {d.n(k)} {ones}?")
        else:
            d.end(f"How long are {d.n(k)} {ones} in a row?", f"How many {unit} long are {d.n(k)} {ones} together?", f"How long are {d.n(k)} {ones} put end to end?")
        d.add("product", f"Together it is @ {unit}.", k, "*", x)


@story(3)
def spending(d: Story) -> None:
    """Money spent on several things, told in one go."""
    d.euros = d.chance(0.08)
    actor = d.actor()
    form, who = d.form(actor), d.who(actor)
    count = d.pick(2, 2, 2, 3)
    things = d._rng.sample(("a game", "lunch", "a book", "food", "a shirt", "clothes", "a toy", "snacks", "gas", "dinner", "a movie", "shoes", "a gift", "candy", "groceries", "a hat", "drinks", "the bus", "a ticket", "a haircut", "school supplies", "flowers", "a present", "breakfast", "music", "books"), count)
    costs = [d.number(1, 40) for _ in things]
    listed = [f"{d.usd(c)} on {t}" for c, t in zip(costs, things)]
    if d.chance(0.3):
        listed = [f"{t} for {d.usd(c)}" for c, t in zip(costs, things)]
        verb = w.conjugate("buy")[form]
    else:
        verb = w.conjugate("spend")[form]
    text = f"{', '.join(listed[:-1])}{d.pick(' and', ' and', ', and', ' and then' if count == 2 else ' and')} {listed[-1]}"
    total = sum(costs)
    if d.chance(0.6):
        had = total + d.size(1, 60)
        if d.chance(0.4):
            had += -had % 10
        start_ = w.conjugate(d.pick("have", "have", "have", "start with", "get", "earn", "save", "go to the mall with", "take"))[form]
        d.say(f"{actor.first} {start_} {d.usd(had)}.", f"{actor.first} {start_} {d.usd(had)}.")
        if d.chance(0.25):
            d.text[-1] = f"{d.text[-1][:-1]} and {verb} {text}."
        else:
            d.say(f"{who} {verb} {text}.")
        does = d.pick(actor.does, "did") if d.past else actor.does
        d.end(f"How much money {does} {who} have left?", f"How much {does} {who} have left?", "How much money is left?", f"How many {'euros' if d.euros else 'dollars'} {does} {who} have left?", f"How much money {actor.does} {who} have now?", f"How many {'euros' if d.euros else 'dollars'} are left?", "How much is left?")
        left = had
        for c in costs:
            left = d.add("spend", f"Then {actor.name} {actor.has} $@ left.", left, "-", c)
    else:
        d.say(f"{actor.first} {verb} {text}.")
        does = "did" if d.past else actor.does
        d.end(f"How much {does} {who} spend?", f"How much money {does} {who} spend in total?", f"How much {does} {who} spend altogether?", f"What is the total?", f"How much {does} {who} spend in all?")
        s = costs[0]
        for i, c in enumerate(costs[1:], 1):
            s = d.add("sum", "In total it costs $@." if i == count - 1 else "So far it costs $@.", s, "+", c)


@story(3)
def reading(d: Story) -> None:
    """A book of so many pages, read on several days: what is left."""
    actor = d.actor()
    form, who = d.form(actor), d.who(actor)
    count = d.pick(1, 2, 2, 2, 3)
    i = d.number(0, 6 - count)
    times = d.pick([f"on {x}" for x in w.DAYS[i : i + count]], [f"on {x}" for x in w.DAYS[i : i + count]], ["yesterday", "today", "this evening"][:count], ["on the first day", "on the second day", "on the third day"][:count], ["in the morning", "in the afternoon", "in the evening"][:count])
    values = [d.size(3, 80) for _ in times]
    total = sum(values) + d.size(2, 150)
    if d.chance(0.4):
        total += -total % 10
    read = w.conjugate("read")[form]
    listed = [f"{d.n(v)} pages {t}" if j == 0 or d.chance(0.6) else f"{d.n(v)} {t}" for j, (v, t) in enumerate(zip(values, times))]
    text = listed[0] if count == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
    book = d.pick("book", "book", "novel", "story", "comic book")
    d.say(f"a {book} has {total} pages. {cap(actor.first)} {read} {text}.", f"{actor.first} {w.conjugate('have')[form]} a {book} with {total} pages. {cap(who)} {read} {text}.", f"{actor.first} is reading a {total}-page {book}. {cap(who)} {read} {text}." if actor.form == THIRD else f"There are {total} pages in a {book}. {cap(actor.first)} {read} {text}.",
          f"{actor.first} {read} {text}. The {book} has {total} pages.", f"There are {total} pages in {actor.owner} {book}. {cap(actor.name)} {read} {text}.")  # fmt: skip
    d.end(f"How many pages {actor.does} {who} still have to read?", f"How many pages are left?", f"How many pages {actor.does} {who} have left to read?", f"How many pages are left to read?", f"How many more pages {actor.does} {who} have to read?", f"How many pages remain?", f"How many pages {actor.does} {who} need to read to finish the {book}?", f"How many more pages must {who} read to finish it?", f"How many pages has {actor.name} not read yet?" if actor.form == THIRD else "How many pages are not read yet?")
    s = values[0]
    for j, v in enumerate(values[1:], 1):
        s = d.add("sum", "In total it is @ pages." if j == count - 1 else "So far it is @ pages.", s, "+", v)
    d.add("goal", "There are @ pages left.", total, "-", s)


OPENINGS = (  # said before a story, without a number
    "It was a sunny day.",
    "It is a rainy day.",
    "{P} is very busy today.",
    "{P} has a big family.",
    "It is {P}'s birthday.",
    "{P} is having a party.",
    "{P} likes to count.",
    "{P} loves to help at home.",
    "{P} went to the market.",
    "School has just started.",
    "{P} is at home today.",
    "{P} is on vacation.",
    "Here is a question.",
    "Please solve this problem.",
    "{P} has a question for you.",
)


_NAMES = list(FAMILIES)
_WEIGHTS: list[float] = []
for _weight, _ in FAMILIES.values():
    _WEIGHTS.append(_weight + (_WEIGHTS[-1] if _WEIGHTS else 0.0))
