"""Stories of ages, times, shapes, temperatures and supplies; and plain arithmetic."""

# ruff: noqa: E501  (a wording is one line, however long)

from __future__ import annotations

from mamba2_math import story_words as w
from mamba2_math.registry import story
from mamba2_math.stories.writing import (
    Actor,
    Story,
    article,
    ask_left,
    boxed,
    cap,
    relate,
    shared,
    sold,
    some,
    wanted,
)
from mamba2_math.story_words import BASE, PAST, THIRD


@story(4)
def ages(d: Story) -> None:
    a = d.someone()
    i = d.chance(0.12)
    if i:
        a = Actor("I", "I", "I", "my", "me", BASE)
    age = d.number(3, 40)
    other = (
        d.someone().name
        if d.chance(0.45)
        else f"{a.his if i else d.pick(a.his, a.his, a.owner)} {d.of(w.RELATIONS)}"
    )
    is_ = "am" if i else "is"
    than = a.him if i or d.chance(0.2) else a.name
    d.say(
        f"{a.name} {is_} {d.n(age)} years old.",
        f"{a.name} {is_} {d.n(age)}.",
        f"{a.name} {is_} {d.n(age)} years old.",
    )
    r = d._rng.random()
    if r < 0.2:
        k = d.number(2, 30)
        if d.chance(0.55):
            d.end(
                f"How old will {a.he} be in {d.n(k)} years?",
                f"How old will {a.name} be in {d.n(k)} years?",
                f"How old will {a.name} be {d.n(k)} years from now?",
                f"What will be {a.his} age in {d.n(k)} years?",
            )
            d.add("later", f"In {k} years {a.name} will be @ years old.", age, "+", k)
        else:
            k = d.number(1, age - 1)
            were = "was"
            d.end(
                f"How old {were} {a.he} {d.n(k)} years ago?",
                f"How old {were} {a.name} {d.n(k)} years ago?",
                f"What {were} {a.his} age {d.n(k)} years ago?",
            )
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
        d.end(
            "What is the sum of their ages?",
            "How old are they together?",
            "What is the total of their ages?",
            "How many years old are they together?",
        )
        d.add("sum", "Together they are @ years old.", age, "+", value)
    else:
        k = d.number(2, 20)
        d.end(
            f"How old will {other} be in {d.n(k)} years?",
            f"How old will {other} be {d.n(k)} years from now?",
        )
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
        what = d.pick(
            "a movie",
            "a flight",
            "a concert",
            "a trip",
            "a game",
            "a lesson",
            "the train ride",
            "a show",
            "a meeting",
            "the drive",
            "the bus ride",
        )
        d.say(
            f"{what} {'lasted' if d.past else 'lasts'} {hours} and {d.n(m)} minutes.",
            f"{what} is {hours} and {d.n(m)} minutes long.",
            f"{what} takes {hours} and {d.n(m)} minutes.",
        )
        d.end(
            "How many minutes is that?",
            "How many minutes is that in total?",
            "How long is it in minutes?",
            "How many minutes does it last?",
            "How many minutes is it long?",
        )
        x = d.add("hours", f"{h} {'hour is' if h == 1 else 'hours are'} @ minutes.", h, "*", 60)
        d.add("sum", "In total it is @ minutes.", x, "+", m)
    elif r < 0.5:
        big, small, k = d.pick(
            ("hour", "minutes", 60),
            ("day", "hours", 24),
            ("week", "days", 7),
            ("minute", "seconds", 60),
            ("year", "months", 12),
            ("meter", "centimeters", 100),
            ("foot", "inches", 12),
            ("kilometer", "meters", 1000),
            ("week", "days", 7),
            ("dollar", "cents", 100),
            ("kilogram", "grams", 1000),
            ("yard", "feet", 3),
        )
        bigs = "feet" if big == "foot" else w._plural(big)
        j = d.number(2, 9)
        if d.chance(0.75):
            d.end(
                f"How many {small} are in {d.n(j)} {bigs}?",
                f"How many {small} are there in {d.n(j)} {bigs}?",
                f"How many {small} is {d.n(j)} {bigs}?",
                f"{d.n(j)} {bigs} are how many {small}?",
                f"Convert {d.n(j)} {bigs} to {small}.",
            )
            d.add("convert", f"{j} {bigs} are @ {small}.", j, "*", k)
        else:
            d.end(
                f"How many {bigs} are {j * k} {small}?",
                f"{j * k} {small} are how many {bigs}?",
                f"How many {bigs} is {j * k} {small}?",
            )
            d.add("convert", f"{j * k} {small} are @ {bigs}.", j * k, "/", k)
    elif r < 0.8:
        tasks = d._rng.sample(
            (
                "homework",
                "piano practice",
                "math",
                "reading",
                "cleaning the room",
                "dinner",
                "a shower",
                "walking the dog",
                "playing outside",
                "science",
                "breakfast",
                "watching TV",
                "exercise",
                "spelling",
                "art",
            ),
            d.pick(2, 2, 3),
        )
        values = [d.number(1, 12) * 5 if d.chance(0.8) else d.number(2, 59) for _ in tasks]
        verb = w.conjugate("spend")[form]
        listed = [f"{d.n(v)} minutes on {t}" for v, t in zip(values, tasks)]
        d.say(f"{actor.first} {verb} {', '.join(listed[:-1])} and {listed[-1]}.")
        s = values[0]
        for i, v in enumerate(values[1:], 1):
            s = d.add(
                "sum",
                "In total it is @ minutes." if i == len(values) - 1 else "So far it is @ minutes.",
                s,
                "+",
                v,
            )
        if d.chance(0.3):
            total = s + d.number(1, 12) * 5
            d.say(
                f"{who} {w.conjugate('have')[form]} {total} minutes.",
                f"{who} {w.conjugate('have')[form]} {total} minutes in total.",
            )
            d.end(
                "How many minutes are left?",
                f"How many minutes {actor.does} {who} have left?",
                "How much time is left, in minutes?",
            )
            d.add("left", "There are @ minutes left.", total, "-", s)
        else:
            d.end(
                "How many minutes is that in total?",
                f"How many minutes {'did' if d.past else actor.does} {who} spend in total?",
                "How many minutes is that altogether?",
                f"How much time in minutes {'did' if d.past else actor.does} {who} spend?",
            )
    else:
        m, k = d.number(2, 30), d.number(2, 12)
        job, things = d.pick(
            ("read a page", "pages"),
            ("bake a cake", "cakes"),
            ("wash a car", "cars"),
            ("paint a picture", "pictures"),
            ("solve a problem", "problems"),
            ("make a bracelet", "bracelets"),
            ("fold a shirt", "shirts"),
            ("fix a bike", "bikes"),
            ("plant a tree", "trees"),
            ("write a page", "pages"),
        )
        verb = job.split()[0]
        d.say(
            f"It takes {actor.name if actor.he not in ('I',) else 'me'} {d.n(m)} minutes to {job}.",
            f"{actor.first} {w.conjugate('need')[form]} {d.n(m)} minutes to {job}.",
            f"{actor.first} can {job} in {d.n(m)} minutes.",
        )
        d.end(
            f"How many minutes {actor.does} {who} need for {d.n(k)} {things}?",
            f"How long does it take to {verb} {d.n(k)} {things}?",
            f"How many minutes does it take to {verb} {d.n(k)} {things}?",
            f"How many minutes will {d.n(k)} {things} take?",
        )
        d.add("total", "It takes @ minutes.", k, "*", m)


@story(4)
def shapes(d: Story) -> None:
    unit = d.pick("meters", "meters", "feet", "cm", "centimeters", "inches", "m", "yards", "units")
    square = {"m": "square meters", "cm": "square centimeters"}.get(unit, f"square {unit}")
    thing = d.pick(
        "garden",
        "room",
        "rectangle",
        "rectangle",
        "field",
        "yard",
        "park",
        "playground",
        "floor",
        "rug",
        "poster",
        "table",
        "picture",
        "pool",
        "wall",
        "lawn",
    )
    r = d._rng.random()
    a, b = d.number(2, 20), d.number(2, 20)
    if d.chance(0.2):
        a, b = d.number(2, 12) * 5, d.number(2, 9)
    if r < 0.62:
        if a < b:
            a, b = b, a
        shape = (
            thing
            if thing == "rectangle"
            else d.pick(f"rectangular {thing}", thing, f"rectangular {thing}")
        )
        d.say(
            f"a {shape} is {d.n(a)} {unit} long and {d.n(b)} {unit} wide.",
            f"a {shape} has a length of {d.n(a)} {unit} and a width of {d.n(b)} {unit}.",
            f"a {shape} measures {d.n(a)} {unit} by {d.n(b)} {unit}.",
            f"The length of a {shape} is {d.n(a)} {unit} and its width is {d.n(b)} {unit}.",
            f"a {shape} is {d.n(b)} {unit} wide and {d.n(a)} {unit} long.",
        )
        q = d._rng.random()
        if q < 0.45:
            d.end(
                "What is its area?",
                "What is the area?",
                f"What is the area of the {thing}?",
                f"How many {square} is the {thing}?",
                f"What is the area in {square}?",
                "Find the area.",
                "How big is the area?",
                f"Find the area of the {thing}.",
            )
            d.add("area", f"The area is @ {square}.", a, "*", b)
        elif q < 0.85:
            fence = d.chance(0.25)
            if fence:
                d.end(
                    f"How many {unit} of fence are needed to go around it?",
                    f"How much fence is needed to go around the {thing}?",
                    f"How long is a fence around the {thing}?",
                )
            else:
                d.end(
                    "What is its perimeter?",
                    "What is the perimeter?",
                    f"What is the perimeter of the {thing}?",
                    "Find the perimeter.",
                    f"How long is the way around the {thing}?",
                    f"What is the perimeter in {unit}?",
                )
            s = d.add("sides", f"Length and width are @ {unit}.", a, "+", b)
            d.add("perimeter", f"The perimeter is @ {unit}.", s, "*", 2)
        else:
            price = d.number(2, 9)
            d.say(
                f"{d.pick('Grass', 'Carpet', 'Paint', 'A tile')} costs {d.usd(price)} per {square.replace('feet', 'foot').rstrip('s')}."
            )
            d.end(
                f"How much does it cost to cover the {thing}?",
                "How much does it cost in total?",
                f"What is the cost for the whole {thing}?",
            )
            s = d.add("area", f"The area is @ {square}.", a, "*", b)
            d.add("cost", "It costs $@.", s, "*", price)
    elif r < 0.82:
        d.say(
            f"The side of a square is {d.n(a)} {unit}{d.pick(' long', '')}.",
            f"a square has sides of {d.n(a)} {unit}.",
            f"a square has a side length of {d.n(a)} {unit}.",
            f"Each side of a square is {d.n(a)} {unit}.",
            f"a square {thing if thing != 'rectangle' else 'garden'} has sides of {d.n(a)} {unit}.",
        )
        if d.chance(0.5):
            d.end(
                "What is its area?",
                "What is the area?",
                "What is the area of the square?",
                "Find the area.",
            )
            d.add("area", f"The area is @ {square}.", a, "*", a)
        else:
            d.end(
                "What is its perimeter?",
                "What is the perimeter?",
                "What is the perimeter of the square?",
                "Find its perimeter.",
            )
            d.add("perimeter", f"The perimeter is @ {unit}.", a, "*", 4)
    elif r < 0.92:
        c = d.number(2, 20)
        d.say(
            f"The sides of a triangle are {a}, {b} and {c} {unit} long.",
            f"a triangle has sides of {a} {unit}, {b} {unit} and {c} {unit}.",
        )
        d.end(
            "What is its perimeter?",
            "What is the perimeter?",
            "What is the perimeter of the triangle?",
        )
        s = d.add("sides", f"The first two sides are @ {unit}.", a, "+", b)
        d.add("perimeter", f"The perimeter is @ {unit}.", s, "+", c)
    else:
        d.say(
            f"a rectangle has an area of {a * b} {square} and a length of {a} {unit}.",
            f"The area of a rectangle is {a * b} {square}. Its length is {a} {unit}.",
        )
        d.end("What is its width?", "How wide is it?", "What is the width?")
        d.add("width", f"The width is @ {unit}.", a * b, "/", a)


@story(3)
def level(d: Story) -> None:
    """A temperature, a height, a score that goes up and down."""
    kind = d.pick("temperature", "floor", "tank", "plant", "score", "weight", "rope", "battery")
    value = d.size(10, 100)
    steps = d.pick(1, 1, 2, 2, 3)
    subject, unit, ups, downs, ask = {
        "temperature": (
            "The temperature",
            "degrees",
            ("rose by", "went up", "increased by", "rose"),
            ("fell by", "dropped", "went down", "dropped by"),
            (
                "What is the temperature now?",
                "What was the temperature then?",
                "What is the temperature in the end?",
            ),
        ),
        "floor": (
            "An elevator",
            "floor",
            ("went up",),
            ("went down",),
            ("On which floor is it now?", "What floor is it on now?"),
        ),
        "tank": (
            "A tank",
            "liters",
            ("was filled with", "got"),
            ("lost", "leaked"),
            (
                "How many liters are in it now?",
                "How much water is in the tank now?",
                "How many liters of water does it hold now?",
            ),
        ),
        "plant": (
            "A plant",
            "cm",
            ("grew", "grew another", "grew by"),
            ("lost", "was cut by"),
            ("How tall is it now?", "How tall is the plant now?", "What is its height now?"),
        ),
        "score": (
            "A player",
            "points",
            ("won", "gained", "scored", "got"),
            ("lost",),
            (
                "How many points does the player have now?",
                "What is the score now?",
                "How many points are there in the end?",
            ),
        ),
        "weight": (
            "A dog",
            "pounds",
            ("gained",),
            ("lost",),
            (
                "How much does it weigh now?",
                "How many pounds does the dog weigh now?",
                "What is its weight now?",
            ),
        ),
        "rope": (
            "A rope",
            "meters",
            ("was extended by",),
            ("was shortened by", "was cut by"),
            (
                "How long is it now?",
                "How long is the rope now?",
                "What is the length of the rope now?",
            ),
        ),
        "battery": (
            "A phone battery",
            "percent",
            ("gained", "was charged by"),
            ("lost", "used"),
            ("How many percent are left?", "What is the charge now?"),
        ),
    }[kind]
    opening = {
        "temperature": d.pick(
            "{s} was {n} degrees in the morning.",
            "{s} was {n} degrees.",
            "In the morning the temperature was {n} degrees.",
            "At noon the temperature was {n} degrees.",
        ),
        "floor": "{s} was on floor {n}.",
        "tank": d.pick("{s} had {n} liters of water.", "{s} contained {n} liters of water."),
        "plant": d.pick("{s} was {n} cm tall.", "{s} had a height of {n} cm."),
        "score": d.pick("{s} had {n} points.", "{s} started with {n} points."),
        "weight": "{s} weighed {n} pounds.",
        "rope": "{s} was {n} meters long.",
        "battery": "{s} was at {n} percent.",
    }[kind]
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
            things = (
                things.rstrip("s")
                if kind in ("floor", "temperature", "score", "weight", "tank", "rope")
                else things
            )
        event = f"{it if d.chance(0.7) else subject.lower().replace('a ', 'the ', 1).replace('an ', 'the ', 1)} {verb} {d.n(k)} {things}"
        when = d.pick(
            "", "Then ", "Later ", "In the evening ", "After that, ", "The next day ", "By noon "
        )
        if i and d.chance(0.5):
            d.text[-1] = (
                f"{d.text[-1][:-1]}{d.pick(' and then', ' and', ', then', ', but then')} {event}."
            )
        else:
            d.text.append(cap(f"{when}{event}."))
        value = d.add(
            "up" if op == "+" else "down",
            f"Then it is @ {'' if kind == 'floor' else unit}.".replace(" .", ".")
            if kind != "floor"
            else "Then it is on floor @.",
            value,
            op,
            k,
        )
    d.end(*ask)


@story(3)
def needed(d: Story) -> None:
    """Recipes and supplies: so many for each, for so many; how many more."""
    actor = d.actor()
    who, form = d.who(actor), d.form(actor)
    what, ing = d.pick(
        ("cake", "eggs"),
        ("cake", "cups of flour"),
        ("pie", "apples"),
        ("batch of cookies", "cups of sugar"),
        ("pizza", "tomatoes"),
        ("sandwich", "slices of bread"),
        ("salad", "tomatoes"),
        ("glass of lemonade", "lemons"),
        ("smoothie", "bananas"),
        ("dress", "meters of cloth"),
        ("table", "boards"),
        ("bracelet", "beads"),
        ("goody bag", "candies"),
        ("pot of soup", "carrots"),
        ("birdhouse", "nails"),
        ("bouquet", "flowers"),
        ("omelet", "eggs"),
        ("toy car", "wheels"),
        ("pancake breakfast", "eggs"),
        ("child", "pencils"),
        ("student", "sheets of paper"),
        ("guest", "cupcakes"),
    )
    whats = {
        "batch of cookies": "batches of cookies",
        "glass of lemonade": "glasses of lemonade",
        "pot of soup": "pots of soup",
        "child": "children",
    }.get(what) or w._plural(what)
    m, k = d.number(2, 12), d.number(2, 12)
    mn, kn = d.n(m), d.n(k)
    person = what in ("child", "student", "guest")
    if person:
        if d.chance(0.5):
            k = d.number(5, 30)
            kn = d.n(k)
        d.say(
            f"Each {what} needs {mn} {ing}.",
            f"{actor.first} {w.conjugate('give')[form]} {mn} {ing} to each {what}.",
            f"Every {what} gets {mn} {ing}.",
        )
        d.say(f"There are {kn} {whats}.")
    else:
        d.say(
            f"{article(what)} needs {mn} {ing}.",
            f"{actor.first} {w.conjugate('need')[form]} {mn} {ing} for one {what}.",
            f"Each {what} needs {mn} {ing}.",
            f"It takes {mn} {ing} to make {article(what)}.",
            f"{actor.first} {w.conjugate('use')[form]} {mn} {ing} for each {what}.",
            f"{article(what)} takes {mn} {ing}.",
        )
        if d.chance(0.5):
            d.say(
                f"{actor.first if actor.first not in d.text[0].lower() and actor.first not in d.text[0] else who} {w.conjugate('make')[form]} {kn} {whats}.",
                f"{actor.name} {w.conjugate('want')[form]} to make {kn} {whats}.",
            )
    told = len(d.text) == 2
    total = d.add("product", f"For {k} {whats} it is @ {ing}.", k, "*", m)
    r = d._rng.random()
    if r < 0.45:
        d.end(
            f"How many {ing} are needed?"
            if told
            else f"How many {ing} are needed for {kn} {whats}?",
            f"How many {ing} {actor.does} {actor.name} need?"
            if told
            else f"How many {ing} {actor.does} {actor.name} need for {kn} {whats}?",
            f"How many {ing} are needed in total?"
            if told
            else f"How many {ing} are needed to make {kn} {whats}?"
            if not person
            else f"How many {ing} are needed for {kn} {whats}?",
        )
    else:
        if not told:
            d.say(f"{actor.name} {w.conjugate('want')[form]} to make {kn} {whats}.")
        if r < 0.75:
            have = d.number(1, total - 1)
            d.say(
                f"{actor.name} {w.conjugate('have')[form]} {d.n(have)} {ing}.",
                f"{actor.name} already {w.conjugate('have')[form]} {d.n(have)} {ing}.",
            )
            d.end(
                f"How many more {ing} {actor.does} {who} need?",
                f"How many more {ing} are needed?",
                f"How many {ing} are missing?",
            )
            d.add(
                "goal",
                f"{actor.name} still {'needs' if actor.form == THIRD else 'need'} @ {ing}.",
                total,
                "-",
                have,
            )
        else:
            have = total + d.number(1, 40)
            d.say(f"{actor.name} {w.conjugate('have')[form]} {d.n(have)} {ing}.")
            d.end(
                f"How many {ing} are left?",
                f"How many {ing} {actor.does} {who} have left?",
                f"How many {ing} will be left?",
            )
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
    now = d.pick(
        f"Now {actor.he} {actor.has} {amount(end)}{d.pick('', ' left')}.",
        f"{cap(actor.he)} {'had' if d.past else actor.has} {amount(end)} left.",
        f"Now {actor.he} {actor.has} {amount(end)}.",
    )
    if d.chance(0.6):
        phrase = w.conjugate(
            d.pick(
                f"spend {amount(k)}",
                f"spend {amount(k)} on lunch",
                f"give {amount(k)} to {d.relative(actor)}",
            )
            if money
            else d.pick(
                f"give {amount(k)} to {d.relative(actor)}",
                f"lose {amount(k)}",
                f"sell {amount(k)}",
                f"give away {amount(k)}",
                f"use {amount(k)}",
                f"eat {amount(k)}" if x.food else f"break {amount(k)}",
            )
        )[form]
        op = "+"
    else:
        phrase = w.conjugate(
            d.pick(
                f"earn {amount(k)}",
                f"get {amount(k)} from {d.relative(actor)}",
                f"find {amount(k)}",
            )
            if money
            else d.pick(
                f"buy {d.n(k)} more",
                f"find {d.n(k)} more {many}",
                f"get {amount(k)} from {d.relative(actor)}",
                f"buy {d.n(k)} more {many}",
            )
        )[form]
        end += k
        now = f"Now {actor.he} {actor.has} {amount(end)}."
        op = "-"
    link = d.pick(
        f"{cap(actor.first)} {had} {start_}. {cap(actor.he)} {phrase}. {now}",
        f"{cap(actor.first)} {had} {start_}. {cap(actor.he)} {phrase} and now {actor.he} {actor.has} {amount(end)}.",
        f"{cap(actor.first)} {had} {start_} and {phrase}. {now}",
        f"After {actor.first} {phrase}, {actor.he} {had} {amount(end)}{' left' if op == '+' else ''}.",
    )
    d.text.append(link)
    q = "How much money" if money else f"How many {many}"
    d.end(
        f"{q} {does} {who} have at first?",
        f"{q} {does} {who} have at the start?",
        f"{q} did {who} have in the beginning?",
        f"{q} did {who} have before?",
        f"{q} did {who} start with?",
        f"{q} did {who} have at first?",
    )
    d.add("before", "At first it was $@." if money else f"At first it was @ {many}.", end, op, k)


@story(2.5)
def transfer(d: Story) -> None:
    """Two people; one gives some to the other."""
    a, b, x = d.someone(), d.someone(), d.noun()
    many = x.many
    p, q = d.size(5, 80), d.size(2, 80)
    k = d.number(1, min(p - 1, 25))
    give = "gave" if d.past else "gives"
    has = "had" if d.past else "has"
    d.say(
        f"{a.name} {has} {d.n(p)} {many} and {b.name} {has} {d.n(q)}.",
        f"{a.name} {has} {d.n(p)} {many} and {b.name} {has} {d.n(q)} {many}.",
        f"{a.name} {has} {d.n(p)} {many}. {b.name} {has} {d.n(q)} {many}.",
    )
    d.say(
        f"{a.name} {give} {d.n(k)} of them to {b.name}.",
        f"{a.name} {give} {b.name} {d.n(k)} {many if k > 1 else x.one}.",
        f"{a.name} {give} {d.n(k)} {many if k > 1 else x.one} to {b.name}.",
        f"Then {a.name} {give} {b.name} {d.n(k)}.",
    )
    r = d._rng.random()
    if r < 0.4:
        d.end(
            f"How many {many} does {b.name} have now?",
            f"How many does {b.name} have now?",
            f"How many {many} does {b.name} have then?",
        )
        d.add("gain", f"Then {b.name} has @ {many}.", q, "+", k)
    elif r < 0.7:
        d.end(
            f"How many {many} does {a.name} have now?", f"How many {many} does {a.name} have left?"
        )
        d.add("loss", f"Then {a.name} has @ {many} left.", p, "-", k)
    else:
        u = d.add("loss", f"Then {a.name} has @ {many} left.", p, "-", k)
        v = d.add("gain", f"Then {b.name} has @ {many}.", q, "+", k)
        if u == v:
            raise ValueError("the same")
        hi, lo, c, e = (u, v, a, b) if u > v else (v, u, b, a)
        d.end(
            f"How many more {many} does {c.name} have than {e.name} now?",
            f"How many more {many} does {c.name} now have than {e.name}?",
        )
        d.add("diff", f"{c.name} has @ more {many}.", hi, "-", lo)


@story(2.5)
def together(d: Story) -> None:
    """Two people's things put together, then used, packed or shared."""
    a, b, x = d.someone(), d.someone(), d.noun()
    verb = w.conjugate(
        d.pick("have", "have", "pick", "collect", "find", "bake", "make", "buy", "get")
        if x.food
        else d.pick("have", "have", "collect", "find", "make", "buy")
    )
    v = verb[PAST if d.past else THIRD]
    p, many = d.size(2, 60), x.many
    d.text.append(f"{a.name} {v} {d.n(p)} {many}.")
    if d.chance(0.5):
        q = d.size(2, 60)
        d.text[0] = d.pick(
            f"{a.name} {v} {d.n(p)} {many} and {b.name} {v} {d.n(q)}.",
            f"{a.name} {v} {d.n(p)} {many} and {b.name} {v} {d.n(q)} {many}.",
            f"{a.name} {v} {d.n(p)} {many}. {b.name} {v} {d.n(q)}.",
        )
    else:
        q = relate(d, x, b.name, p, a.name, v)
    total = d.add("both", f"Together they have @ {many}.", p, "+", q)
    they = Actor("they", "they", "they", "their", "them", BASE)
    r = d._rng.random()
    if r < 0.4:
        k = d.number(1, total - 1)
        phrase = w.conjugate(
            d.pick("eat {a}" if x.food else "lose {a}", "give away {a}", "sell {a}", "use {a}")
        )[d.form(they)]
        d.say(f"{d.pick('Together they', 'They', 'Then they')} {phrase.format(a=some(d, k, x))}.")
        ask_left(d, they, many)
        d.add("loss", f"Then they have @ {many} left.", total, "-", k)
    else:
        (shared if r < 0.6 else boxed if r < 0.8 else wanted if r < 0.9 else sold)(
            d, they, x, total
        )


@story(4)
def drill(d: Story) -> None:
    """Plain arithmetic in words and signs."""
    r = d._rng.random()
    if r < 0.3:
        a, b, op, text = (
            d.size(2, 300),
            d.size(2, 300),
            "+",
            d.pick("{a} + {b}", "{a} plus {b}", "the sum of {a} and {b}", "{a} + {b}", "{a}+{b}"),
        )
    elif r < 0.55:
        a = d.size(5, 400)
        b, op, text = (
            d.number(1, a),
            "-",
            d.pick(
                "{a} - {b}",
                "{a} minus {b}",
                "the difference between {a} and {b}",
                "{a} - {b}",
                "{a}-{b}",
            ),
        )
    elif r < 0.75:
        a, b, op, text = (
            d.number(2, 25),
            d.number(2, 12),
            "*",
            d.pick(
                "{a} * {b}",
                "{a} times {b}",
                "the product of {a} and {b}",
                "{a} x {b}",
                "{a} multiplied by {b}",
                "{a}*{b}",
            ),
        )
    elif r < 0.9:
        b, k = d.number(2, 12), d.number(2, 25)
        a, op, text = b * k, "/", d.pick("{a} / {b}", "{a} divided by {b}", "{a} / {b}")
    else:
        words, divisor, parts = d.of(w.FRACTIONS)
        a = divisor * d.number(1, 30)
        link = d.pick(
            f"What is {words} of {a}?",
            f"How much is {words} of {a}?",
            f"Find {words} of {a}.",
            f"Calculate {words} of {a}.",
        )
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
    d.end(
        f"What is {expression}?",
        f"What is {expression}?",
        f"How much is {expression}?",
        f"Calculate {expression}.",
        f"What does {expression} equal?",
        f"Compute {expression}.",
        f"{expression} = ?",
        f"Find {expression}.",
    )
    d.add(op, "The result is @.", a, op, b)
