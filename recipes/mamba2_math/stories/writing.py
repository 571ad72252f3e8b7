"""What the stories are written with: who, how many, what happens, what is asked.

The families, in the modules beside this one, are functions that carry :func:`story`.
"""

# ruff: noqa: E501  (a wording is one line, however long)

from __future__ import annotations

import random
from typing import NamedTuple

from mamba2_math import story_words as w
from mamba2_math.draft import Draft
from mamba2_math.story_words import BASE, PAST, THIRD, Noun

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
        """As in "Mia's", "my"."""
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
        limit = 20 if self.wordy > 0.5 else 12
        if self.wordy and k <= limit and self.chance(self.wordy):
            return "a dozen" if k == 12 and self.chance(0.4) else w.NUMBER_WORDS[k]
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
            name = self.pick(
                "Grandma",
                "Mom",
                "Aunt Rose",
                "Mrs. Smith",
                "Ms. Lee",
                "Mrs. Brown",
                "Ms. Garcia",
                "Miss Clark",
                "Grandmother",
                "Mrs. Jones",
            )
            return Actor(name, name, "she", "her", "her")
        if r < 0.84:
            name = self.pick(
                "Grandpa",
                "Dad",
                "Uncle Joe",
                "Mr. Smith",
                "Mr. Lee",
                "Mr. Brown",
                "Mr. Patel",
                "Mr. Jones",
                "Grandfather",
                "Mr. Wilson",
            )
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

    def add(self, kind: str, text: str, left: int, op: str, right: int) -> int:
        self.shape.append(kind)
        if self.euros:
            text = text.replace("$@", "@ euros")
        return self.step(cap(text), left, op, right)

    def divisor(self, value: int, low: int = 2, high: int = 12) -> int | None:
        """A number between ``low`` and ``high`` that divides ``value``."""
        found = [k for k in range(low, high + 1) if value % k == 0 and value > k]
        return self.of(found) if found else None


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


THEN = (
    "Then",
    "Then",
    "Then",
    "After that,",
    "Later,",
    "Next,",
    "The next day,",
    "Afterwards,",
    "Later that day,",
    "Yesterday,",
    "Today,",
    "In the afternoon,",
    "Then,",
    "A week later,",
    "During the day,",
    "On Monday,",
    "On Saturday,",
    "Finally,",
)


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
                link = d.pick(
                    " and",
                    " and",
                    " and then",
                    ", and",
                    ", then",
                    " and",
                    " but",
                    f", and {actor.he}",
                    f" and {actor.he}",
                    f", but {actor.he}",
                    f", then {actor.he}",
                    f". {cap(actor.he)}",
                )
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
    k = d.add(
        "share",
        f"One part is @ {things}." if parts > 1 else f"That is @ {things}.",
        value,
        "/",
        divisor,
    )
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
        friends = d.pick(
            "friends",
            "friends",
            "friends",
            "cousins",
            "classmates",
            "neighbors",
            "students",
            "children",
            "kids",
            "sisters",
            "brothers",
            "people",
        )
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
            ("in the morning", "in the afternoon"),
            ("on Monday", "on Tuesday"),
            ("on Saturday", "on Sunday"),
            ("yesterday", "today"),
            ("today", "tomorrow"),
        )
        verb = "eat" if x.food and d.chance(0.5) else d.pick("sell", "use", "lose", "give away")
        phrase = d.pick(
            f"{verb} {a} {things} {one} and {b} {two}",
            f"{verb} {a} {one} and {b} {two}",
            f"{verb} {a} of them {one} and {b} more {two}",
        )
    for lost in (k, m):
        value = d.add("loss", f"Then {actor.name} {actor.has} @ {x.many} left.", value, "-", lost)
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
            there = d.pick(
                f"there {'were' if d.past else 'are'} {amount} in {actor.owner} bag",
                f"{actor.owner} basket {'had' if d.past else 'has'} {amount} in it",
            )
            return Part(there.replace(actor.name, actor.first), own=True), value
        elif r < 0.2 and d.past:
            opening = d.pick(
                "At first,",
                "In the morning,",
                "At the start,",
                "Yesterday,",
                "On Monday,",
                "Last week,",
                "This morning,",
                "To begin with,",
            )
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
    friends = d.pick(
        "friends",
        "friends",
        "children",
        "classmates",
        "cousins",
        "kids",
        "people",
        "students",
        "neighbors",
        "boys",
        "girls",
        "grandchildren",
        "sisters",
    )
    kn, many = d.n(k), x.many
    verb = d.pick(
        "share {them} equally among",
        "share {them} equally between",
        "divide {them} equally among",
        "split {them} equally among",
        "give {them} equally to",
        "share {them} among",
        "divide {them} evenly among",
        "split {them} evenly between",
        "share {them} with",
        "hand {them} out equally to",
        "distribute {them} equally among",
    )
    them = d.pick("them", "them", "all of them", f"the {many}", f"all the {many}")
    if len(d.lines) and d.shape[-1] in ("loss",):
        them = d.pick(
            "the rest",
            "the rest",
            f"the remaining {many}",
            "them",
            f"the other {many}",
            f"the {many} that were left",
            "what was left",
        )
    verb = w.conjugate(verb.format(them=them))
    owner = f"{d.pick(actor.his, actor.his, '')} {kn} {friends}".strip()
    if d.chance(0.2):
        d.say(f"{who} {w.conjugate('want')[form]} to {verb[BASE]} {owner}.")
    elif d.chance(0.15):
        d.end(
            f"If {who} {verb[actor.form]} {owner}, how many {many} does each get?",
            f"If {who} {verb[actor.form]} {owner}, how many {many} will each one get?",
        )
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
    them = (
        d.pick("the rest", f"the remaining {many}", "them")
        if rest
        else d.pick("them", "them", f"the {many}", "all of them")
    )
    if d.chance(0.5):
        phrase = d.pick(
            f"into {box.many} of {mn}",
            f"in {box.many} of {mn}",
            f"in {box.many} with {mn} {many} each",
            f"into {box.many} that hold {mn} {many} each",
            f"into {box.many} with {mn} in each",
            f"into {box.many} of {mn} {many} each",
            f"in {box.many} of {mn} {many}",
        )
        d.say(
            f"{who} {w.conjugate(verb)[form]} {them} {phrase}.",
            f"{d.pick('Each', 'Every')} {box.one} {d.pick('holds', 'can hold', 'has room for')} {mn} {many}.",
        )
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
        d.add(
            "boxes",
            f"{actor.name} needs @ {box.many}."
            if actor.form == THIRD
            else f"{actor.name} need @ {box.many}.",
            value,
            "/",
            m,
        )
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
    them = (
        d.pick("the rest", f"the remaining {x.many}", "them")
        if rest
        else d.pick("them", "all of them", f"the {x.many}")
    )
    d.say(
        f"{who} {w.conjugate('sell')[form]} {them} for {usd} each.",
        f"{who} {w.conjugate('sell')[form]} {them} at {usd} each.",
        f"{who} {w.conjugate('sell')[form]} {them} for {usd} per {x.one}.",
        f"{who} {w.conjugate('sell')[form]} each {x.one} for {usd}."
        if not rest
        else f"{who} {w.conjugate('sell')[form]} each of the remaining {x.many} for {usd}.",
    )
    does = "did" if d.past else actor.does
    d.end(
        f"How much money {does} {who} make?",
        f"How much {does} {who} earn?",
        f"How much money {does} {who} get?",
        f"How many dollars {does} {who} earn?",
        f"How much money {does} {who} earn in total?",
        f"How much {does} {who} make altogether?",
    )
    d.add("sold", f"{actor.name} {'gets' if actor.form == THIRD else 'get'} $@.", value, "*", price)


def wanted(d: Story, actor: Actor, x: Noun, value: int) -> None:
    goal = value + d.size(1, 60)
    who, form = d.who(actor), d.form(actor)
    if d.chance(0.3) and goal % 10 != 0:
        goal += 10 - goal % 10
    verb = w.conjugate(d.pick("need", "want", "want to have", "need to have", "want to get"))[form]
    d.say(
        f"{who} {verb} {d.n(goal)} {x.many}.",
        f"{who} {verb} {d.n(goal)} {x.many} in total.",
        f"{who} {verb} {d.n(goal)} in all.",
    )
    d.end(
        f"How many more {x.many} {actor.does} {who} need?",
        f"How many more {x.many} {actor.does} {who} still need?",
        f"How many more does {actor.name} need?"
        if actor.form == THIRD
        else f"How many more do {who} need?",
        f"How many {x.many} are still missing?",
        f"How many more {x.many} must {who} get?",
        f"How many {x.many} {actor.does} {who} still need?",
    )
    d.add(
        "goal",
        f"{actor.name} still {'needs' if actor.form == THIRD else 'need'} @ {x.many}.",
        goal,
        "-",
        value,
    )


def compared(d: Story, actor: Actor, x: Noun, value: int) -> None:
    """Somebody else has so many: who has more, how many together."""
    other, many = d.someone(), x.many
    has = "had" if d.past and d.chance(0.5) else "has"
    if d.chance(0.6):
        k = d.size(2, 100)
        d.say(
            f"{other.name} {has} {d.n(k)} {many}.",
            f"{d.pick('Meanwhile, ', '')}{other.name} {has} {d.n(k)}.",
        )
        other_value = k
    else:
        other_value = relate(
            d, x, other.name, value, actor.name if actor.he not in ("I", "you") else actor.him, has
        )
    r = d._rng.random()
    if r < 0.45 or other_value == value:
        who = d.pick("they", f"{actor.name} and {other.name}", "the two of them", "both of them")
        if actor.he in ("I", "you"):
            who = "we"
        d.end(
            f"How many {many} do {who} have together?",
            f"How many {many} do {who} have in total?",
            f"How many {many} do {who} have altogether?",
            f"How many {many} do {who} have in all?",
            f"What is the total number of {many} that {who} have?",
        )
        d.add("both", f"Together they have @ {many}.", value, "+", other_value)
    else:
        a, b, hi, lo = actor.name, other.name, value, other_value
        if hi < lo:
            a, b, hi, lo = b, a, lo, hi
        does = (
            "do"
            if a in ("I", "you") or " and " in a or a.startswith("the ") and actor.form == BASE
            else "does"
        )
        has_more = "have" if does == "do" else "has"
        than = "me" if b == "I" else b
        if d.chance(0.25):
            small_does = (
                "do"
                if b in ("I", "you") or " and " in b or b.startswith("the ") and actor.form == BASE
                else "does"
            )
            d.end(f"How many fewer {many} {small_does} {b} have than {'me' if a == 'I' else a}?")
        else:
            d.end(
                f"How many more {many} {does} {a} have than {than}?",
                f"How many more {many} {does} {a} have than {than}?",
                f"How many more {does} {a} have than {than}?",
            )
        d.add("diff", f"{a} {has_more} @ more {many}.", hi, "-", lo)


def relate(d: Story, x: Noun, other: str, value: int, than: str, has: str = "has") -> int:
    """Says what ``other`` has by what ``than`` has, and works it out."""
    many, r = x.many, d._rng.random()
    result = f"{other} {has} @ {many}."
    if r < 0.35:
        k = d.size(1, 50)
        d.say(
            f"{other} {has} {d.n(k)} more {many} than {than}.",
            f"{other} {has} {d.n(k)} more than {than}.",
            f"{other} {has} {d.n(k)} more {many} than {than} {'does' if has == 'has' else 'did'}.",
        )
        return d.add("more", f"{other} has @ {many}.", value, "+", k)
    if r < 0.6 and value > 2:
        k = d.number(1, min(value - 1, 40))
        d.say(
            f"{other} {has} {d.n(k)} fewer {many} than {than}.",
            f"{other} {has} {d.n(k)} fewer than {than}.",
            f"{other} {has} {d.n(k)} less {many} than {than}.",
            f"{other} {has} {d.n(k)} less than {than}.",
        )
        return d.add("fewer", f"{other} has @ {many}.", value, "-", k)
    if r < 0.87 or value % 2:
        words, k = d.of(w.MULTIPLES)
        d.say(
            f"{other} {has} {words} as many {many} as {than}.",
            f"{other} {has} {words} as many as {than}.",
            f"{other} {has} {words} the number of {many} that {than} has."
            if than not in ("me", "you", "them")
            else f"{other} {has} {words} as many {many} as {than}.",
        )
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
    d.say(
        f"{who} {verb[actor.form]} {d.n(m)} {x.many} {d.pick('a', 'each', 'every', 'per')} {one}.",
        f"{d.pick('Each', 'Every')} {one} {who} {verb[actor.form]} {d.n(m)} of them.",
    )
    d.end(
        f"How many {many} will the {x.many} last?",
        f"For how many {many} will they last?",
        f"In how many {many} will they be gone?",
        f"How many {many} will they last?",
        f"How long will the {x.many} last, in {many}?",
    )
    d.add("last", f"They last @ {many}.", value, "/", m)


TAILS = (shared, shared, shared, boxed, boxed, boxed, sold, wanted, compared, compared, lasting)


DOINGS = (  # what is done by so many: verb, things, longer time units first
    ("read", "pages"),
    ("read", "pages"),
    ("read", "pages"),
    ("run", "miles"),
    ("run", "kilometers"),
    ("walk", "miles"),
    ("walk", "kilometers"),
    ("ride", "miles"),
    ("bike", "miles"),
    ("swim", "laps"),
    ("write", "words"),
    ("write", "pages"),
    ("solve", "problems"),
    ("bake", "cookies"),
    ("score", "points"),
    ("score", "goals"),
    ("sell", "tickets"),
    ("sell", "cups of lemonade"),
    ("collect", "cans"),
    ("collect", "shells"),
    ("pick", "apples"),
    ("do", "push-ups"),
    ("do", "sit-ups"),
    ("plant", "trees"),
    ("catch", "fish"),
    ("drink", "glasses of water"),
    ("drive", "miles"),
    ("make", "bracelets"),
    ("paint", "pictures"),
    ("wash", "cars"),
    ("learn", "words"),
    ("eat", "cookies"),
    ("answer", "questions"),
    ("build", "models"),
    ("see", "birds"),
    ("find", "coins"),
    ("deliver", "packages"),
    ("take", "photos"),
    ("bake", "muffins"),
    ("bake", "loaves of bread"),
    ("make", "sandwiches"),
    ("watch", "movies"),
    ("sell", "muffins"),
    ("swim", "meters"),
    ("practice", "minutes"),
    ("study", "hours"),
    ("knit", "scarves"),
    ("draw", "pictures"),
    ("count", "stars"),
    ("feed", "animals"),
)


def article(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _many(one: str) -> str:
    irregular = {
        "octopus": "octopuses",
        "shelf": "shelves",
        "pair of shoes": "pairs of shoes",
        "starfish": "starfish",
    }
    return irregular.get(one) or w._plural(one)
