"""Stories of things that one has: they come, go, are compared, shared and packed."""

# ruff: noqa: E501  (a wording is one line, however long)

from __future__ import annotations

from mamba2_math import story_words as w
from mamba2_math.registry import story
from mamba2_math.stories.writing import (
    DOINGS,
    MAX_STEPS,
    TAILS,
    Actor,
    Part,
    Story,
    ask_left,
    ask_total,
    boxed,
    cap,
    fraction,
    gain,
    in_boxes,
    loss,
    more,
    packed,
    relate,
    shared,
    some,
    start,
    take_share,
    tell,
    two_losses,
    wanted,
)
from mamba2_math.story_words import BASE, PAST, THIRD, Noun


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
            d.text[-1] += (
                f", how many {x.many} {actor.does} {actor.he} have{' left' if lost else ''}?"
            )
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
                d.text.append(
                    f"If {amount} {event}, how many {d.pick('', 'good ') if x.food else ''}{x.many} are {d.pick('left', 'there', 'left')}?"
                )
                d.question = " ".join(d.text)
            else:
                d.say(f"{amount} {event}.")
                d.end(
                    f"How many {x.many} are left?",
                    "How many are left?",
                    f"How many {x.many} remain?",
                    f"How many good {x.many} are left?"
                    if x.food
                    else f"How many {x.many} are still there?",
                )
            d.add("loss", f"There are @ {x.many} left.", value, "-", j)
        elif d.chance(0.3):
            j = d.size(1, 40)
            d.say(
                f"There {be if j > 1 else ('was' if d.past else 'is')} also {d.n(j)} {x.one if j == 1 else x.many} {d.pick('outside', 'on the table', 'on the floor', 'not in a ' + box.one)}."
            )
            d.end(
                f"How many {x.many} are there in total?",
                f"How many {x.many} are there altogether?",
                f"How many {x.many} are there in all?",
            )
            d.add("plus", f"There are @ {x.many}.", value, "+", j)
        else:
            d.end(
                f"How many {x.many} are there in total?",
                f"How many {x.many} are there altogether?",
                f"How many {x.many} are there?",
                f"How many {x.many} are there in all?",
                f"What is the total number of {x.many}?",
                f"How many {x.many} are in the {box.many}?",
            )
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
    d.say(
        f"{actor.first} {w.STARTS[0][d.form(actor)]}.".format(a=f"{d.n(value)} {x.many}"),
        f"{actor.first} {d.of(w.FOOD_GAINS[:3] if x.food else w.GAINS[:4])[d.form(actor)]}.".format(
            a=f"{d.n(value)} {x.many}"
        ),
    )
    if d.chance(0.3):
        lost = d.number(1, 15)
        d.text[-1] = ""
        total = value + lost
        keep = d.pick(
            f"keep {d.n(lost)} for {{h}}",
            f"eat {d.n(lost)}" if x.food else f"lose {d.n(lost)}",
            f"give {d.n(lost)} to {d.relative(actor)}",
            f"keep {d.n(lost)} {x.many} for {{h}}",
        )
        own = {"she": "herself", "he": "himself", "I": "myself", "you": "yourself"}.get(
            actor.he, "themselves"
        )
        keep = w.conjugate(keep.format(h=own))[d.form(actor)]
        d.text[-1] = cap(
            f"{actor.first} {w.STARTS[0][d.form(actor)].format(a=f'{d.n(total)} {x.many}')}."
        )
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
        d.say(
            f"{who} {w.conjugate('share')[form]} them equally among {d.n(k)} {friends}.",
            f"{who} {w.conjugate('give')[form]} {d.n(k)} {friends} the same number of {many}, as many as possible.",
            f"{who} {w.conjugate('divide')[form]} them equally between {d.n(k)} {friends}.",
        )
        d.end(
            f"How many {many} are left over?",
            "How many are left over?",
            f"How many {many} remain?",
            f"What is the number of {many} left over?",
        )
        used = d.add("fit", f"With {m} each the {friends} get @ {many}.", k, "*", m)
    else:
        box = d.of(w.CONTAINERS)
        d.say(
            f"{who} {w.conjugate('pack')[form]} them into {box.many} of {d.n(k)}.",
            f"{who} {w.conjugate('put')[form]} them in {box.many} of {d.n(k)} {many} each.",
        )
        d.end(
            f"How many {many} are left over?",
            "How many are left over?",
            f"How many {many} do not fit in a full {box.one}?",
        )
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
        d.say(
            f"There {be} {d.n(k)} {a} {x.many} and {d.n(m)} {b} {x.many} {spot}.",
            f"{cap(spot)} there {be} {d.n(k)} {a} {x.many} and {d.n(m)} {b} ones.",
        )
        value = d.add("kinds", f"There are @ {x.many} at first.", k, "+", m)
    else:
        value = d.number(4, high)
        sat = (
            d.pick(be, be, be, "sat" if d.past else "sit")
            if x.one in ("bird", "frog", "pigeon", "crow")
            else be
        )
        d.say(
            f"There {be} {d.n(value)} {x.many} {spot}.",
            f"There {be} {d.n(value)} {x.many} {spot}.",
            f"{d.n(value)} {x.many} {sat} {spot}.",
        )
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
            d.text[-1] = (
                f"{d.text[-1][:-1]}{d.pick(' and', ', and', ' and then', ', but', ', then')} {event}."
            )
        else:
            d.text.append(cap(f"{then}{event}."))
    if value == 0:
        raise ValueError("nobody is left")
    many = x.many
    left = d.shape[-1] == "go"
    d.end(
        f"How many {many} are {spot} now?",
        f"How many {many} are there now?",
        f"How many {many} are now {spot}?",
        f"How many {many} are left?" if left else f"How many {many} are there in all?",
        f"How many {many} are left {spot}?" if left else f"How many {many} are there altogether?",
        "How many are left?" if left else f"How many {many} are there?",
        f"How many {many} remain?" if left else f"How many {many} are {spot} in total?",
        f"How many {many} are still {spot}?" if left else f"How many {many} are there in total?",
    )


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
    verb0 = "had" if has == "had" else a.has
    order = d.chance(0.2) and len(people) == 2
    kind = (
        "" if d.chance(0.75) else d.pick("collected", "found", "picked", "made", "bought", "sold")
    )
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
    have = {
        "collected": "collect",
        "found": "find",
        "picked": "pick",
        "made": "make",
        "bought": "buy",
        "sold": "sell",
    }.get(kind, "have")
    if r < 0.4 and d.lines and d.lines[-1].startswith(last):
        d.end(
            f"How many {many} {does} {last} {have}?",
            f"How many {does} {last} {have}?",
            f"How many {many} {does} {last} {have}?",
        )
    elif r < 0.8 or len(set(values)) < len(values):
        if a.he == "I":
            they = "we"
        else:
            they = d.pick(
                "they",
                "they",
                " and ".join(p.name for p in people) if len(people) == 2 else "the three of them",
            )
        do = "did" if kind else "do"
        d.end(
            f"How many {many} {do} {they} {have} together?",
            f"How many {many} {do} {they} {have} altogether?",
            f"How many {many} {do} {they} {have} in total?",
            f"How many {many} {do} {they} {have} in all?",
            f"What is the total number of {many}?",
        )
        total = values[0]
        for i, value in enumerate(values[1:], 1):
            text = (
                f"Together they have @ {many}."
                if i == len(values) - 1
                else f"The first two have @ {many}."
            )
            total = d.add("sum", text, total, "+", value)
    else:
        ranked = sorted(zip(values, people), key=lambda pair: pair[0])
        (lo, b), (hi, c) = ranked[0], ranked[-1]
        if len(people) == 3:
            (lo, b), (hi, c) = d.pick(
                (ranked[0], ranked[2]), (ranked[0], ranked[1]), (ranked[1], ranked[2])
            )
        than = "me" if b.he == "I" else b.name
        do = "did" if kind else c.does
        d.end(
            f"How many more {many} {do} {c.name} {have} than {than}?",
            f"How many more {do} {c.name} {have} than {than}?",
            f"What is the difference between the number of {many} of {c.name if c.he != 'I' else 'mine'} and {than}?",
        )
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
        d.say(
            f"{a.name} {has} {d.n(value)} {many}. {d.pick(cap(a.he), a.name)} has {d.n(k)} more {many} than {b.name}.",
            f"{a.name} {has} {d.n(value)} {many}, which is {d.n(k)} more than {b.name} has.",
            f"{a.name} {has} {d.n(value)} {many}. That is {d.n(k)} more than {b.name}.",
            f"{a.name} {has} {d.n(value)} {many}. {cap(a.he)} has {d.n(k)} more than {b.name}.",
        )
        other = d.add("backmore", f"{b.name} has @ {many}.", value, "-", k)
    elif r < 0.7:
        value = d.size(2, 60)
        d.say(
            f"{a.name} {has} {d.n(value)} {many}. {cap(a.he)} has {d.n(k)} fewer {many} than {b.name}.",
            f"{a.name} {has} {d.n(value)} {many}, which is {d.n(k)} fewer than {b.name} has.",
            f"{a.name} {has} {d.n(value)} {many}. That is {d.n(k)} less than {b.name}.",
        )
        other = d.add("backfewer", f"{b.name} has @ {many}.", value, "+", k)
    else:
        words, f = d.of(w.MULTIPLES)
        other = d.number(2, 30)
        value = other * f
        d.say(
            f"{a.name} {has} {d.n(value)} {many}. {cap(a.he)} has {words} as many {many} as {b.name}.",
            f"{a.name} {has} {d.n(value)} {many}, which is {words} as many as {b.name} has.",
            f"{a.name} {has} {words} as many {many} as {b.name}. {a.name} has {d.n(value)} {many}.",
        )
        other = d.add("backtimes", f"{b.name} has @ {many}.", value, "/", f)
    if d.chance(0.7):
        d.end(f"How many {many} does {b.name} have?", f"How many does {b.name} have?")
    else:
        d.end(f"How many {many} do they have together?", f"How many {many} do they have in total?")
        d.add("both", f"Together they have @ {many}.", value, "+", other)


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
        ["yesterday", "today", "this evening"][:count]
        if form == PAST
        else ["on the first day", "on the second day", "on the third day"][:count],
        [f"in {month}" for month in w.MONTHS[i : i + count]],
        ["on the first day", "on the second day", "on the third day"][:count],
        ["in the first week", "in the second week", "in the third week"][:count],
        ["last week", "this week", "today"][:count]
        if form == PAST
        else [f"in {m}" for m in w.MONTHS[i : i + count]],
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
                d.text[-1] = (
                    f"{d.text[-1][:-1]}{link} {d.n(k)}{d.pick('', '', ' more', f' {things}')} {when}."
                )
                if j < count - 1 and not d.chance(0.5):
                    continue
            else:
                d.say(
                    f"{when}, {he} {verbs} {d.n(k)}.",
                    f"{he} {verbs} {d.n(k)} {things} {when}.",
                    f"{he} {verbs} {d.n(k)} more {when}.",
                    f"{when}, {he} {verbs} {d.n(k)} {things}.",
                )
        elif r < 0.68:
            k = d.size(1, 30)
            values.append(d.add("more", step, base, "+", k))
            d.say(
                f"{when} {he} {verbs} {d.n(k)} more {things} than {that}.",
                f"{when}, {he} {verbs} {d.n(k)} more than {that}.",
                f"{he} {verbs} {d.n(k)} more {things} {when} than {that}.",
            )
        elif r < 0.8 and base > 2:
            k = d.number(1, min(base - 1, 30))
            values.append(d.add("fewer", step, base, "-", k))
            d.say(
                f"{when} {he} {verbs} {d.n(k)} fewer {things} than {that}.",
                f"{when}, {he} {verbs} {d.n(k)} fewer than {that}.",
                f"{when} {he} {verbs} {d.n(k)} less than {that}.",
            )
        elif r < 0.93 or base % 2:
            words, k = d.of(w.MULTIPLES)
            values.append(d.add("times", step, base, "*", k))
            d.say(
                f"{when} {he} {verbs} {words} as many {things} as {that}.",
                f"{when}, {he} {verbs} {words} as many.",
                f"{he} {verbs} {words} as many {things} {when}.",
                f"{when}, {he} {verbs} {words} as many as {that}.",
            )
        else:
            values.append(d.add("half", step, base, "/", 2))
            d.say(
                f"{when} {he} {verbs} half as many {things} as {that}.",
                f"{when}, {he} {verbs} half as many.",
                f"{when}, {he} {verbs} half that number.",
            )
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
                d.end(
                    f"What is the average number of {things} {d.pick('per day', 'a day')}?"
                    if "on " in times[0]
                    else "What is the average?"
                )
                d.add("mean", "The average is @.", total, "/", k)
                return
            raise ValueError("no average")
        goal = total + d.size(1, 80)
        if things == "pages":
            d.text.insert(
                d.pick(0, len(d.text)) if not actor.first.startswith("a ") else len(d.text),
                f"The {d.pick('book', 'story', 'novel')} has {goal} pages.",
            )
            d.end(
                f"How many pages {actor.does} {who} still have to read?"
                if verb == "read"
                else f"How many pages are left to {verb}?",
                f"How many pages are left to {verb}?",
                "How many pages are left?",
                f"How many more pages {actor.does} {who} have to {verb}?",
                f"How many pages {actor.does} {who} have left to {verb}?",
            )
        else:
            d.say(
                f"{who} {w.conjugate('want')[form]} to {verb} {d.n(goal)} {things} in total.",
                f"{cap(actor.his)} goal is {d.n(goal)} {things}.",
                f"{who} {w.conjugate('have')[form]} to {verb} {d.n(goal)} {things}.",
            )
            d.end(
                f"How many more {things} {actor.does} {who} need to {verb}?",
                f"How many {things} are left?",
                f"How many more {things} must {who} {verb}?",
            )
        d.add("goal", f"There are @ {things} left.", goal, "-", total)
        return
    if (
        r < 0.75
        and len(d.lines) < MAX_STEPS
        and things
        in (
            "loaves of bread",
            "sandwiches",
            "cookies",
            "muffins",
            "apples",
            "cans",
            "shells",
            "bracelets",
            "fish",
        )
    ):
        k = d.number(1, total)
        d.say(
            f"{who} then {w.conjugate(d.pick('sell', 'give away', 'lose', 'use'))[form]} {d.n(k)} of them.",
            f"{who} {w.conjugate(d.pick('sell', 'give away'))[form]} {d.n(k)} {things}.",
        )
        ask_left(d, actor, things)
        d.add("loss", f"Then there are @ {things} left.", total, "-", k)
        return
    d.end(
        f"How many {things} {does} {who} {verb} in total?",
        f"How many {things} {does} {who} {verb} altogether?",
        f"How many {things} {does} {who} {verb} in all?",
        f"How many {things} {does} {who} {verb}?",
        f"What is the total number of {things}?",
        f"In total, how many {things} {does} {who} {verb}?",
        f"How many {things} {does} {who} {verb} {'in the two' if count == 2 else 'in the three'} {'days' if 'on ' in times[0] else 'times'} together?",
    )


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
        group, many = d.pick(
            ("foods", "pieces of fruit"),
            ("animals", "animals"),
            ("items", "items"),
            ("flowers", "flowers"),
        )
        bank = {
            "foods": w.FOODS[:18],
            "animals": w.ANIMALS,
            "items": w.ITEMS,
            "flowers": w.FLOWERS[:7],
        }[group]
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
            spot = d.pick(
                "in a box",
                "in a garden",
                "on a farm",
                "in a store",
                "in a bag",
                "on the table",
                "in the park",
                "in a bowl",
                "in a basket",
            )
            d.say(f"There {be} {text} {spot}.", f"{spot} there {be} {text}.")
        s = values[0]
        for i, v in enumerate(values[1:], 1):
            s = d.add(
                "sum",
                f"In total there are @ {many}."
                if i == count - 1
                else f"So far there are @ {many}.",
                s,
                "+",
                v,
            )
        if d.chance(0.3) and len(d.lines) < MAX_STEPS:
            if personal and d.chance(0.75):
                d.of(TAILS if d.chance(0.4) else (wanted,))(d, actor, Noun(many[:-1], many), s)
                return
            k = d.number(1, s - 1)
            bank = d.pick(
                "break",
                "get lost",
                "be taken",
                "be sold",
                "go missing",
                "disappear",
                "pop" if many == "balloons" else "be given away",
            )
            d.say(
                f"{d.n(k)} of {d.pick('them', 'the ' + many)} {w.conjugate(bank)[PAST if d.past else BASE if k > 1 else THIRD]}."
            )
            d.end(
                f"How many {many} are left?",
                f"How many {many} are there now?",
                f"How many {many} {actor.does} {d.who(actor)} have now?"
                if personal
                else "How many are left?",
            )
            d.add("loss", f"Then there are @ {many} left.", s, "-", k)
        elif personal:
            who = d.who(actor)
            d.end(
                f"How many {many} {actor.does} {who} have in total?",
                f"How many {many} {actor.does} {who} have altogether?",
                f"How many {many} {actor.does} {who} have in all?",
                f"How many {many} are there in total?",
                f"What is the total number of {many}?",
            )
        else:
            d.end(
                f"How many {many} are there in total?",
                f"How many {many} are there altogether?",
                f"How many {many} are there in all?",
                f"What is the total number of {many}?",
                f"How many {many} are there?",
            )
    else:
        rest = labels[-1]
        parts = listed[:-1]
        if len(parts) > 1 and d.chance(0.3):
            told = f"{', '.join(f'{d.n(v)} {be} {k}' for v, k in zip(values, kind[:-1]))} and the rest {be} {kind[-1]}"
        else:
            told = f"{' and '.join(f'{d.n(v)} {be} {k}' for v, k in zip(values, kind[:-1]))}"
            told += d.pick(
                f" and the rest {be} {kind[-1]}",
                f", and the others {be} {kind[-1]}",
                f". The rest {be} {kind[-1]}",
                f". The remaining ones {be} {kind[-1]}",
            )
        d.say(
            f"{actor.first} {have} {d.n(total)} {many}.",
            f"There {be} {d.n(total)} {many} in a {d.pick('box', 'bag', 'room', 'store', 'garden', 'basket')}.",
        )
        d.text.append(cap(told + "."))
        d.end(
            f"How many {rest} are there?",
            f"How many {many} are {kind[-1]}?",
            f"How many are {kind[-1]}?",
            f"How many {rest} {actor.does} {actor.name} have?"
            if d.text[0].startswith(cap(actor.first))
            else f"How many {rest} are there?",
        )
        left = total
        for i, v in enumerate(values[:-1]):
            left = d.add("rest", f"Without the {kind[i]} there are @ {many} left.", left, "-", v)


@story(4)
def two_groups(d: Story) -> None:
    """Girls and boys, seats taken and empty: a whole and its parts."""
    be = "were" if d.past and d.chance(0.5) else "are"
    whole, first, second, place_ = d.pick(
        ("students", "girls", "boys", "in a class"),
        ("students", "boys", "girls", "in the class"),
        ("children", "boys", "girls", "at a party"),
        ("students", "girls", "boys", "in the school choir"),
        ("people", "adults", "children", "at the pool"),
        ("people", "men", "women", "in a room"),
        ("people", "children", "adults", "on a bus"),
        ("animals", "cows", "horses", "on a farm"),
        ("animals", "dogs", "cats", "in a shelter"),
        ("students", "boys", "girls", "on the school bus"),
        ("fruits", "apples", "oranges", "in a basket"),
        ("cars", "red cars", "blue cars", "in a parking lot"),
        ("players", "girls", "boys", "on a team"),
        ("flowers", "roses", "tulips", "in a vase"),
        ("kids", "girls", "boys", "in the club"),
        ("books", "novels", "comics", "on a shelf"),
    )
    r = d._rng.random()
    total = d.size(6, 120)
    if r < 0.45:
        k = d.number(2, total - 1)
        d.say(
            f"There {be} {d.n(total)} {whole} {place_}.",
            f"There {be} {d.n(total)} {whole} {place_}.",
        )
        d.say(
            f"{d.n(k)} of them {be} {first}.",
            f"{d.n(k)} {be} {first}.",
            f"{d.n(k)} of the {whole} {be} {first} and the rest {be} {second}.",
            f"If {d.n(k)} of them {be} {first}, how many {second} {be} there?",
        )
        if d.text[-1].endswith("?"):
            d.question = " ".join(d.text)
        else:
            d.end(
                f"How many {second} are there?",
                f"How many of them are {second}?",
                f"How many {second} {be} there?",
                f"How many {whole} are {second}?",
            )
        d.add("part", f"There are @ {second}.", total, "-", k)
        return
    if r < 0.6:
        a, b = d.size(3, 60), d.size(3, 60)
        d.say(
            f"There {be} {d.n(a)} {first} and {d.n(b)} {second} {place_}.",
            f"{cap(place_)} there {be} {d.n(a)} {first} and {d.n(b)} {second}.",
        )
        if d.chance(0.6):
            d.end(
                f"How many {whole} are there in total?",
                f"How many {whole} {be} there altogether?",
                f"How many {whole} are there in all?",
                f"How many {whole} are there?",
            )
            d.add("sum", f"There are @ {whole}.", a, "+", b)
            return
        if a == b:
            raise ValueError("no difference")
        hi, lo, big, small = (a, b, first, second) if a > b else (b, a, second, first)
        d.end(
            f"How many more {big} than {small} are there?",
            f"How many more {big} are there than {small}?",
            f"How many fewer {small} than {big} are there?",
        )
        d.add("diff", f"There are @ more {big}.", hi, "-", lo)
        return
    share = fraction(d, total)
    if not share or total < 6:
        raise ValueError("no share")
    words, divisor, parts = share
    d.say(
        f"There {be} {d.n(total)} {whole} {place_}.", f"There {be} {d.n(total)} {whole} {place_}."
    )
    d.say(
        f"{words} of them {be} {first}.",
        f"{words} of the {whole} {be} {first}.",
        f"{words} of the {whole} {be} {first} and the rest {be} {second}.",
    )
    k = take_share(d, total, divisor, parts, first)
    if d.chance(0.6):
        d.end(
            f"How many {second} are there?",
            f"How many {whole} are not {first}?",
            f"How many {second} {be} there?",
        )
        d.add("part", f"There are @ {second}.", total, "-", k)
    else:
        d.end(f"How many {first} are there?", f"How many of the {whole} are {first}?")


@story(1.5)
def seats(d: Story) -> None:
    """Of so many places some are taken."""
    where, thing, taken = d.pick(
        ("a bus", "seats", "people are sitting on the bus"),
        ("a theater", "seats", "seats are taken"),
        ("a parking lot", "spaces", "cars are parked there"),
        ("a bus", "seats", "seats are occupied"),
        ("a hotel", "rooms", "rooms are occupied"),
        ("a classroom", "desks", "students are sitting"),
        ("a plane", "seats", "passengers are on board"),
        ("an egg carton", "places", "eggs are in it"),
        ("a boat", "seats", "people are in it"),
        ("a restaurant", "tables", "tables are taken"),
        ("a cinema", "seats", "people came to the movie"),
        ("a photo album", "pages", "pages are full"),
    )
    if d.chance(0.5):
        k, m = d.number(2, 20), d.number(2, 20)
        d.say(
            f"{where} has {d.n(k)} rows of {thing} with {d.n(m)} {thing} in each row.",
            f"{where} has {d.n(k)} rows with {d.n(m)} {thing} in each.",
            f"{where} has {d.n(k)} rows of {d.n(m)} {thing}.",
        )
        total = d.add("rows", f"There are @ {thing}.", k, "*", m)
    else:
        total = d.size(5, 200)
        d.say(f"{where} has {d.n(total)} {thing}.", f"There are {d.n(total)} {thing} in {where}.")
    k = d.number(2, total - 1)
    d.say(f"{d.n(k)} {taken}.", f"{d.n(k)} {taken}.", f"Right now, {d.n(k)} {taken}.")
    d.end(
        f"How many {thing} are {d.pick('empty', 'free', 'left', 'still free', 'available')}?",
        f"How many {thing} are {d.pick('empty', 'free', 'left')}?",
    )
    d.add("free", f"There are @ {thing} free.", total, "-", k)
