"""More stories of the same arithmetic: groups, pieces, kinds, tickets, lengths, books."""

# ruff: noqa: E501  (a wording is one line, however long)

from __future__ import annotations

from mamba2_math import story_words as w
from mamba2_math.registry import story
from mamba2_math.stories.writing import (
    DOINGS,
    Story,
    _many,
    article,
    cap,
    in_boxes,
    some,
)
from mamba2_math.story_words import BASE, PAST, THIRD, Noun


@story(4)
def capacity(d: Story) -> None:
    """So many for each van, table, team: how many are needed."""
    who = d.pick(
        "kids",
        "students",
        "people",
        "children",
        "players",
        "campers",
        "guests",
        "girls",
        "boys",
        "passengers",
        "scouts",
        "soldiers",
        "friends",
        "workers",
        "members",
        "tourists",
        "fans",
        "hikers",
    )
    k, m = d.number(2, 15), d.number(2, 12)
    if d.chance(0.2):
        m = d.pick(15, 20, 25, 30, 40, 50)
    total = k * m
    r = d._rng.random()
    if r < 0.5:
        one, verb = d.pick(
            ("van", "take"),
            ("bus", "carry"),
            ("car", "hold"),
            ("table", "seat"),
            ("boat", "carry"),
            ("tent", "hold"),
            ("cabin", "hold"),
            ("bench", "seat"),
            ("room", "hold"),
            ("taxi", "take"),
            ("elevator", "carry"),
            ("minivan", "fit"),
            ("raft", "take"),
            ("canoe", "hold"),
            ("row", "seat"),
            ("train car", "carry"),
        )
        ones = _many(one)
        d.say(
            f"There are {d.n(total)} {who} {d.pick('going on a trip', 'at a party', 'at a camp', 'in a club', 'waiting', 'on a field trip', 'at the school', '')}".rstrip()
            + ".",
            f"{d.n(total)} {who} {d.pick('want to go', 'are going', 'go')} {d.pick('to the zoo', 'on a trip', 'to the museum', 'camping', 'to a game', 'to the beach')}.",
            f"A school takes {d.n(total)} {who} {d.pick('on a trip', 'to the zoo', 'to the museum')}.",
        )
        d.say(
            f"Each {one} can {verb} {d.n(m)} {who}.",
            f"Each {one} {w.conjugate(verb)[THIRD]} {d.n(m)} {who}.",
            f"{d.n(m)} {who} fit in one {one}.",
            f"Each {one} can {verb} {d.n(m)}.",
            f"Every {one} has {d.pick('room', 'space')} for {d.n(m)} {who}.",
        )
        if d.chance(0.2):
            d.text.reverse()
        d.end(
            f"How many {ones} are needed?",
            f"How many {ones} do they need?",
            f"How many {ones} are needed for all the {who}?",
            f"How many {ones} will they need?",
            f"How many {ones} are necessary?",
        )
        d.add("count", f"They need @ {ones}.", total, "/", m)
    else:
        group = d.pick("groups", "teams", "groups", "teams", "pairs", "rows", "lines")
        if group == "pairs":
            m, total = 2, 2 * k
        head = d.pick(
            f"A class of {d.n(total)} {who}",
            f"{cap(d.n(total))} {who}",
            f"A group of {d.n(total)} {who}",
            f"The {d.n(total)} {who} of a class",
            f"There are {d.n(total)} {who}. They",
        )
        be = (
            "are"
            if head.endswith(who)
            and not head.startswith("A ")
            or head.endswith("They")
            or head.startswith("The ")
            else "is"
        )
        if head.startswith("The "):
            be = "are"
        verb = d.pick("divided", "split", "put", "separated", "arranged")
        one = group[:-1]
        if d.chance(0.55) or group == "pairs":
            size = f"into {group} of {d.n(m)}" if group != "pairs" else "into pairs"
            d.text.append(cap(f"{head} {be} {verb} {size}."))
            d.end(
                f"How many {group} are there?",
                f"How many {group} {'will there be' if d.chance(0.5) else 'are there'}?",
                f"How many {group} can they make?",
                f"How many {group} are there in total?",
                f"What is the number of {group}?",
            )
            d.add("count", f"There are @ {group}.", total, "/", m)
        else:
            d.text.append(
                cap(
                    f"{head} {be} {verb} {d.pick('equally ', 'evenly ', '')}into {d.n(m)} {d.pick('equal ', '')}{group}."
                )
            )
            d.end(
                f"How many {who} are in each {one}?",
                f"How many {who} are there in each {one}?",
                f"How many {who} does each {one} have?",
                f"How many {who} will be in one {one}?",
            )
            d.add("inbox", f"Each {one} has @ {who}.", total, "/", m)


@story(4)
def pieces(d: Story) -> None:
    """Cut into equal pieces: their number, their length, what is left of them."""
    actor = d.actor()
    form, who = d.form(actor), d.who(actor)
    k, m = d.number(2, 12), d.number(2, 12)
    if d.chance(0.45):
        thing, unit = d.pick(
            ("rope", "feet"),
            ("ribbon", "inches"),
            ("string", "cm"),
            ("board", "feet"),
            ("rope", "meters"),
            ("wire", "meters"),
            ("stick", "inches"),
            ("log", "feet"),
            ("piece of cloth", "meters"),
            ("pipe", "feet"),
            ("ribbon", "centimeters"),
            ("wooden plank", "feet"),
        )
        total = k * m
        d.say(
            f"a {thing} is {d.n(total)} {unit} long.",
            f"{actor.first} {w.conjugate('have')[form]} a {thing} that is {d.n(total)} {unit} long.",
            f"{actor.first} {w.conjugate('have')[form]} {d.n(total)} {unit} of {thing}."
            if thing in ("rope", "ribbon", "string", "wire")
            else f"a {thing} has a length of {d.n(total)} {unit}.",
        )
        cut = (
            d.pick("It is cut", f"{cap(who)} {w.conjugate('cut')[form]} it")
            if actor.name in d.text[0] or cap(actor.first) in d.text[0]
            else "It is cut"
        )
        if d.chance(0.55):
            d.say(
                f"{cut} into {d.n(k)} {d.pick('equal pieces', 'pieces of the same length', 'equal parts')}."
            )
            d.end(
                "How long is each piece?",
                f"How many {unit} long is each piece?",
                "What is the length of each piece?",
                "How long is one piece?",
                f"How many {unit} is each piece?",
            )
            d.add("unit", f"Each piece is @ {unit} long.", total, "/", k)
        else:
            d.say(
                f"{cut} into pieces of {d.n(m)} {unit}.",
                f"{cut} into pieces that are {d.n(m)} {unit} long.",
                f"{cut} into pieces of {d.n(m)} {unit} each.",
            )
            d.end(
                "How many pieces are there?",
                f"How many pieces {'does' if 'It is' in cut or actor.form == THIRD else 'do'} {'it make' if 'It is' in cut else who + ' get'}?",
                "How many pieces are there in total?",
            )
            d.add("count", "There are @ pieces.", total, "/", m)
        return
    thing, piece = d.pick(
        ("pizza", "slices"),
        ("cake", "pieces"),
        ("pie", "slices"),
        ("board", "pieces"),
        ("apple", "slices"),
        ("sandwich", "pieces"),
        ("watermelon", "slices"),
        ("orange", "wedges"),
        ("loaf of bread", "slices"),
        ("chocolate bar", "pieces"),
        ("log", "pieces"),
        ("pizza", "slices"),
        ("ribbon", "pieces"),
    )
    things = {"loaf of bread": "loaves of bread"}.get(thing) or w._plural(thing)
    verb = d.pick("buy", "have", "order", "make", "get", "have")
    d.say(
        f"{actor.first} {w.conjugate(verb)[form]} {d.n(k)} {things}.",
        f"There {'were' if d.past else 'are'} {d.n(k)} {things}.",
    )
    d.say(
        f"Each {thing} {'was' if d.past else 'is'} cut into {d.n(m)} {piece}.",
        f"{cap(who) if cap(actor.first) in d.text[0] else 'They'} {w.conjugate('cut')[form if cap(actor.first) in d.text[0] else (PAST if d.past else BASE)]} each {thing} into {d.n(m)} {piece}.",
        f"Each {thing} {d.pick('had', 'has') if d.past else 'has'} {d.n(m)} {piece}.",
        f"Every {thing} {'was' if d.past else 'is'} cut in {d.n(m)} {piece}.",
    )
    if d.chance(0.35):
        d.text = [
            f"{d.text[0][:-1]} and {d.text[1][0].lower() if not d.text[1].startswith(('I ', actor.name)) else d.text[1][0]}{d.text[1][1:]}"
        ]
    total = d.add("product", f"There are @ {piece}.", k, "*", m)
    if d.chance(0.65):
        j = d.number(1, total - 1)
        people = d.pick(
            "the family",
            "the children",
            "the kids",
            "the guests",
            "we",
            "they",
            "their friends",
            "everyone",
            d.relative(actor),
        )
        verb = (
            d.pick("eat", "eat", "use", "take")
            if thing not in ("board", "log", "ribbon")
            else d.pick("use", "sell", "lose")
        )
        subject = (
            people
            if thing not in ("board", "log", "ribbon")
            else who
            if cap(actor.first) in d.text[0]
            else "they"
        )
        many = subject in (
            "the children",
            "the kids",
            "the guests",
            "we",
            "they",
            "their friends",
        ) or (subject == who and actor.form == BASE)
        d.say(
            f"{subject} {w.conjugate(verb)[PAST if d.past else BASE if many else THIRD]} {some(d, j, Noun(piece[:-1], piece))}."
        )
        d.end(
            f"How many {piece} are left?",
            f"How many {piece} {'were' if d.past else 'are'} left?",
            f"How many {piece} remain?",
            "How many are left?",
            f"How many {piece} are left over?",
            f"How many {piece} are still there?",
        )
        d.add("loss", f"There are @ {piece} left.", total, "-", j)
    elif d.chance(0.4) and (j := d.divisor(total)):
        d.say(f"{d.n(j)} {d.pick('friends', 'children', 'people', 'kids')} share them equally.")
        d.end(
            f"How many {piece} does each get?",
            f"How many {piece} does each of them get?",
            f"How many {piece} does each one get?",
        )
        d.add("shared", f"Each one gets @ {piece}.", total, "/", j)
    else:
        d.end(
            f"How many {piece} are there?",
            f"How many {piece} are there in total?",
            f"How many {piece} are there altogether?",
        )


@story(3)
def three_factors(d: Story) -> None:
    """So many cats, each eats so much a day, for so many days."""
    one, verb, things = d.pick(
        ("cat", "eat", "cans of food"),
        ("dog", "eat", "cups of food"),
        ("horse", "eat", "carrots"),
        ("hen", "lay", "eggs"),
        ("worker", "make", "toys"),
        ("child", "drink", "glasses of milk"),
        ("rabbit", "eat", "carrots"),
        ("student", "read", "pages"),
        ("monkey", "eat", "bananas"),
        ("cow", "give", "liters of milk"),
        ("baker", "bake", "cakes"),
        ("player", "score", "points"),
        ("friend", "collect", "shells"),
        ("machine", "make", "parts"),
        ("fish", "eat", "flakes"),
        ("bird", "eat", "worms"),
        ("student", "solve", "problems"),
        ("truck", "carry", "boxes"),
        ("bee", "visit", "flowers"),
    )
    ones = {"child": "children", "fish": "fish"}.get(one) or w._plural(one)
    k, m, j = d.number(2, 10), d.number(2, 8), d.number(2, 10)
    unit, units = d.pick(
        ("day", "days"), ("day", "days"), ("day", "days"), ("week", "weeks"), ("hour", "hours")
    )
    a = "an" if unit == "hour" else "a"
    verbs = w.conjugate(verb)[THIRD]
    actor = d.actor()
    have = w.conjugate(d.pick("have", "own", "have", "take care of"))[actor.form]
    per = d.pick(f"{a} {unit}", f"each {unit}", f"every {unit}", f"per {unit}")
    d.say(
        f"{actor.first} {have} {d.n(k)} {ones}. Each {one} {verbs} {d.n(m)} {things} {per}.",
        f"There are {d.n(k)} {ones}. Each {one} {verbs} {d.n(m)} {things} {per}.",
        f"{actor.first} {have} {d.n(k)} {ones}. Each of them {verbs} {d.n(m)} {things} {per}.",
        f"{d.n(k)} {ones} each {verb} {d.n(m)} {things} {per}.",
        f"Each of {d.n(k)} {ones} {verbs} {d.n(m)} {things} {per}.",
        f"A {one} {verbs} {d.n(m)} {things} {per}. There are {d.n(k)} {ones}.",
    )
    span = f"{d.n(j)} {units}"
    if unit == "day" and d.chance(0.3):
        span, j = d.pick("a week", "one week"), 7
    x = d.add("all", f"Together it is @ {things} in one {unit}.", k, "*", m)
    if d.chance(0.2):
        d.end(
            f"How many {things} do they {verb} {per}?",
            f"How many {things} do the {ones} {verb} {per}?",
            f"How many {things} do they {verb} in one {unit}?",
        )
        return
    d.end(
        f"How many {things} do the {ones} {verb} in {span}?",
        f"How many {things} do they {verb} in {span}?",
        f"How many {things} do all the {ones} {verb} in {span}?",
        f"How many {things} will they {verb} in {span}?",
        f"How many {things} is that in {span}?",
    )
    d.add(
        "total",
        f"In {'a week' if 'week' in span and unit == 'day' else f'{j} {units}'} it is @ {things}.",
        x,
        "*",
        j,
    )


@story(4)
def two_kinds(d: Story) -> None:
    """So many monkeys and twice as many parrots."""
    where, bank, group = d.pick(
        (
            "In a zoo",
            (
                "monkeys",
                "parrots",
                "lions",
                "tigers",
                "snakes",
                "penguins",
                "bears",
                "zebras",
                "elephants",
                "giraffes",
            ),
            "animals",
        ),
        (
            "On a farm",
            ("cows", "sheep", "hens", "goats", "pigs", "horses", "ducks", "rabbits"),
            "animals",
        ),
        (
            "In a garden",
            ("roses", "tulips", "daisies", "lilies", "sunflowers", "violets"),
            "flowers",
        ),
        (
            "In a basket",
            ("apples", "oranges", "pears", "bananas", "lemons", "peaches", "plums"),
            "pieces of fruit",
        ),
        ("In a class", ("girls", "boys"), "students"),
        ("In a parking lot", ("cars", "trucks", "vans", "motorcycles", "bikes"), "vehicles"),
        ("In a box", ("red balls", "blue balls", "green balls", "yellow balls"), "balls"),
        ("In a bag", ("red marbles", "blue marbles", "white marbles", "green marbles"), "marbles"),
        ("In a pet store", ("cats", "dogs", "birds", "fish", "hamsters", "rabbits"), "animals"),
        ("In a bakery", ("muffins", "cookies", "cakes", "pies", "rolls", "donuts"), "things"),
        ("In a library", ("novels", "comics", "picture books", "magazines"), "books"),
        ("In a room", ("chairs", "tables", "lamps", "desks"), "pieces of furniture"),
        ("On a plate", ("cookies", "brownies", "muffins", "cupcakes"), "treats"),
        ("In a drawer", ("spoons", "forks", "knives"), "pieces"),
    )
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
        relation, step = (
            (f"{words} as many {b}", f"{words} as many {b} as {a}"),
            ("times", value, "*", k),
        )
    elif r < 0.7:
        k = d.size(1, 40)
        relation, step = (
            (f"{d.n(k)} more {b} than {a}", f"{d.n(k)} more {b} than {a}"),
            ("more", value, "+", k),
        )
    elif r < 0.9 and value > 2:
        k = d.number(1, value - 1)
        word = d.pick("fewer", "less")
        relation, step = (
            (f"{d.n(k)} {word} {b} than {a}", f"{d.n(k)} {word} {b} than {a}"),
            ("fewer", value, "-", k),
        )
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
    d.end(
        f"How many {a} and {b} are there in total?",
        f"How many {group} are there in total?",
        f"How many {group} {be} there altogether?",
        f"How many {a} and {b} are there altogether?",
        f"How many {group} are there?",
        f"What is the total number of {group}?",
        f"How many {group} are there in all?",
    )
    d.add("sum", f"In total there are @ {group}.", value, "+", other)


@story(2.5)
def packed_before(d: Story) -> None:
    """So many full boxes and some over: how many before."""
    actor, x, box = d.actor(), d.noun(), d.of(w.CONTAINERS)
    k, m, over = d.number(2, 12), d.number(2, 12), d.number(1, 15)
    form, who, many = d.form(actor), d.who(actor), x.many
    c = f"{d.n(k)} {box.many}"
    left = d.pick(
        f"{w.conjugate('have')[form]} {d.n(over)} left",
        f"{w.conjugate('have')[form]} {d.n(over)} {many if over > 1 else x.one} left over",
        f"still {w.conjugate('have')[form]} {d.n(over)} {many if over > 1 else x.one}",
        f"{w.conjugate('have')[form]} {d.n(over)} more",
    )
    d.say(
        f"{actor.first} {w.conjugate(d.pick('fill', 'make', 'pack'))[form]} {c} with {d.n(m)} {many} each and {left}.",
        f"{actor.first} {w.conjugate('put')[form]} {d.n(m)} {many} in each of {c} and {left}.",
        f"Each {box.one} holds {d.n(m)} {many}. {cap(actor.first)} {w.conjugate('fill')[form]} {c} and {left}.",
        f"Each {box.one} has {d.n(m)} {many}. {cap(actor.first)} {w.conjugate('make')[form]} {c} and {left}.",
        f"{actor.first} {w.conjugate('have')[form]} {c} of {d.n(m)} {many} and {d.n(over)} {d.pick('single', 'loose', 'extra')} {many if over > 1 else x.one}.",
    )
    value = in_boxes(d, k, m, box, x)
    d.end(
        f"How many {many} did {who} have at first?",
        f"How many {many} {actor.does} {who} have in total?",
        f"How many {many} {actor.does} {who} have altogether?",
        f"How many {many} are there in total?",
        f"How many {many} were there at the start?",
        f"How many {many} {actor.does} {who} have in all?",
        f"How many {many} did {who} have in the beginning?",
    )
    d.add("plus", f"In total there are @ {many}.", value, "+", over)


@story(3)
def tickets(d: Story) -> None:
    """Adults and children pay different prices."""
    d.euros = d.chance(0.08)
    a, b, aa, bb = d.pick(
        ("an adult", "a child", "adults", "children"),
        ("an adult", "a child", "adults", "children"),
        ("an adult", "a student", "adults", "students"),
        ("a grown-up", "a kid", "grown-ups", "kids"),
    )
    p, q, x, y = d.number(4, 25), d.number(2, 15), d.number(1, 9), d.number(1, 9)
    what = d.pick(
        "ticket",
        "museum ticket",
        "movie ticket",
        "zoo ticket",
        "train ticket",
        "circus ticket",
        "pass",
        "bus ticket",
    )
    an = lambda word: word.split(" ", 1)[1]  # noqa: E731
    d.say(
        f"a {what} for {a} costs {d.usd(p)} and for {b} {d.usd(q)}.",
        f"a {what} costs {d.usd(p)} for {a} and {d.usd(q)} for {b}.",
        f"{cap(an(a))} tickets cost {d.usd(p)} and {an(b)} tickets cost {d.usd(q)}.",
        f"{cap(aa)} pay {d.usd(p)} and {bb} pay {d.usd(q)} for a {what}.",
        f"a {what} costs {d.usd(p)} for {aa} and {d.usd(q)} for {bb}.",
        f"The {d.pick('zoo', 'museum', 'pool', 'cinema')} charges {d.usd(p)} for {a} and {d.usd(q)} for {b}.",
    )
    group = f"{d.n(x)} {aa if x > 1 else an(a)} and {d.n(y)} {bb if y > 1 else an(b)}"
    if d.chance(0.5):
        d.end(
            f"How much do {group} pay?",
            f"How much do {group} pay in total?",
            f"How much do {group} have to pay?",
            f"What is the total cost for {group}?",
            f"How much does it cost for {group}?",
            f"How much do tickets for {group} cost?",
        )
    else:
        actor = d.actor()
        d.say(
            f"a {d.pick('family', 'group')} has {group}.",
            f"{actor.first} {w.conjugate('buy')[d.form(actor)]} tickets for {group}.",
            f"{group} {'went' if d.past else 'go'} to the {d.pick('zoo', 'movies', 'museum', 'pool')}.",
        )
        d.end(
            "How much do they pay?",
            "How much do the tickets cost?",
            "How much do the tickets cost in total?",
            "What is the total cost?",
            "How much do they pay altogether?",
            "How much do they have to pay in total?",
        )
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
        subject, who, does, his = (
            d.pick("the team", "a team", "the soccer team", "the school team"),
            d.pick("it", "the team"),
            "did" if d.past else "does",
            "its",
        )
        verbs = w.conjugate(verb)[PAST if d.past else THIRD]
    d.say(
        f"{subject} {verbs} {d.n(m)} {things} in each of {d.pick(his + ' ', 'the ', '')}{d.n(k)} {unit}.",
        f"In each of {d.n(k)} {unit}, {subject} {verbs} {d.n(m)} {things}.",
        f"{subject} {verbs} {d.n(m)} {things} in every one of {d.n(k)} {unit}.",
        f"For {d.n(k)} {unit}, {subject} {verbs} {d.n(m)} {things} in each.",
    )
    value = d.add("total", f"In {k} {unit} it is @ {things}.", k, "*", m)
    if d.chance(0.25):
        j = d.number(1, 30)
        d.say(
            f"Then {who} {verbs} {d.n(j)} more.",
            f"After that, {who} {verbs} another {d.n(j)} {things}.",
        )
        d.add("plus", f"In total it is @ {things}.", value, "+", j)
    d.end(
        f"How many {things} {does} {who} {verb}?",
        f"How many {things} {does} {who} {verb} in total?",
        f"How many {things} {does} {who} {verb} altogether?",
        f"How many {things} {does} {who} {verb} in all?",
        f"How many {things} is that in total?",
    )


@story(3)
def measure(d: Story) -> None:
    """Two lengths, weights or volumes: how much longer, how much together."""
    kind, unit, adjective, verb = d.pick(
        ("length", d.pick("cm", "meters", "feet", "inches"), "longer", "is {n} {u} long"),
        ("height", d.pick("cm", "feet", "inches", "meters"), "taller", "is {n} {u} tall"),
        ("weight", d.pick("pounds", "kg", "kilograms", "grams"), "heavier", "weighs {n} {u}"),
        ("volume", d.pick("liters", "cups", "gallons"), "more", "holds {n} {u}"),
        ("time", "minutes", "longer", "takes {n} {u}"),
        ("distance", d.pick("miles", "km"), "farther", "is {n} {u} away"),
    )
    bank = {
        "length": (
            "a red ribbon|a blue ribbon",
            "a pencil|a pen",
            "a snake|a worm",
            "one rope|the other rope",
            "a bridge|a tunnel",
            "a table|a bench",
            "the first road|the second road",
            "a truck|a car",
        ),
        "height": (
            "a tree|a bush",
            "a tower|a house",
            "{p}|{q}",
            "{p}|{q}",
            "a giraffe|a horse",
            "a building|a tree",
            "a lamp|a door",
            "{p}|{q}",
        ),
        "weight": (
            "a dog|a cat",
            "a melon|a pumpkin",
            "{p}|{q}",
            "a red box|a blue box",
            "a bag of rice|a bag of flour",
            "a suitcase|a backpack",
            "a goat|a sheep",
        ),
        "volume": (
            "a bucket|a tub",
            "a big tank|a small tank",
            "a pot|a pitcher",
            "a barrel|a can",
            "a red bottle|a green bottle",
        ),
        "time": (
            "the bus ride|the train ride",
            "the first movie|the second movie",
            "the walk|the bike ride",
            "the math test|the reading test",
        ),
        "distance": (
            "the school|the library",
            "the lake|the park",
            "the beach|the mall",
            "the zoo|the museum",
        ),
    }[kind]
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
        is_ = {
            "weight": "is",
            "volume": "does",
            "time": "is",
            "length": "is",
            "height": "is",
            "distance": "is",
        }[kind]
        if kind == "volume":
            d.end(
                f"How many more {unit} does {the(big)} hold than {the(small)}?",
                f"How much more does {the(big)} hold than {the(small)}?",
            )
        else:
            d.end(
                f"How much {adjective} is {the(big)} than {the(small)}?",
                f"How many {unit} {adjective} {is_} {the(big)} than {the(small)}?",
                f"By how many {unit} is {the(big)} {adjective} than {the(small)}?",
            )
        d.add("diff", f"The difference is @ {unit}.", hi, "-", lo)
    elif r < 0.7:
        d.say(f"{say(a, x)} and {say(b, y)}.", f"{say(a, x)}. {cap(say(b, y))}.")
        if kind == "weight":
            d.end(
                "How much do they weigh together?",
                f"How many {unit} do they weigh together?",
                "What is their total weight?",
                "How much do they weigh in total?",
            )
        elif kind == "volume":
            d.end(
                "How much do they hold together?",
                f"How many {unit} do they hold together?",
                f"How many {unit} do both hold in total?",
            )
        else:
            d.end(
                f"How many {unit} is that together?",
                f"How many {unit} is that in total?",
                f"What is the total {kind}?",
                f"What is the sum in {unit}?",
            )
        d.add("sum", f"Together it is @ {unit}.", x, "+", y)
    elif kind == "volume" or kind == "time" or kind == "distance":
        raise ValueError("only for things that are long or heavy")
    elif r < 0.85:
        k = d.number(1, 30)
        if d.chance(0.6) or k >= x:
            d.say(
                f"{say(a, x)}. {cap(the(b) if not b.startswith('a ') else b)} is {d.n(k)} {unit} {adjective}.",
                f"{say(a, x)}. {cap(b)} is {d.n(k)} {unit} {adjective} than {the(a)}.",
            )
            d.add("more", f"{the(b)} {verb.format(n='@', u=unit)}.", x, "+", k)
        else:
            less = {"longer": "shorter", "taller": "shorter", "heavier": "lighter"}[adjective]
            d.say(
                f"{say(a, x)}. {cap(b)} is {d.n(k)} {unit} {less} than {the(a)}.",
                f"{say(a, x)} and {b} is {d.n(k)} {unit} {less}.",
            )
            d.add("less", f"{the(b)} {verb.format(n='@', u=unit)}.", x, "-", k)
        d.end(
            f"How {({'length': 'long', 'height': 'tall', 'weight': 'heavy'})[kind]} is {the(b)}?",
            f"What is the {kind} of {the(b)}?",
            f"How much does {the(b)} weigh?"
            if kind == "weight"
            else f"What is the {kind} of {the(b)} in {unit}?",
        )
    else:
        k = d.number(2, 12)
        one = (
            d.pick("box", "brick", "bag", "book", "stone", "package")
            if kind == "weight"
            else d.pick("block", "brick", "box", "stick", "board")
        )
        x = d.number(2, 30)
        ones = _many(one)
        d.say(
            f"{article(one)} {verb.format(n=d.n(x), u=unit)}.",
            f"One {one} {verb.format(n=d.n(x), u=unit)}.",
            f"Each {one} {verb.format(n=d.n(x), u=unit)}.",
        )
        if kind == "weight":
            d.end(
                f"How much do {d.n(k)} {ones} weigh?",
                f"How many {unit} do {d.n(k)} {ones} weigh?",
                f"What is the weight of {d.n(k)} {ones}?",
                f"How much do {d.n(k)} {ones} weigh together?",
            )
        elif kind == "height":
            d.end(
                f"How tall is a stack of {d.n(k)} {ones}?",
                f"How high is a tower of {d.n(k)} {ones}?",
            )
        else:
            d.end(
                f"How long are {d.n(k)} {ones} in a row?",
                f"How many {unit} long are {d.n(k)} {ones} together?",
                f"How long are {d.n(k)} {ones} put end to end?",
            )
        d.add("product", f"Together it is @ {unit}.", k, "*", x)


@story(3)
def spending(d: Story) -> None:
    """Money spent on several things, told in one go."""
    d.euros = d.chance(0.08)
    actor = d.actor()
    form, who = d.form(actor), d.who(actor)
    count = d.pick(2, 2, 2, 3)
    things = d._rng.sample(
        (
            "a game",
            "lunch",
            "a book",
            "food",
            "a shirt",
            "clothes",
            "a toy",
            "snacks",
            "gas",
            "dinner",
            "a movie",
            "shoes",
            "a gift",
            "candy",
            "groceries",
            "a hat",
            "drinks",
            "the bus",
            "a ticket",
            "a haircut",
            "school supplies",
            "flowers",
            "a present",
            "breakfast",
            "music",
            "books",
        ),
        count,
    )
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
        start_ = w.conjugate(
            d.pick(
                "have",
                "have",
                "have",
                "start with",
                "get",
                "earn",
                "save",
                "go to the mall with",
                "take",
            )
        )[form]
        d.say(f"{actor.first} {start_} {d.usd(had)}.", f"{actor.first} {start_} {d.usd(had)}.")
        if d.chance(0.25):
            d.text[-1] = f"{d.text[-1][:-1]} and {verb} {text}."
        else:
            d.say(f"{who} {verb} {text}.")
        does = d.pick(actor.does, "did") if d.past else actor.does
        d.end(
            f"How much money {does} {who} have left?",
            f"How much {does} {who} have left?",
            "How much money is left?",
            f"How many {'euros' if d.euros else 'dollars'} {does} {who} have left?",
            f"How much money {actor.does} {who} have now?",
            f"How many {'euros' if d.euros else 'dollars'} are left?",
            "How much is left?",
        )
        left = had
        for c in costs:
            left = d.add("spend", f"Then {actor.name} {actor.has} $@ left.", left, "-", c)
    else:
        d.say(f"{actor.first} {verb} {text}.")
        does = "did" if d.past else actor.does
        d.end(
            f"How much {does} {who} spend?",
            f"How much money {does} {who} spend in total?",
            f"How much {does} {who} spend altogether?",
            "What is the total?",
            f"How much {does} {who} spend in all?",
        )
        s = costs[0]
        for i, c in enumerate(costs[1:], 1):
            s = d.add(
                "sum",
                "In total it costs $@." if i == count - 1 else "So far it costs $@.",
                s,
                "+",
                c,
            )


@story(3)
def reading(d: Story) -> None:
    """A book of so many pages, read on several days: what is left."""
    actor = d.actor()
    form, who = d.form(actor), d.who(actor)
    count = d.pick(1, 2, 2, 2, 3)
    i = d.number(0, 6 - count)
    times = d.pick(
        [f"on {x}" for x in w.DAYS[i : i + count]],
        [f"on {x}" for x in w.DAYS[i : i + count]],
        ["yesterday", "today", "this evening"][:count],
        ["on the first day", "on the second day", "on the third day"][:count],
        ["in the morning", "in the afternoon", "in the evening"][:count],
    )
    values = [d.size(3, 80) for _ in times]
    total = sum(values) + d.size(2, 150)
    if d.chance(0.4):
        total += -total % 10
    read = w.conjugate("read")[form]
    listed = [
        f"{d.n(v)} pages {t}" if j == 0 or d.chance(0.6) else f"{d.n(v)} {t}"
        for j, (v, t) in enumerate(zip(values, times))
    ]
    text = listed[0] if count == 1 else f"{', '.join(listed[:-1])} and {listed[-1]}"
    book = d.pick("book", "book", "novel", "story", "comic book")
    d.say(
        f"a {book} has {total} pages. {cap(actor.first)} {read} {text}.",
        f"{actor.first} {w.conjugate('have')[form]} a {book} with {total} pages. {cap(who)} {read} {text}.",
        f"{actor.first} is reading a {total}-page {book}. {cap(who)} {read} {text}."
        if actor.form == THIRD
        else f"There are {total} pages in a {book}. {cap(actor.first)} {read} {text}.",
        f"{actor.first} {read} {text}. The {book} has {total} pages.",
        f"There are {total} pages in {actor.owner} {book}. {cap(actor.name)} {read} {text}.",
    )
    d.end(
        f"How many pages {actor.does} {who} still have to read?",
        "How many pages are left?",
        f"How many pages {actor.does} {who} have left to read?",
        "How many pages are left to read?",
        f"How many more pages {actor.does} {who} have to read?",
        "How many pages remain?",
        f"How many pages {actor.does} {who} need to read to finish the {book}?",
        f"How many more pages must {who} read to finish it?",
        f"How many pages has {actor.name} not read yet?"
        if actor.form == THIRD
        else "How many pages are not read yet?",
    )
    s = values[0]
    for j, v in enumerate(values[1:], 1):
        s = d.add(
            "sum",
            "In total it is @ pages." if j == count - 1 else "So far it is @ pages.",
            s,
            "+",
            v,
        )
    d.add("goal", "There are @ pages left.", total, "-", s)
