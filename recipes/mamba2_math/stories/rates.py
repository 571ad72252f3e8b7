"""Stories of so many each: classes, legs, days, speed, machines."""

# ruff: noqa: E501  (a wording is one line, however long)

from __future__ import annotations

from mamba2_math import story_words as w
from mamba2_math.registry import story
from mamba2_math.stories.writing import DOINGS, Story, _many, article, cap
from mamba2_math.story_words import PAST, THIRD

PER = (  # a thing, its parts, a number of parts or 0 for any
    ("spider", "legs", 8),
    ("dog", "legs", 4),
    ("cat", "legs", 4),
    ("cow", "legs", 4),
    ("horse", "legs", 4),
    ("chicken", "legs", 2),
    ("bird", "wings", 2),
    ("ant", "legs", 6),
    ("insect", "legs", 6),
    ("octopus", "arms", 8),
    ("car", "wheels", 4),
    ("bicycle", "wheels", 2),
    ("tricycle", "wheels", 3),
    ("table", "legs", 4),
    ("chair", "legs", 4),
    ("bike", "wheels", 2),
    ("class", "students", 0),
    ("room", "windows", 0),
    ("house", "windows", 0),
    ("page", "photos", 0),
    ("shelf", "books", 0),
    ("row", "seats", 0),
    ("team", "players", 0),
    ("table", "chairs", 0),
    ("bus", "students", 0),
    ("tent", "campers", 0),
    ("tree", "apples", 0),
    ("garden", "flowers", 0),
    ("floor", "rooms", 0),
    ("shirt", "buttons", 0),
    ("flower", "petals", 0),
    ("bush", "roses", 0),
    ("hive", "bees", 0),
    ("nest", "eggs", 0),
    ("cake", "candles", 0),
    ("pizza", "slices", 0),
    ("van", "people", 0),
    ("boat", "people", 0),
    ("vase", "flowers", 0),
    ("album", "pictures", 0),
    ("book", "pages", 0),
    ("box", "crayons", 0),
    ("building", "apartments", 0),
    ("month", "lessons", 0),
    ("song", "minutes", 0),
    ("lesson", "minutes", 0),
    ("necklace", "beads", 0),
    ("bracelet", "beads", 0),
    ("train car", "passengers", 0),
    ("basket", "eggs", 0),
    ("classroom", "desks", 0),
    ("train", "wagons", 0),
    ("hand", "fingers", 5),
    ("week", "days", 7),
    ("day", "hours", 24),
    ("hour", "minutes", 60),
    ("minute", "seconds", 60),
    ("dozen", "eggs", 12),
    ("year", "months", 12),
    ("triangle", "sides", 3),
    ("square", "sides", 4),
    ("starfish", "arms", 5),
    ("pair of shoes", "shoes", 2),
)


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
        d.say(
            f"{article(one)} has {mn} {parts}.",
            f"Each {one} has {mn} {parts}.",
            f"There are {mn} {parts} in {article(one)}."
            if one not in ("spider", "dog", "cat")
            else f"One {one} has {mn} {parts}.",
        )
        d.end(
            f"How many {parts} do {kn} {ones} have?",
            f"How many {parts} are there in {kn} {ones}?",
            f"How many {parts} do {kn} {ones} have in total?",
            f"How many {parts} do {kn} {ones} have altogether?",
        )
        d.add("product", f"The {ones} have @ {parts}.", k, "*", m)
        return
    if fixed and r < 0.55 and fixed not in (7, 24, 60):
        d.end(
            f"How many {parts} do {kn} {ones} have?",
            f"How many {parts} do {kn} {ones} have in total?",
            f"How many {parts} are on {kn} {ones}?",
        )
        d.add("product", f"The {ones} have @ {parts}.", k, "*", m)
        return
    if fixed in (7, 24, 60, 12, 2, 3, 5):
        d.end(
            f"How many {parts} are in {kn} {ones}?",
            f"How many {parts} are there in {kn} {ones}?",
            f"{kn} {ones} have how many {parts}?",
        )
        d.add("product", f"The {ones} have @ {parts}.", k, "*", m)
        return
    where = d.pick(
        "a school",
        "a building",
        "the hall",
        "a town",
        "the park",
        "a store",
        "the house",
        "a hotel",
        "the library",
        "a farm",
    )
    r = d._rng.random()
    backward = r > 0.8
    if backward:
        d.say(
            f"There are {d.n(total)} {parts} in {kn} {ones}.",
            f"{kn} {ones} have {d.n(total)} {parts} in total.",
            f"{d.n(total)} {parts} are divided equally among {kn} {ones}.",
        )
        d.end(
            f"How many {parts} are in each {one}?",
            f"How many {parts} does each {one} have?",
            f"If every {one} has the same number, how many {parts} are in each {one}?",
        )
        d.add("quotient", f"Each {one} has @ {parts}.", total, "/", k)
        return
    if r > 0.68:
        d.say(
            f"There are {d.n(total)} {parts}. Each {one} has {mn} {parts}.",
            f"Each {one} {d.pick('holds', 'can hold', 'has')} {mn} {parts}. There are {d.n(total)} {parts} in total.",
        )
        d.end(
            f"How many {ones} are there?",
            f"How many {ones} are needed?",
            f"How many {ones} do they need?",
        )
        d.add("count", f"There are @ {ones}.", total, "/", m)
        return
    d.say(
        f"{where} has {kn} {ones} with {mn} {parts} in each {one}.",
        f"{where} has {kn} {ones}. Each {one} has {mn} {parts}.",
        f"There are {kn} {ones}, and each {one} has {mn} {parts}.",
        f"There are {kn} {ones} in {where}. Each {one} has {mn} {parts}.",
        f"There are {kn} {ones} with {mn} {parts} each.",
        f"{where} has {kn} {ones}, each with {mn} {parts}.",
        f"There are {mn} {parts} in each of the {kn} {ones}.",
        f"Each of {kn} {ones} has {mn} {parts}.",
    )
    value = d.add("product", f"The {ones} have @ {parts}.", k, "*", m)
    r = d._rng.random()
    if r < 0.6:
        d.end(
            f"How many {parts} are there in total?",
            f"How many {parts} are there altogether?",
            f"How many {parts} are there?",
            f"How many {parts} are there in all?",
            f"What is the total number of {parts}?",
            f"How many {parts} are in {where}?"
            if where in d.text[-1].lower()
            else f"How many {parts} do the {ones} have?",
        )
    elif r < 0.8:
        j = d.number(1, value - 1)
        d.say(
            f"{d.n(j)} of the {parts} are {d.pick('gone', 'missing', 'broken', 'new', 'old', 'absent', 'taken', 'empty')}."
        )
        word = d.text[-1][:-1].split()[-1]
        d.end(f"How many {parts} are not {word}?")
        d.add("rest", f"Then @ {parts} are not {word}.", value, "-", j)
    else:
        j = d.number(2, 30)
        d.say(
            f"{d.pick('Then', 'Later,', 'This year,')} {d.n(j)} more {parts} {d.pick('are added', 'come', 'join')}."
        )
        d.end(f"How many {parts} are there now?", f"How many {parts} are there then?")
        d.add("plus", f"Then there are @ {parts}.", value, "+", j)


@story(3)
def legs(d: Story) -> None:
    """Two kinds with their numbers of legs or wheels."""
    what, kinds_ = d.pick(
        (
            "legs",
            (
                ("cow", 4),
                ("chicken", 2),
                ("horse", 4),
                ("duck", 2),
                ("dog", 4),
                ("cat", 4),
                ("sheep", 4),
                ("spider", 8),
                ("bird", 2),
                ("pig", 4),
                ("hen", 2),
                ("goat", 4),
                ("ant", 6),
                ("goose", 2),
                ("rabbit", 4),
            ),
        ),
        (
            "wheels",
            (
                ("car", 4),
                ("bike", 2),
                ("bicycle", 2),
                ("tricycle", 3),
                ("motorcycle", 2),
                ("truck", 6),
                ("scooter", 2),
            ),
        ),
    )
    (a, i), (b, j) = d._rng.sample(kinds_, 2)
    if i == j and d.chance(0.7):
        raise ValueError("the same")
    special = {"sheep": "sheep", "goose": "geese"}
    aa, bb = special.get(a) or w._plural(a), special.get(b) or w._plural(b)
    x, y = d.number(2, 20), d.number(2, 20)
    actor = d.actor()
    have = w.conjugate(d.pick("have", "have", "see", "count", "own"))[d.form(actor)]
    d.say(
        f"{actor.first} {have} {d.n(x)} {aa} and {d.n(y)} {bb}.",
        f"There are {d.n(x)} {aa} and {d.n(y)} {bb} {'on a farm' if what == 'legs' else 'in a garage'}.",
        f"{'On a farm' if what == 'legs' else 'In a parking lot'} there are {d.n(x)} {aa} and {d.n(y)} {bb}.",
    )
    group = "animals" if what == "legs" else "vehicles"
    d.end(
        f"How many {what} are there in total?",
        f"How many {what} do the {group} have in total?",
        f"How many {what} do they have altogether?",
        f"How many {what} are there altogether?",
        f"How many {what} do all the {group} have?",
        f"How many {what} are there?",
        f"What is the total number of {what}?",
    )
    p = d.add("product", f"The {aa} have @ {what}.", x, "*", i)
    q = d.add("product", f"The {bb} have @ {what}.", y, "*", j)
    d.add("sum", f"In total there are @ {what}.", p, "+", q)


@story(6)
def rate(d: Story) -> None:
    """So many a day, for so many days; in weeks; the time for a total."""
    actor = d.actor()
    verb, things = d.of(DOINGS)
    form = d.form(actor)
    m, k = (
        (d.number(2, 15), d.number(2, 12)) if d.chance(0.7) else (d.number(5, 40), d.number(2, 20))
    )
    one, many = d.pick(
        ("day", "days"),
        ("day", "days"),
        ("day", "days"),
        ("hour", "hours"),
        ("week", "weeks"),
        ("minute", "minutes"),
        ("month", "months"),
        ("night", "nights"),
        ("morning", "mornings"),
    )
    mn, who = d.n(m), d.who(actor)
    a = "an" if one == "hour" else "a"
    verbs = w.conjugate(verb)[form]
    per = d.pick(f"{a} {one}", f"each {one}", f"every {one}", f"per {one}", f"every {one}")
    d.say(
        f"{actor.first} {verbs} {mn} {things} {per}.",
        f"{actor.first} {verbs} {mn} {things} {per}.",
        f"{d.pick('Each', 'Every')} {one} {actor.first} {verbs} {mn} {things}.",
        f"{actor.first} can {verb} {mn} {things} {per}.",
    )
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
        d.end(
            f"How many {things} {does} {who} {verb} in {kn}?",
            f"How many {things} {does} {who} {verb} in {kn}?",
            f"How many {things} will {who} {verb} in {kn}?",
            f"How many {things} will {who} {verb} {d.pick('after', 'in')} {kn}?",
            f"How many {things} can {who} {verb} in {kn}?",
            f"How many {things} will {who} have {w.conjugate(verb)[PAST] if verb not in ('swim', 'write', 'run', 'see', 'ride', 'drive', 'take', 'eat', 'draw', 'do', 'drink') else 'done'} after {kn}?",
            f"In {kn}, how many {things} {does} {who} {verb}?",
        )
        d.add(
            "total",
            f"In {kn.replace('one week', 'a week')} it is @ {things}."
            if kn.startswith(("a ", "one w")) or k == 12
            else f"In {k} {many if one in ('hour', 'week', 'minute', 'month') else 'days'} it is @ {things}.",
            k,
            "*",
            m,
        )
    elif r < 0.6:
        total = k * m
        d.end(
            f"How many {many} will it take to {verb} {d.n(total)} {things}?",
            f"How many {many} {does} {who} need to {verb} {d.n(total)} {things}?",
            f"How long will it take {actor.him} to {verb} {d.n(total)} {things}?",
            f"In how many {many} will {who} {verb} {d.n(total)} {things}?",
            f"How many {many} does it take to {verb} {d.n(total)} {things}?",
        )
        d.add("time", f"It takes @ {many}.", total, "/", m)
    elif r < 0.75:
        total = k * m + d.size(1, 60)
        goal = d.pick(
            f"{who} {w.conjugate('want')[form]} to {verb} {d.n(total)} {things}.",
            f"{cap(actor.his)} goal is {d.n(total)} {things}.",
        )
        if things == "pages":
            goal = f"The book has {d.n(total)} pages."
        d.text.insert(
            d.pick(0, 1) if things == "pages" and not actor.first.startswith("a ") else 1, cap(goal)
        )
        d.end(
            f"How many {things} are left after {d.n(k)} {many}?",
            f"How many {things} are left to {verb} after {d.n(k)} {many}?",
            f"After {d.n(k)} {many}, how many {things} are left?",
            f"How many more {things} {does} {who} have to {verb} after {d.n(k)} {many}?",
        )
        s = d.add("total", f"In {k} {many} it is @ {things}.", k, "*", m)
        d.add("left", f"There are @ {things} left.", total, "-", s)
    else:
        other = d.someone()
        j = d.number(1, 15)
        times = d.chance(0.4)
        if times:
            words, j = d.of(w.MULTIPLES)
            d.say(
                f"{other.name} {w.conjugate(verb)[PAST if d.past else THIRD]} {words} as many {per}.",
                f"{other.name} {w.conjugate(verb)[PAST if d.past else THIRD]} {words} as many {things}.",
            )
            o = d.add("times", f"For {other.name} it is @ {things}.", m, "*", j)
        else:
            d.say(
                f"{other.name} {w.conjugate(verb)[PAST if d.past else THIRD]} {d.n(j)} more {per}.",
                f"{other.name} {w.conjugate(verb)[PAST if d.past else THIRD]} {d.n(j)} more {things} {per}.",
            )
            o = d.add("more", f"For {other.name} it is @ {things}.", m, "+", j)
        d.end(
            f"How many {things} does {other.name} {verb} in {d.n(k)} {many}?",
            f"How many {things} will {other.name} {verb} in {d.n(k)} {many}?",
        )
        d.add("total", f"In {k} {many} it is @ {things}.", k, "*", o)


@story(5)
def travel(d: Story) -> None:
    """Speed, time, distance; there and back; the rest of the way."""
    unit, per = d.pick(
        ("miles", "miles per hour"),
        ("miles", "miles an hour"),
        ("kilometers", "kilometers per hour"),
        ("km", "km per hour"),
        ("km", "km/h"),
        ("miles", "mph"),
    )
    r = d._rng.random()
    subject = d.pick(
        "a train",
        "a car",
        "a bus",
        "a plane",
        "a truck",
        "a boat",
        "a ship",
        "a cyclist",
        "a bike",
        d.someone().name,
        d.someone().name,
        "a runner",
        "a ferry",
    )
    name = subject.replace("a ", "the ", 1) if subject.startswith("a ") else subject
    it = (
        "it"
        if subject.startswith("a ") and "cyclist" not in subject and "runner" not in subject
        else name
    )
    go = d.pick(
        "travel",
        "drive"
        if "plane" not in subject and "train" not in subject and "boat" not in subject
        else "move",
        "go",
        "move",
        "travel",
        "run" if "train" in subject else "go",
    )
    if r < 0.55:
        speed = d.pick(d.number(2, 20), d.number(1, 12) * 10, d.number(4, 24) * 5)
        hours = d.number(2, 9)
        verb = w.conjugate(go)[PAST if d.past else THIRD]
        d.say(
            f"{subject} {verb} at {speed} {per}.",
            f"{subject} {verb} at a speed of {speed} {per}.",
            f"{subject} {verb} {speed} {unit} {d.pick('an hour', 'in one hour', 'every hour', 'per hour')}.",
            f"The speed of {subject} is {speed} {per}.",
        )
        q = d._rng.random()
        if q < 0.55:
            d.end(
                f"How far does {it} {go} in {d.n(hours)} hours?",
                f"How many {unit} does {it} {go} in {d.n(hours)} hours?",
                f"How far will {it} {go} in {d.n(hours)} hours?",
                f"What distance does {it} cover in {d.n(hours)} hours?",
                f"How far can {it} {go} in {d.n(hours)} hours?",
                f"How many {unit} will {it} {go} in {d.n(hours)} hours?",
                f"How far has {it} gone after {d.n(hours)} hours?",
            )
            d.add("distance", f"In {hours} hours it is @ {unit}.", speed, "*", hours)
        elif q < 0.8:
            total = speed * hours
            d.end(
                f"How long does {it} need for {total} {unit}?",
                f"How many hours does {it} need to {go} {total} {unit}?",
                f"How long does it take to {go} {total} {unit}?",
                f"How many hours will it take to {go} {total} {unit}?",
            )
            d.add("time", "It takes @ hours.", total, "/", speed)
        else:
            total = speed * hours + d.size(2, 100)
            d.say(
                f"The trip is {total} {unit} long.",
                f"The distance is {total} {unit}.",
                f"The whole way is {total} {unit}.",
            )
            d.end(
                f"How many {unit} are left after {d.n(hours)} hours?",
                f"How far is it still after {d.n(hours)} hours?",
            )
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
            d.say(
                f"{actor.first} {w.conjugate(verb)[form]} {a} {unit} to {places} and {a} {unit} back{' every day' if days > 1 else ''}.",
                f"{actor.first} {w.conjugate(verb)[form]} {a} {unit} to {places} and the same way back{' every day' if days > 1 else ''}.",
                f"{d.pick('Every day ', 'Each day ') if days > 1 else ''}{actor.first} {w.conjugate(verb)[form]} {a} {unit} to {places} and {a} {unit} back home.",
            )
        else:
            d.say(
                f"{actor.first} {w.conjugate(verb)[form]} {a} {unit} to {places} and then {b} {unit} to a friend's house{' every day' if days > 1 else ''}.",
                f"{d.pick('Every day ', 'Each day ') if days > 1 else ''}{actor.first} {w.conjugate(verb)[form]} {a} {unit} in the morning and {b} {unit} in the evening.",
            )
        s = d.add("sum", f"{'In a day' if days > 1 else 'In total'} it is @ {unit}.", a, "+", b)
        who = d.who(actor)
        if days > 1:
            d.end(
                f"How many {unit} {actor.does} {who} {verb} in {d.n(days)} days?",
                f"How far {actor.does} {who} {verb} in {d.n(days)} days?",
                f"How many {unit} is that in {d.n(days)} days?",
            )
            d.add("total", f"In {days} days it is @ {unit}.", days, "*", s)
        else:
            d.end(
                f"How many {unit} {actor.does} {who} {verb} in total?",
                f"How far {actor.does} {who} {verb} altogether?",
                f"How many {unit} {'did' if d.past else actor.does} {who} {verb} in all?",
            )
    else:
        speed, hours = d.number(3, 80), d.number(2, 9)
        total = speed * hours
        d.say(
            f"{subject} {w.conjugate(go)[PAST]} {total} {unit} in {d.n(hours)} hours.",
            f"{subject} {w.conjugate('take')[THIRD]} {d.n(hours)} hours for {total} {unit}.",
            f"It takes {subject} {d.n(hours)} hours to {go} {total} {unit}.",
        )
        d.end(
            f"How many {unit} per hour is that?",
            f"What is the speed in {unit} per hour?",
            f"How fast does {it} {go}?",
            f"What is {'its' if it == 'it' else 'the'} average speed?",
            f"What was the speed of {name}?",
        )
        d.add("speed", f"In one hour it is @ {unit}.", total, "/", hours)


@story(3)
def machine(d: Story) -> None:
    """A machine, a tap, a bakery: so many a minute, and what is there after a time."""
    what, verb, things = d.pick(
        ("a machine", "make", "toys"),
        ("a printer", "print", "pages"),
        ("a factory", "make", "cars"),
        ("a bakery", "bake", "loaves of bread"),
        ("a machine", "pack", "boxes"),
        ("a pump", "fill in", "liters"),
        ("a tap", "fill in", "liters of water"),
        ("a hen", "lay", "eggs"),
        ("a shop", "sell", "cups of coffee"),
        ("a tree", "grow", "apples"),
        ("a factory", "produce", "bottles"),
        ("a cow", "give", "liters of milk"),
        ("a store", "sell", "books"),
        ("a restaurant", "serve", "meals"),
        ("a robot", "build", "chairs"),
        ("a hose", "pour in", "gallons of water"),
        ("a truck", "carry", "boxes"),
        ("a dog", "eat", "treats"),
        ("a plant", "grow", "centimeters"),
        ("a snail", "crawl", "meters"),
    )
    one, many = d.pick(
        ("minute", "minutes"),
        ("hour", "hours"),
        ("day", "days"),
        ("week", "weeks"),
        ("day", "days"),
    )
    m, k = d.number(2, 20) if d.chance(0.8) else d.number(2, 9) * 10, d.number(2, 12)
    name = what.replace("a ", "the ", 1)
    it = d.pick("it", name)
    per = d.pick(
        f"{'an' if one == 'hour' else 'a'} {one}", f"each {one}", f"every {one}", f"per {one}"
    )
    verbs = w.conjugate(verb)[THIRD]
    r = d._rng.random()
    if things.startswith(("liters", "gallons")) and "milk" not in things and r < 0.75:
        unit = things.split()[0]
        vessel = d.pick(
            "tank", "pool", "bathtub", "barrel", "pond", "bucket", "aquarium", "water tank"
        )
        whole = m * k + d.size(1, 90)
        d.say(
            f"a {vessel} holds {whole} {unit} of water.",
            f"a {vessel} can hold {whole} {unit}.",
            f"There is room for {whole} {unit} of water in a {vessel}.",
        )
        if r < 0.25:
            whole = m * k
            d.text[-1] = f"A {vessel} holds {whole} {unit} of water."
            d.say(
                f"It is filled with {d.n(m)} {unit} {per}.",
                f"{what} fills in {d.n(m)} {unit} {per}.",
            )
            d.end(
                f"How many {many} does it take to fill it?",
                f"After how many {many} is it full?",
                f"How many {many} until the {vessel} is full?",
                f"How long does it take to fill the {vessel}?",
            )
            d.add("time", f"It takes @ {many}.", whole, "/", m)
            return
        empties = r > 0.55
        if empties:
            d.text[-1] = f"There are {whole} {unit} of water in a {vessel}."
            d.say(
                f"It loses {d.n(m)} {unit} {per}.",
                f"{d.n(m)} {unit} leak out {per}.",
                f"{d.n(m)} {unit} flow out {per}.",
            )
            d.end(
                f"How many {unit} are left after {d.n(k)} {many}?",
                f"How much water is left after {d.n(k)} {many}?",
                f"How many {unit} of water are still in it after {d.n(k)} {many}?",
            )
        else:
            d.say(
                f"It is filled with {d.n(m)} {unit} {per}.",
                f"{what} fills in {d.n(m)} {unit} {per}.",
                f"{d.n(m)} {unit} flow in {per}.",
            )
            d.end(
                f"How many {unit} are missing after {d.n(k)} {many}?",
                f"How much water is missing after {d.n(k)} {many}?",
                f"How many more {unit} are needed to fill it after {d.n(k)} {many}?",
                f"How much water is still missing after {d.n(k)} {many}?",
                f"How many {unit} still fit in after {d.n(k)} {many}?",
            )
        s = d.add("total", f"In {k} {many} it is @ {unit}.", k, "*", m)
        d.add("left", f"There are @ {unit} left.", whole, "-", s)
        return
    count, group = 1, what
    if d.chance(0.3):
        count = d.number(2, 9)
        noun = what[2:]
        group = f"{d.n(count)} {w._plural(noun)}"
    d.say(
        f"{what} {verbs} {d.n(m)} {things} {per}.",
        f"{what} can {verb} {d.n(m)} {things} {per}.",
        f"{d.pick('Each', 'Every')} {one} {what} {verbs} {d.n(m)} {things}.",
    )
    if count > 1:
        d.end(
            f"How many {things} do {group} {verb} in {d.n(k)} {many}?",
            f"How many {things} can {group} {verb} in {d.n(k)} {many}?",
        )
        s = d.add("all", f"Together it is @ {things} in one {one}.", count, "*", m)
        d.add("total", f"In {k} {many} it is @ {things}.", k, "*", s)
    elif r < 0.35 and things not in ("centimeters", "meters"):
        d.end(
            f"How many {many} does {it} need for {d.n(m * k)} {things}?",
            f"How long does it take to {verb} {d.n(m * k)} {things}?",
            f"How many {many} does it take to {verb} {d.n(m * k)} {things}?",
        )
        d.add("time", f"It takes @ {many}.", m * k, "/", m)
    else:
        d.end(
            f"How many {things} does {it} {verb} in {d.n(k)} {many}?",
            f"How many {things} can {it} {verb} in {d.n(k)} {many}?",
            f"How many {things} will {it} {verb} in {d.n(k)} {many}?",
        )
        d.add("total", f"In {k} {many} it is @ {things}.", k, "*", m)
