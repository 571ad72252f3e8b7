"""Whole problems, one function each: draw numbers, ask, work the steps.

Numbers are drawn so that every division is exact, no result is negative and few have more than
three digits. The last step's result is the answer. ``@`` in a step stands for the operation.
"""

from __future__ import annotations

import random

from mamba2_math import words
from mamba2_math.draft import Draft, Problem
from mamba2_math.registry import SCENARIOS, scenario

# --- collections and comparisons -----------------------------------------------------------------


@scenario
def sold_in_two_months(d: Draft) -> None:
    p, thing, (first, second) = d.person(), d.of(words.THINGS), d.two(words.MONTHS)
    share, k = d.share()
    a = k * d.number(3, 160 // k)
    d.ask(
        (
            f"{p} sold {a} {thing} in {first}, and then {p.he} sold {share} as many in {second}."
            if "%" not in share
            else f"{p} sold {a} {thing} in {first}, and in {second} {p.he} sold {share} of that.",
            f"In {first} {p} sold {a} {thing}. In {second}, {p.he} sold only "
            f"{share} of that number.",
        ),
        (
            f"How many {thing} did {p} sell altogether in {first} and {second}?",
            f"What is the total number of {thing} {p} sold in the two months?",
            f"How many {thing} did {p.he} sell in all?",
        ),
    )
    b = d.step(f"{p} sold @ {thing} in {second}.", a, "/", k)
    d.step(f"{p} sold @ {thing} altogether.", a, "+", b)


@scenario
def three_collections(d: Draft) -> None:
    a, b, c = d.person(), d.person(), d.person()
    thing = d.of(words.THINGS)
    x, more = d.number(5, 90), d.number(2, 40)
    word, k = d.times()
    facts = [f"{b} has {more} more {thing} than {a}.", f"{c} has {word} as many {thing} as {b}."]
    if d.chance(0.5):
        facts.reverse()
    d.ask(
        f"{a} has {x} {thing}.",
        *facts,
        (
            f"How many {thing} do they have altogether?",
            f"How many {thing} do {a}, {b} and {c} have in total?",
        ),
    )
    y = d.step(f"{b} has @ {thing}.", x, "+", more)
    z = d.step(f"{c} has @ {thing}.", y, "*", k)
    s = d.step(f"{a} and {b} have @ {thing}.", x, "+", y)
    d.step(f"Together they have @ {thing}.", s, "+", z)


@scenario
def fewer_than_multiple(d: Draft) -> None:
    a, b = d.person(), d.person()
    thing = d.of(words.THINGS)
    word, k = d.times()
    x = d.number(6, 60)
    fewer = d.number(1, min(x, 20))
    d.ask(
        f"{a} collected {x} {thing}.",
        (
            f"{b} collected {fewer} fewer than {word} the number {a} collected.",
            f"{b} has {fewer} less than {word} as many {thing} as {a}.",
        ),
        (f"How many {thing} do they have together?", f"What is the total number of {thing}?"),
    )
    t = d.step(f"{word.capitalize()} the number {a} has is @.", x, "*", k)
    y = d.step(f"{b} has @ {thing}.", t, "-", fewer)
    d.step(f"Together they have @ {thing}.", x, "+", y)


@scenario
def how_many_more(d: Draft) -> None:
    a, b = d.person(), d.person()
    thing, place = d.of(words.THINGS), d.of(words.SHOPS)
    n, m = d.number(2, 9), d.number(3, 12)
    k, q = d.number(2, 9), d.number(3, 12)
    if n * m < k * q:
        n, m, k, q = k, q, n, m
    d.ask(
        f"{a} bought {n} packs of {m} {thing} at the {place}.",
        f"{b} bought {k} packs of {q} {thing}.",
        (
            f"How many more {thing} does {a} have than {b}?",
            f"How many more {thing} did {a} buy than {b}?",
        ),
        shuffle=2,
    )
    x = d.step(f"{a} has @ {thing}.", n, "*", m)
    y = d.step(f"{b} has @ {thing}.", k, "*", q)
    d.step(f"{a} has @ more {thing}.", x, "-", y)


@scenario
def given_then_bought(d: Draft) -> None:
    p, friend = d.person(), d.person()
    thing, color = d.of(words.THINGS), d.of(words.COLORS)
    share, k = d.share()
    x = k * d.number(3, 200 // k)
    packs, size = d.number(2, 9), d.number(2, 12)
    d.ask(
        f"{p} had {x} {color} {thing}.",
        (
            f"{p.He} gave {share} of them to {friend}.",
            f"{p.He} gave {share} of {p.his} {thing} to {friend}.",
        ),
        (
            f"Then {p.he} bought {packs} packs with {size} {thing} in each.",
            f"Later {p.he} got {packs} bags of {size} {thing}.",
        ),
        (f"How many {thing} does {p} have now?", f"How many {thing} does {p.he} have in the end?"),
    )
    given = d.step(f"{p} gave away @ {thing}.", x, "/", k)
    left = d.step(f"{p.He} had @ {thing} left.", x, "-", given)
    bought = d.step(f"{p.He} bought @ {thing}.", packs, "*", size)
    d.step(f"Now {p} has @ {thing}.", left, "+", bought)


@scenario
def colored_things(d: Draft) -> None:
    p, thing = d.person(), d.of(words.THINGS)
    first, second = d.two(words.COLORS)
    third = d.of([c for c in words.COLORS if c not in (first, second)])
    word, k = d.times()
    share, j = d.share()
    y = j * d.number(1, 60 // j)
    d.ask(
        (
            f"{p} has {y} {first} {thing} and {word} as many {second} ones.",
            f"In a box there are {y} {first} {thing} and {word} as many {second} {thing}.",
        ),
        f"The number of {third} {thing} is {share} of the number of {first} ones.",
        ("How many are there in all?", f"How many {thing} are there in total?"),
    )
    x = d.step(f"There are @ {second} {thing}.", y, "*", k)
    z = d.step(f"There are @ {third} {thing}.", y, "/", j)
    s = d.step(f"There are @ {first} and {second} {thing}.", y, "+", x)
    d.step(f"In total there are @ {thing}.", s, "+", z)


@scenario
def total_minus_groups(d: Draft) -> None:
    thing = d.of(words.THINGS)
    p = d.person()
    (c1, c2) = d.two(words.COLORS)
    a, b, c = d.number(5, 90), d.number(5, 90), d.number(5, 200)
    d.ask(
        (
            f"{p} has {a + b + c} {thing}. {a} are {c1}, {b} are {c2} and the rest are plain.",
            f"Out of {a + b + c} {thing} that {p} has, {a} are {c1} and {b} are {c2}. "
            "The others are plain.",
        ),
        (f"How many {thing} are plain?", f"How many plain {thing} does {p} have?"),
    )
    s = d.step(f"There are @ {c1} and {c2} {thing}.", a, "+", b)
    d.step(f"So @ {thing} are plain.", a + b + c, "-", s)


@scenario
def ratio_share(d: Draft) -> None:
    a, b = d.person(), d.person()
    x, y, unit = d.number(1, 7), d.number(1, 7), d.number(3, 40)
    if x == y:
        y += 1
    what = d.pick("coins", "marbles", "dollars", "stickers", "points")
    d.ask(
        (
            f"{a} and {b} share {(x + y) * unit} {what} in the ratio {x}:{y}.",
            f"{(x + y) * unit} {what} are divided between {a} and {b} in the ratio {x} to {y}.",
        ),
        (f"How many {what} does {b} get?", f"How many {what} will {b} receive?"),
    )
    parts = d.step("The number of parts is @.", x, "+", y)
    one = d.step(f"One part is @ {what}.", (x + y) * unit, "/", parts)
    d.step(f"{b} gets @ {what}.", one, "*", y)


# --- buying and selling --------------------------------------------------------------------------


@scenario
def shopping_change(d: Draft) -> None:
    p, shop = d.person(), d.of(words.SHOPS)
    (one, many), (one2, many2) = d.two(words.PRICED)
    n, price, m, price2 = d.number(2, 9), d.number(2, 15), d.number(2, 9), d.number(2, 15)
    total = n * price + m * price2
    paid = total + d.number(1, 60)
    if d.chance(0.6):
        paid = -(-(total + 1) // 50) * 50
    d.ask(
        (
            f"{p} went to the {shop} with ${paid}.",
            f"{p} had ${paid} and went to the {shop}.",
            f"{p} has ${paid}.",
        ),
        (
            f"{p.He} bought {n} {many} for ${price} each and {m} {many2} for ${price2} each.",
            f"{p.He} bought {n} {many} at ${price} each and {m} {many2} that cost ${price2} each.",
            f"A {one} costs ${price} and a {one2} costs ${price2}. "
            f"{p.He} buys {n} {many} and {m} {many2}.",
        ),
        (f"How much money does {p.he} have left?", f"How many dollars are left for {p}?"),
    )
    x = d.step(f"The {many} cost $@.", n, "*", price)
    y = d.step(f"The {many2} cost $@.", m, "*", price2)
    s = d.step("In total they cost $@.", x, "+", y)
    d.step(f"{p} has $@ left.", paid, "-", s)


@scenario
def three_items(d: Draft) -> None:
    p = d.person()
    (_, many), (_, many2) = d.two(words.PRICED)
    n, price, (word, k) = d.number(2, 12), d.number(2, 12), d.times()
    m = d.number(2, 6)
    d.ask(
        f"{p} bought {n} {many} that cost ${price} each.",
        (
            f"{p.He} also bought {m} {many2}, each costing {word} as much.",
            f"{p.He} also bought {m} {many2} at {word} that price each.",
        ),
        (f"How much did {p.he} spend in total?", f"How much did {p} pay altogether?"),
    )
    x = d.step(f"The {many} cost $@.", n, "*", price)
    y = d.step(f"Each of the {many2} costs $@.", price, "*", k)
    z = d.step(f"The {many2} cost $@.", m, "*", y)
    d.step(f"In total {p} spent $@.", x, "+", z)


@scenario
def discount(d: Draft) -> None:
    p, (one, many) = d.person(), d.of(words.PRICED)
    percent, k = d.of(words.PERCENTS)
    n = d.number(2, 9)
    price = k * d.number(1, 60 // k)
    d.ask(
        (
            f"A {one} costs ${price}, but today there is a {percent}% discount.",
            f"The price of a {one} is ${price}. The {d.of(words.SHOPS)} is giving {percent}% off.",
            f"{p} wants some {many}. Each one normally costs ${price}, and now "
            f"it is {percent}% off.",
        ),
        (
            f"How much will {p} pay for {n} {many}?",
            f"If {p} buys {n} {many}, how much does {p.he} pay?",
        ),
    )
    off = d.step(f"The discount on one {one} is $@.", price, "/", k)
    now = d.step(f"One {one} now costs $@.", price, "-", off)
    d.step(f"{n} {many} cost $@.", n, "*", now)


@scenario
def tax_or_tip(d: Draft) -> None:
    p = d.person()
    percent, k = d.pick((10, 10), (20, 5), (25, 4), (10, 10))
    a, b = d.number(5, 60), d.number(2, 60)
    b += (-(a + b)) % k
    d.ask(
        (
            f"{p} had dinner for ${a} and dessert for ${b}.",
            f"{p} ordered a meal for ${a} and a cake for ${b}.",
        ),
        (
            f"{p.He} left a {percent}% tip.",
            f"{p.He} added a tip of {percent}% of the bill.",
            f"There was a tax of {percent}% on the total.",
        ),
        (f"How much did {p.he} pay in all?", f"How much did {p} pay altogether?"),
    )
    bill = d.step("The bill was $@.", a, "+", b)
    tip = d.step(f"{percent}% of it is $@.", bill, "/", k)
    d.step(f"{p} paid $@ in all.", bill, "+", tip)


@scenario
def eggs_for_sale(d: Draft) -> None:
    p = d.person()
    animal, what = d.pick(("ducks", "eggs"), ("chickens", "eggs"), ("hens", "eggs"))
    n = d.number(12, 60)
    a, b = d.number(1, 5), d.number(1, 6)
    price = d.number(2, 9)
    d.ask(
        f"{p}'s {animal} lay {n} {what} per day.",
        (
            f"{p.He} eats {a} for breakfast and bakes muffins with {b} every day.",
            f"Every day {p.he} eats {a} and gives {b} to {p.his} neighbor.",
        ),
        (
            f"{p.He} sells the rest at the market for ${price} each.",
            f"{p.He} sells the remaining {what} for ${price} per egg.",
        ),
        (
            f"How much does {p.he} make every day at the market?",
            f"How much money does {p} make per day?",
        ),
    )
    used = d.step(f"{p} uses @ {what} a day.", a, "+", b)
    left = d.step(f"{p.He} sells @ {what} a day.", n, "-", used)
    d.step(f"{p.He} makes $@ a day.", left, "*", price)


@scenario
def bake_sale(d: Draft) -> None:
    p = d.person()
    treat, treat2 = d.two(words.TREATS)
    dozens, price, m, price2 = d.number(2, 9), d.number(1, 4), d.number(5, 40), d.number(1, 5)
    cost = d.number(3, 30)
    d.ask(
        (
            f"{p} baked {dozens} dozen {treat} and {m} {treat2} for a bake sale.",
            f"For a bake sale, {p} made {dozens} dozen {treat} and {m} {treat2}.",
        ),
        f"{p.He} sold the {treat} for ${price} each and the {treat2} for ${price2} each.",
        f"The ingredients cost ${cost}.",
        (f"How much profit did {p} make?", f"What was {p.his} profit?"),
    )
    n = d.step(f"{p} baked @ {treat}.", dozens, "*", 12)
    x = d.step(f"The {treat} brought $@.", n, "*", price)
    y = d.step(f"The {treat2} brought $@.", m, "*", price2)
    s = d.step(f"{p} got $@ in total.", x, "+", y)
    d.step("The profit was $@.", s, "-", cost)


@scenario
def resale_profit(d: Draft) -> None:
    p, goods = d.person(), d.of(words.GOODS)
    n, cost, gain = d.number(3, 12), d.number(2, 20), d.number(2, 12)
    word, k = d.times()
    if d.chance(0.5):
        d.ask(
            f"{p} buys {n} {goods} for ${cost} each and sells them for ${cost + gain} each.",
            (f"How much profit does {p.he} make?", f"What is {p}'s total profit?"),
        )
        one = d.step(f"{p} makes $@ on each.", cost + gain, "-", cost)
        d.step("The profit is $@.", n, "*", one)
    else:
        d.ask(
            f"{p} buys {n} {goods} for ${cost} each and sells each for {word} the price.",
            (f"How much profit does {p.he} make?", f"What is {p}'s total profit?"),
        )
        x = d.step(f"The {goods} cost $@.", n, "*", cost)
        y = d.step("They were sold for $@.", x, "*", k)
        d.step("The profit is $@.", y, "-", x)


@scenario
def ticket_sales(d: Draft) -> None:
    place = d.pick("circus", "museum", "zoo", "concert", "school play", "theater", "aquarium")
    adults, kids = d.number(3, 40), d.number(3, 60)
    price, kid_price = d.number(5, 12), d.number(2, 6)
    d.ask(
        (
            f"Tickets for the {place} cost ${price} for adults and ${kid_price} for children.",
            f"At the {place}, an adult ticket costs ${price} and a child ticket "
            f"costs ${kid_price}.",
        ),
        (
            f"On {d.of(words.DAYS)}, {adults} adults and {kids} children came.",
            f"A group of {adults} adults and {kids} children visits it.",
        ),
        ("How much money was collected?", "How much did the tickets cost in total?"),
    )
    x = d.step("The adult tickets cost $@.", adults, "*", price)
    y = d.step("The child tickets cost $@.", kids, "*", kid_price)
    d.step("In total that is $@.", x, "+", y)


@scenario
def price_of_one(d: Draft) -> None:
    p, (one, many), (one2, many2) = d.person(), *d.two(words.PRICED)
    n, price = d.number(2, 9), d.number(2, 30)
    m, price2 = d.number(2, 9), d.number(2, 12)
    total = n * price + m * price2
    d.ask(
        f"{p} spent ${total} on {n} {many} and {m} {many2}.",
        f"Each {one2} cost ${price2}.",
        (f"How much did one {one} cost?", f"What is the price of a {one}?"),
    )
    x = d.step(f"The {many2} cost $@.", m, "*", price2)
    y = d.step(f"The {many} cost $@.", total, "-", x)
    d.step(f"One {one} cost $@.", y, "/", n)


@scenario
def coin_values(d: Draft) -> None:
    p = d.person()
    a, b, c = d.number(2, 20), d.number(2, 30), d.number(2, 60)
    kind = d.pick(("quarters", 25, "dimes", 10), ("dimes", 10, "nickels", 5))
    name, value, name2, value2 = kind
    d.ask(
        (
            f"{p} has {a} {name}, {b} {name2} and {c} pennies in {p.his} jar.",
            f"In {p.his} pocket {p} finds {a} {name}, {b} {name2} and {c} pennies.",
        ),
        ("How many cents is that in all?", f"How many cents does {p.he} have?"),
    )
    x = d.step(f"The {name} are worth @ cents.", a, "*", value)
    y = d.step(f"The {name2} are worth @ cents.", b, "*", value2)
    s = d.step("Together they are worth @ cents.", x, "+", y)
    d.step("With the pennies that is @ cents.", s, "+", c)


@scenario
def installments(d: Draft) -> None:
    p, thing = d.person(), d.of(words.COSTLY)
    down, months, each = d.number(10, 90), d.number(3, 12), d.number(5, 40)
    done = d.number(1, months - 1)
    total = down + months * each
    d.ask(
        (
            f"{p} bought a {thing} for ${total}.",
            f"A {thing} costs ${total} and {p} buys it.",
        ),
        (
            f"{p.He} paid ${down} at once and pays ${each} every month.",
            f"{p.He} makes a down payment of ${down} and then pays ${each} per month.",
        ),
        (
            f"How much does {p.he} still owe after {done} months?",
            f"After {done} months, how much is left to pay?",
        )
        if done > 1
        else (f"How much does {p.he} still owe after 1 month?",),
    )
    x = d.step("After the first payment there is $@ to pay.", total, "-", down)
    y = d.step(f"In {done} months {p} pays $@.", done, "*", each)
    d.step(f"{p} still owes $@.", x, "-", y)


@scenario
def membership(d: Draft) -> None:
    p = d.person()
    place = d.pick("gym", "swimming club", "music school", "library club", "tennis club")
    fee, monthly, months = d.number(10, 90), d.number(5, 40), d.number(2, 12)
    other = d.number(1, 9)
    d.ask(
        (
            f"The {place} charges ${fee} to join and ${monthly} per month.",
            f"Joining the {place} costs ${fee}, and each month costs ${monthly}.",
        ),
        f"{p} also pays ${other} per month for a locker.",
        (
            f"How much does {p} pay for the first {months} months?",
            f"How much will {p.he} have paid after {months} months?",
        ),
    )
    each = d.step(f"{p} pays $@ per month.", monthly, "+", other)
    x = d.step(f"For {months} months that is $@.", months, "*", each)
    d.step(f"With the joining fee {p} pays $@.", x, "+", fee)


@scenario
def phone_plan(d: Draft) -> None:
    p = d.person()
    base, included, over = d.number(10, 60), d.number(50, 500, 50), d.number(5, 60)
    price = d.number(2, 5)
    d.ask(
        f"{p}'s phone plan costs ${base} a month and includes {included} minutes.",
        f"Each extra minute costs ${price}.",
        f"Last month {p} used {included + over} minutes.",
        (f"How much was {p.his} bill?", f"How much did {p} have to pay?"),
    )
    x = d.step(f"{p} used @ extra minutes.", included + over, "-", included)
    y = d.step("The extra minutes cost $@.", x, "*", price)
    d.step("The bill was $@.", base, "+", y)


# --- earning and saving --------------------------------------------------------------------------


@scenario
def weekly_earnings(d: Draft) -> None:
    p, job = d.person(), d.of(words.JOBS)
    wage, hours, days, weeks = d.number(5, 12), d.number(2, 8), d.number(2, 6), d.number(2, 5)
    d.ask(
        (
            f"{p} earns ${wage} an hour {job}.",
            f"{p} makes ${wage} per hour {job}.",
        ),
        (
            f"{p.He} works {hours} hours a day, {days} days a week.",
            f"{p.He} works {days} days a week for {hours} hours each day.",
        ),
        (
            f"How much does {p.he} earn in {weeks} weeks?",
            f"How much money will {p} make in {weeks} weeks?",
        ),
    )
    h = d.step(f"{p} works @ hours a week.", hours, "*", days)
    x = d.step(f"{p.He} earns $@ a week.", h, "*", wage)
    d.step(f"In {weeks} weeks {p.he} earns $@.", x, "*", weeks)


@scenario
def two_jobs(d: Draft) -> None:
    p = d.person()
    job, job2 = d.two(words.JOBS)
    wage, hours = d.number(5, 12), d.number(3, 20)
    wage2, hours2 = d.number(5, 12), d.number(3, 20)
    spent = d.number(5, 40)
    d.ask(
        f"{p} earned ${wage} an hour {job} for {hours} hours.",
        f"{p.He} also earned ${wage2} an hour {job2} for {hours2} hours.",
        (f"Then {p.he} spent ${spent} on a gift.", f"{p.He} spent ${spent} on lunch."),
        (f"How much money does {p.he} have left?", "How much of it is left?"),
    )
    x = d.step(f"{p} earned $@ {job}.", hours, "*", wage)
    y = d.step(f"{p.He} earned $@ {job2}.", hours2, "*", wage2)
    s = d.step(f"In total {p.he} earned $@.", x, "+", y)
    d.step(f"{p.He} has $@ left.", s, "-", spent)


@scenario
def overtime(d: Draft) -> None:
    p = d.person()
    wage, normal, extra = d.number(6, 12), d.number(20, 40, 5), d.number(2, 10)
    more = d.number(2, 8)
    d.ask(
        f"{p} is paid ${wage} an hour for the first {normal} hours of a week.",
        f"Every hour after that is paid ${more} more.",
        (
            f"This week {p.he} worked {normal + extra} hours. How much did {p.he} earn?",
            f"How much does {p} earn if {p.he} works {normal + extra} hours in a week?",
        ),
    )
    x = d.step(f"The first {normal} hours bring $@.", normal, "*", wage)
    h = d.step(f"{p} worked @ extra hours.", normal + extra, "-", normal)
    w = d.step("An extra hour is paid $@.", wage, "+", more)
    y = d.step("The extra hours bring $@.", h, "*", w)
    d.step(f"{p} earned $@.", x, "+", y)


@scenario
def savings_goal(d: Draft) -> None:
    p, thing = d.person(), d.of(words.COSTLY)
    share, k = d.share()
    word, j = d.times()
    price = k * d.number(100 // k, 400 // k)
    a = d.number(2, max(2, (price - price // k) // (j + 1) - 1))
    a = min(a, 40)
    who, who2 = d.pick(("parents", "grandparents"), ("uncle", "aunt"), ("father", "mother"))
    d.ask(
        f"{p} is saving money for a new {thing} which costs ${price}.",
        (
            f"{p} has only {share} of the money {p.he} needs.",
            f"{p.He} already saved {share} of it.",
        ),
        f"{p.His} {who} gave {p.him} ${a}, and {p.his} {who2} {word} as much.",
        (
            f"How much more money does {p} need to buy the {thing}?",
            f"How many more dollars does {p.he} need?",
        ),
    )
    has = d.step(f"{p} has $@.", price, "/", k)
    b = d.step(f"{p.His} {who2} gave $@.", a, "*", j)
    gift = d.step("The gifts are $@.", a, "+", b)
    s = d.step(f"Now {p} has $@.", has, "+", gift)
    d.step(f"{p} needs $@ more.", price, "-", s)


@scenario
def weeks_to_save(d: Draft) -> None:
    p, thing = d.person(), d.of(words.COSTLY)
    income, spend, weeks = d.number(12, 60), d.number(2, 10), d.number(3, 12)
    has = d.number(5, 60)
    price = has + (income - spend) * weeks
    d.ask(
        f"{p} wants to buy a {thing} for ${price}.",
        (f"{p.He} has ${has} already.", f"So far {p.he} has ${has}."),
        (
            f"Every week {p.he} earns ${income} and spends ${spend} of it.",
            f"{p.He} gets ${income} a week and spends ${spend} a week on snacks.",
        ),
        (
            f"How many weeks will it take until {p.he} can buy the {thing}?",
            f"In how many weeks will {p} have enough money?",
        ),
    )
    need = d.step(f"{p} still needs $@.", price, "-", has)
    each = d.step(f"{p.He} saves $@ a week.", income, "-", spend)
    d.step("It takes @ weeks.", need, "/", each)


@scenario
def spend_fractions(d: Draft) -> None:
    p = d.person()
    share, k = d.share()
    share2, j = d.share()
    rest = j * d.number(2, max(2, 200 // (j * k)))
    # money * (k - 1) / k must be a multiple of j
    money = k * rest
    a, b = d.two(["food", "books", "rent", "clothes", "a gift", "a game", "shoes", "toys"])
    d.ask(
        (f"{p} had ${money}.", f"{p} got ${money} for {p.his} birthday.", f"{p} earned ${money}."),
        f"{p.He} spent {share} of it on {a} and {share2} of what was left on {b}.",
        (f"How much money does {p.he} have left?", "How many dollars are left?"),
    )
    x = d.step(f"{p} spent $@ on {a}.", money, "/", k)
    left = d.step("That left $@.", money, "-", x)
    y = d.step(f"{p.He} spent $@ on {b}.", left, "/", j)
    d.step(f"{p} has $@ left.", left, "-", y)


@scenario
def monthly_budget(d: Draft) -> None:
    p = d.person()
    share, k = d.share()
    salary = k * 10 * d.number(20 // k + 1, 90 // k)
    food, months = d.number(2, 9) * 10, d.number(2, 6)
    left = salary - salary // k
    food = min(food, left // 20 * 10)
    d.ask(
        f"{p} earns ${salary} a month.",
        f"{p.He} pays {share} of it for rent and ${food} for food and saves the rest.",
        (
            f"How much does {p.he} save in {months} months?",
            f"How much money will {p} have saved after {months} months?",
        ),
    )
    rent = d.step("The rent is $@.", salary, "/", k)
    x = d.step(f"After the rent {p} has $@.", salary, "-", rent)
    y = d.step(f"{p.He} saves $@ a month.", x, "-", food)
    d.step(f"In {months} months {p.he} saves $@.", y, "*", months)


@scenario
def fundraiser(d: Draft) -> None:
    a, b, c = d.person(), d.person(), d.person()
    x, more = d.number(10, 90), d.number(5, 60)
    share, k = d.share()
    x += (-(x + more)) % k
    total = x + (x + more) + (x + more) // k
    goal = total + d.number(5, 100)
    d.ask(
        (
            f"{a}, {b} and {c} want to raise ${goal} for the school.",
            f"Three friends, {a}, {b} and {c}, need ${goal} for a trip.",
        ),
        f"{a} raised ${x}.",
        f"{b} raised ${more} more than {a}.",
        f"{c} raised {share} of what {b} raised.",
        ("How much more money do they need?", "How many dollars are still missing?"),
    )
    y = d.step(f"{b} raised $@.", x, "+", more)
    z = d.step(f"{c} raised $@.", y, "/", k)
    s = d.step(f"{a} and {b} raised $@.", x, "+", y)
    t = d.step("All three raised $@.", s, "+", z)
    d.step("They need $@ more.", goal, "-", t)


@scenario
def split_the_bill(d: Draft) -> None:
    p = d.person()
    friends = d.number(2, 8)
    people = friends + 1
    each = d.number(5, 30)
    tip = d.number(2, 20)
    a = d.number(5, max(6, people * each - tip - 5))
    b = people * each - tip - a
    if b < 1:
        a, b, tip = people, people * (each - 2), people
    d.ask(
        f"{p} and {friends} friends went out to eat.",
        (
            f"The food cost ${a}, the drinks cost ${b} and they left a tip of ${tip}.",
            f"They paid ${a} for food, ${b} for drinks and ${tip} as a tip.",
        ),
        ("They split the cost evenly.", "Everyone paid the same."),
        ("How much did each person pay?", f"How much did {p} pay?"),
    )
    x = d.step("The food and drinks cost $@.", a, "+", b)
    s = d.step("With the tip that is $@.", x, "+", tip)
    n = d.step("There were @ people.", friends, "+", 1)
    d.step("Each paid $@.", s, "/", n)


# --- ages ----------------------------------------------------------------------------------------


@scenario
def ages_now(d: Draft) -> None:
    a, b, c = d.person(), d.person(), d.person()
    word, k = d.times()
    x, older = d.number(3, 15), d.number(2, 20)
    d.ask(
        f"{a} is {older} years older than {b}.",
        f"{b} is {word} as old as {c}.",
        f"{c} is {x} years old.",
        (f"How old is {a}?", f"What is {a}'s age?", f"How many years old is {a}?"),
        shuffle=3,
    )
    y = d.step(f"{b} is @ years old.", x, "*", k)
    d.step(f"{a} is @ years old.", y, "+", older)


@scenario
def ages_later(d: Draft) -> None:
    a, b = d.person(), d.person()
    share, k = d.pick(("half", 2), ("a third", 3), ("a quarter", 4))
    x, later = k * d.number(3, 15), d.number(2, 15)
    d.ask(
        (f"{a} is {x} years old.", f"{a} is now {x}."),
        (f"{b} is {share} {a}'s age.", f"The age of {b} is {share} of the age of {a}."),
        (
            f"How old will {b} be in {later} years?",
            f"What will {b}'s age be {later} years from now?",
        ),
    )
    y = d.step(f"{b} is @ years old.", x, "/", k)
    d.step(f"In {later} years {b} will be @ years old.", y, "+", later)


@scenario
def ages_ago(d: Draft) -> None:
    a, b = d.person(), d.person()
    word, k = d.times()
    past, ago = d.number(2, 12), d.number(2, 12)
    now = past + ago
    d.ask(
        f"{a} is {now} years old.",
        (
            f"{ago} years ago, {b} was {word} as old as {a}.",
            f"{b} was {word} as old as {a} {ago} years ago.",
        ),
        (f"How old is {b} now?", f"What is {b}'s age now?"),
    )
    x = d.step(f"{ago} years ago {a} was @ years old.", now, "-", ago)
    y = d.step(f"At that time {b} was @ years old.", x, "*", k)
    d.step(f"Now {b} is @ years old.", y, "+", ago)


@scenario
def age_sum(d: Draft) -> None:
    a, b, c = d.person(), d.person(), d.person()
    x, older, younger = d.number(10, 50), d.number(2, 20), d.number(1, 9)
    d.ask(
        f"{a} is {x} years old.",
        f"{b} is {older} years older than {a}, and {c} is {younger} years younger than {a}.",
        ("What is the sum of their ages?", "How old are the three of them together?"),
    )
    y = d.step(f"{b} is @ years old.", x, "+", older)
    z = d.step(f"{c} is @ years old.", x, "-", younger)
    s = d.step(f"{a} and {b} are @ years old together.", x, "+", y)
    d.step("The sum of the ages is @.", s, "+", z)


# --- rates, distance, time -----------------------------------------------------------------------


@scenario
def two_leg_trip(d: Draft) -> None:
    p, city = d.person(), d.of(words.CITIES)
    speed, hours = d.number(20, 70, 5), d.number(2, 6)
    speed2, hours2 = d.number(20, 70, 5), d.number(2, 6)
    unit = d.pick("miles", "miles", "kilometers")
    rest = d.number(10, 150)
    total = speed * hours + speed2 * hours2
    how = d.pick("drives", "rides", "travels")
    asks_rest = d.chance(0.5)
    if not asks_rest:
        d.ask(
            f"On the way to {city}, {p} {how} for {hours} hours at {speed} {unit} per hour "
            f"and then for {hours2} hours at {speed2} {unit} per hour.",
            (f"How many {unit} does {p} travel?", f"What distance does {p.he} cover in {unit}?"),
        )
    else:
        d.ask(
            f"{p} has to travel {total + rest} {unit} to {city}.",
            f"{p.He} {how} for {hours} hours at {speed} {unit} per hour "
            f"and then for {hours2} hours at {speed2} {unit} per hour.",
            (f"How many {unit} are left?", f"How many {unit} does {p.he} still have to go?"),
        )
    x = d.step(f"First {p} covers @ {unit}.", speed, "*", hours)
    y = d.step(f"Then {p.he} covers @ {unit}.", speed2, "*", hours2)
    s = d.step(f"In total {p.he} covers @ {unit}.", x, "+", y)
    if asks_rest:
        d.step(f"There are @ {unit} left.", total + rest, "-", s)


@scenario
def fuel_cost(d: Draft) -> None:
    p, city = d.person(), d.of(words.CITIES)
    mpg, gallons, price = d.number(20, 40, 5), d.number(2, 12), d.number(2, 6)
    d.ask(
        f"{p}'s car runs {mpg} miles per gallon of gas.",
        f"A gallon of gas costs ${price}.",
        (
            f"How much does {p} pay for gas on a trip of {mpg * gallons} miles to {city}?",
            f"{city} is {mpg * gallons} miles away. How much does the gas to get there cost?",
        ),
        shuffle=2,
    )
    x = d.step(f"{p} needs @ gallons.", mpg * gallons, "/", mpg)
    d.step("The gas costs $@.", x, "*", price)


@scenario
def round_trips(d: Draft) -> None:
    p = d.person()
    way, days, weeks = d.number(2, 15), d.number(2, 6), d.number(2, 6)
    place = d.pick("school", "work", "the gym", "the office", "the library")
    unit = d.pick("miles", "kilometers", "blocks")
    d.ask(
        (
            f"{p} lives {way} {unit} from {place}.",
            f"It is {way} {unit} from {p}'s home to {place}.",
        ),
        f"{p.He} goes there and back {days} days a week.",
        (
            f"How many {unit} does {p.he} travel in {weeks} weeks?",
            f"How many {unit} is that in {weeks} weeks?",
        ),
    )
    x = d.step(f"There and back is @ {unit}.", way, "*", 2)
    y = d.step(f"In a week {p} travels @ {unit}.", x, "*", days)
    d.step(f"In {weeks} weeks {p.he} travels @ {unit}.", y, "*", weeks)


@scenario
def running_practice(d: Draft) -> None:
    p = d.person()
    d.two(words.DAYS)  # no text uses this draw; without it the held-out set would change
    a, more = d.number(2, 15), d.number(1, 9)
    word, k = d.times()
    verb, what = d.pick(("ran", "laps"), ("swam", "laps"), ("walked", "miles"), ("biked", "miles"))
    d.ask(
        f"{p} {verb} {a} {what} in the first week.",
        (
            f"In the second week {p.he} {verb} {word} as many {what}.",
            f"In the second week it was {word} as many.",
        ),
        f"In the third week {p.he} {verb} {more} more {what} than in the second.",
        (f"How many {what} did {p} cover in the three weeks?", f"How many {what} is that in all?"),
    )
    b = d.step(f"In the second week {p} {verb} @ {what}.", a, "*", k)
    c = d.step(f"In the third week {p.he} {verb} @ {what}.", b, "+", more)
    s = d.step(f"In the first two weeks {p.he} {verb} @ {what}.", a, "+", b)
    d.step(f"In all {p} {verb} @ {what}.", s, "+", c)


@scenario
def pages_to_read(d: Draft) -> None:
    p = d.person()
    word, k = d.times()
    a, days, each = d.number(4, 40), d.number(2, 9), d.number(3, 30)
    total = a + a * k + days * each
    day, day2 = d.two(words.DAYS)
    d.ask(
        (f"{p} is reading a {total}-page book.", f"{p} has a book with {total} pages."),
        f"On {day} {p.he} read {a} pages and on {day2} {word} as many.",
        (
            f"If {p.he} wants to finish it in {days} days, how many pages "
            f"should {p.he} read per day?",
            f"{p.He} wants to read the rest in {days} days. How many pages is that per day?",
        ),
    )
    b = d.step(f"On {day2} {p} read @ pages.", a, "*", k)
    s = d.step(f"So far {p.he} read @ pages.", a, "+", b)
    left = d.step("There are @ pages left.", total, "-", s)
    d.step(f"{p} should read @ pages per day.", left, "/", days)


@scenario
def reading_half_rest(d: Draft) -> None:
    p = d.person()
    share, k = d.share()
    rest = k * d.number(3, 150 // k)
    a, b = d.number(5, 60), d.number(5, 60)
    d.ask(
        f"{p} is reading a book of {rest + a + b} pages.",
        f"Yesterday {p.he} read {a} pages and today {b} pages.",
        (
            f"If {p.he} reads {share} of the remaining pages tomorrow, how many pages is that?",
            f"Tomorrow {p.he} wants to read {share} of the rest. How many pages will {p.he} read?",
        ),
    )
    s = d.step(f"{p} has read @ pages.", a, "+", b)
    left = d.step("There are @ pages left.", rest + a + b, "-", s)
    d.step(f"Tomorrow {p} will read @ pages.", left, "/", k)


@scenario
def filling_tank(d: Draft) -> None:
    rate, minutes, has = d.number(2, 12), d.number(5, 40), d.number(5, 90)
    leak = d.number(1, 9)
    rate += leak
    what = d.pick("tank", "pool", "barrel", "tub", "pond")
    unit = d.pick("liters", "gallons")
    capacity = has + (rate - leak) * minutes
    d.ask(
        f"A {what} holds {capacity} {unit} and has {has} {unit} in it.",
        (
            f"A pump adds {rate} {unit} per minute, but {leak} {unit} leak out each minute.",
            f"Each minute {rate} {unit} flow in and {leak} {unit} flow out.",
        ),
        (f"How many minutes does it take to fill the {what}?", "In how many minutes is it full?"),
    )
    need = d.step(f"The {what} needs @ {unit}.", capacity, "-", has)
    net = d.step(f"It gains @ {unit} per minute.", rate, "-", leak)
    d.step("It takes @ minutes.", need, "/", net)


@scenario
def leaking_tank(d: Draft) -> None:
    rate, hours, back = d.number(2, 12), d.number(2, 12), d.number(5, 60)
    what, unit = d.pick("tank", "pool", "barrel", "cistern"), d.pick("liters", "gallons")
    start = rate * hours + d.number(10, 400)
    p = d.person()
    d.ask(
        f"{p}'s {what} had {start} {unit} of water.",
        f"It lost {rate} {unit} per hour for {hours} hours.",
        (f"Then {p} added {back} {unit}.", f"After that {p.he} poured in {back} {unit}."),
        (f"How many {unit} are in the {what} now?", f"How much water is in it now, in {unit}?"),
    )
    x = d.step(f"It lost @ {unit}.", rate, "*", hours)
    y = d.step(f"There were @ {unit} left.", start, "-", x)
    d.step(f"Now there are @ {unit}.", y, "+", back)


@scenario
def machine_output(d: Draft) -> None:
    thing = d.of(words.GOODS + words.THINGS)
    rate, hours, machines, bad = d.number(3, 20), d.number(2, 8), d.number(2, 6), d.number(1, 11)
    d.ask(
        (
            f"A factory has {machines} machines. Each makes {rate} {thing} per hour.",
            f"Each of the {machines} machines in a factory makes {rate} {thing} an hour.",
        ),
        (f"They run for {hours} hours a day.", f"Every day they work {hours} hours."),
        f"{bad} of the {thing} made in a day are broken."
        if bad > 1
        else f"{bad} of the {thing} made in a day is broken.",
        (f"How many good {thing} are made in a day?", f"How many {thing} are not broken?"),
    )
    x = d.step(f"The machines make @ {thing} per hour.", machines, "*", rate)
    y = d.step(f"In a day they make @ {thing}.", x, "*", hours)
    d.step(f"@ {thing} are good.", y, "-", bad)


@scenario
def typing_time(d: Draft) -> None:
    p = d.person()
    rate, minutes, done = d.number(5, 40, 5), d.number(3, 20), d.number(10, 200, 10)
    total = rate * minutes + done
    pause = d.number(2, 15)
    d.ask(
        f"{p} has to type a text of {total} words.",
        f"{p.He} has already typed {done} words and types {rate} words per minute.",
        f"{p.He} also takes a break of {pause} minutes.",
        (f"In how many minutes will {p.he} be done?", f"How many minutes does {p.he} still need?"),
    )
    x = d.step("There are @ words left.", total, "-", done)
    y = d.step("Typing takes @ minutes.", x, "/", rate)
    d.step(f"With the break {p} needs @ minutes.", y, "+", pause)


@scenario
def practice_minutes(d: Draft) -> None:
    p = d.person()
    what = d.pick("piano", "violin", "chess", "tennis", "guitar", "drums")
    a, b = d.number(10, 60, 5), d.number(10, 90, 5)
    n = d.number(3, 5)
    weekend = 7 - n
    d.ask(
        (
            f"{p} practices {what} {a} minutes a day on {n} days of the week "
            f"and {b} minutes a day on the other {weekend} days.",
        ),
        (f"How many minutes does {p.he} practice in a week?", "How many minutes is that per week?"),
    )
    x = d.step(f"On {n} days {p} practices @ minutes.", n, "*", a)
    y = d.step(f"On the other days {p.he} practices @ minutes.", weekend, "*", b)
    d.step("In a week that is @ minutes.", x, "+", y)


@scenario
def movie_time(d: Draft) -> None:
    p = d.person()
    hours, extra = d.number(1, 4), d.number(5, 55, 5)
    what = d.pick("movie", "show", "concert", "game", "flight")
    seen = d.number(10, hours * 60, 5)
    d.ask(
        f"A {what} takes {hours} hours and {extra} minutes."
        if hours > 1
        else f"A {what} takes 1 hour and {extra} minutes.",
        (f"{p} notices that {seen} minutes have passed.", f"{seen} minutes are over, {p} says."),
        ("How many minutes are left?", f"How many more minutes does the {what} take?"),
    )
    x = d.step(
        f"{hours} hours are @ minutes." if hours > 1 else "1 hour is @ minutes.", hours, "*", 60
    )
    y = d.step(f"The {what} takes @ minutes.", x, "+", extra)
    d.step("There are @ minutes left.", y, "-", seen)


@scenario
def chores_time(d: Draft) -> None:
    p = d.person()
    a, b = d.number(2, 9), d.number(2, 9)
    t, u = d.number(2, 15), d.number(2, 15)
    (one, many), (one2, many2) = d.two(
        [("window", "windows"), ("room", "rooms"), ("plate", "plates"), ("car", "cars")]
    )
    rest = d.number(5, 60)
    total = a * t + b * u + rest
    d.ask(
        f"It takes {p} {t} minutes to clean a {one} and {u} minutes to clean a {one2}.",
        f"{p.He} cleans {a} {many} and {b} {many2}.",
        (
            f"{p.He} had {total} minutes. How many minutes does {p.he} have left?",
            f"How many minutes of the {total} minutes {p.he} had are left?",
        ),
    )
    x = d.step(f"The {many} take @ minutes.", a, "*", t)
    y = d.step(f"The {many2} take @ minutes.", b, "*", u)
    s = d.step("Together that is @ minutes.", x, "+", y)
    d.step(f"{p} has @ minutes left.", total, "-", s)


@scenario
def temperature(d: Draft) -> None:
    city = d.of(words.CITIES)
    start, up, hours, down = d.number(30, 60), d.number(2, 5), d.number(2, 8), d.number(2, 15)
    d.ask(
        (
            f"In the morning it is {start} degrees in {city}.",
            f"The temperature in {city} is {start} degrees at dawn.",
        ),
        f"It rises by {up} degrees per hour for {hours} hours and then drops by {down} degrees.",
        ("What is the temperature then?", "How many degrees is it in the end?"),
    )
    x = d.step("It rises by @ degrees.", up, "*", hours)
    y = d.step("At noon it is @ degrees.", start, "+", x)
    d.step("In the end it is @ degrees.", y, "-", down)


@scenario
def plant_growth(d: Draft) -> None:
    p = d.person()
    plant = d.pick("tree", "sunflower", "vine", "bush", "bamboo", "bean plant")
    start, rate, weeks = d.number(5, 60), d.number(2, 12), d.number(2, 12)
    cut = d.number(2, min(15, start))
    unit = d.pick("inches", "centimeters")
    d.ask(
        f"{p} has a {plant} that is {start} {unit} tall.",
        f"It grows {rate} {unit} every week.",
        (
            f"After {weeks} weeks {p} cuts off {cut} {unit}.",
            f"{weeks} weeks later {p.he} trims it by {cut} {unit}.",
        ),
        (f"How tall is the {plant} now?", f"How many {unit} tall is it then?"),
    )
    x = d.step(f"In {weeks} weeks it grows @ {unit}.", rate, "*", weeks)
    y = d.step(f"It is then @ {unit} tall.", start, "+", x)
    d.step(f"After the cut it is @ {unit} tall.", y, "-", cut)


@scenario
def doubling(d: Draft) -> None:
    what = d.pick("bacteria", "rabbits", "views of a video", "lilies on a pond", "followers")
    start = d.number(2, 60)
    span = d.pick("hour", "day", "week", "month")
    factor, word = d.pick((2, "doubles"), (2, "doubles"), (3, "triples"))
    n = d.number(2, 3)
    d.ask(
        f"The number of {what} {word} every {span}.",
        (f"At the start there are {start}.", f"There are {start} at first."),
        (
            f"How many {what} are there after {n} {span}s?",
            f"What is the number of {what} after {n} {span}s?",
        ),
    )
    value = start
    for i in range(n):
        value = d.step(
            f"After {i + 1} {span}{'s' if i else ''} there are @ {what}.", value, "*", factor
        )


@scenario
def growing_each_day(d: Draft) -> None:
    p = d.person()
    what = d.pick("push-ups", "sit-ups", "squats", "words", "drawings", "jumps")
    start, more = d.number(3, 60), d.number(2, 12)
    day = d.number(0, 4)
    days = [words.DAYS[day], words.DAYS[day + 1], words.DAYS[day + 2]]
    d.ask(
        f"On {days[0]} {p} did {start} {what}.",
        (
            f"On each of the next two days {p.he} did {more} more than the day before.",
            f"Then {p.he} did {more} more each day.",
        ),
        (
            f"How many {what} did {p} do from {days[0]} to {days[2]}?",
            f"How many {what} were that on {days[0]}, {days[1]} and {days[2]} together?",
        ),
    )
    b = d.step(f"On {days[1]} {p} did @ {what}.", start, "+", more)
    c = d.step(f"On {days[2]} {p.he} did @ {what}.", b, "+", more)
    s = d.step(f"On the first two days that is @ {what}.", start, "+", b)
    d.step(f"In total {p} did @ {what}.", s, "+", c)


# --- sharing, packing, remainders ----------------------------------------------------------------


@scenario
def share_with_friends(d: Draft) -> None:
    p, thing = d.person(), d.of(words.THINGS)
    friends, each, keep = d.number(2, 12), d.number(2, 20), d.number(1, 20)
    total = friends * each + keep
    bags = next((b for b in (12, 10, 9, 8, 7, 6, 5, 4, 3, 2) if total % b == 0), 0)
    if not bags:
        keep += 2 - total % 2
        total = friends * each + keep
        bags = 2 if total % 2 == 0 else 1
    if bags == 1:
        keep += 1
        total, bags = total + 1, 2
    size = total // bags
    d.ask(
        f"{p} has {bags} bags with {size} {thing} each.",
        (
            f"{p.He} keeps {keep} for {p.his} brother and shares the rest equally among "
            f"{friends} friends.",
            f"After putting {keep} aside, {p.he} divides the others equally "
            f"among {friends} friends.",
        ),
        (f"How many {thing} does each friend get?", f"How many {thing} will one friend receive?"),
    )
    x = d.step(f"{p} has @ {thing}.", bags, "*", size)
    y = d.step(f"{p.He} shares @ {thing}.", x, "-", keep)
    d.step(f"Each friend gets @ {thing}.", y, "/", friends)


@scenario
def left_over(d: Draft) -> None:
    p, thing = d.person(), d.of(words.THINGS)
    size, bags = d.number(3, 12), d.number(2, 12)
    rest = d.number(1, size - 1)
    total = size * bags + rest
    a = d.number(1, total - 1)
    box, boxes = d.pick(("box", "boxes"), ("bag", "bags"), ("jar", "jars"), ("tray", "trays"))
    d.ask(
        (
            f"{p} has {a} {thing} and gets {total - a} more.",
            f"{p} picked {a} {thing} in the morning and {total - a} in the afternoon.",
        ),
        f"{p.He} packs them into {boxes} of {size} and fills as many {boxes} as {p.he} can.",
        (f"How many {thing} are left over?", f"How many {thing} do not fit into a full {box}?"),
    )
    x = d.step(f"{p} has @ {thing}.", a, "+", total - a)
    y = d.step(f"{bags} full {boxes} hold @ {thing}.", bags, "*", size)
    d.step(f"So @ {thing} are left over.", x, "-", y)


@scenario
def boxes_needed(d: Draft) -> None:
    p, thing = d.person(), d.of(words.THINGS)
    size, boxes, sold = d.number(3, 12), d.number(3, 30), d.number(3, 60)
    total = size * boxes + sold
    d.ask(
        f"{p} has {total} {thing}.",
        (f"{p.He} sells {sold} of them.", f"{sold} of them are given away."),
        f"The others are packed into boxes of {size}.",
        (f"How many boxes does {p.he} need?", "How many boxes are filled?"),
    )
    x = d.step(f"There are @ {thing} left.", total, "-", sold)
    d.step(f"{p} needs @ boxes.", x, "/", size)


@scenario
def cost_of_packs(d: Draft) -> None:
    p = d.person()
    packs, size, price = d.number(2, 12), d.number(2, 12), d.number(2, 12)
    thing = d.pick("sausages", "cupcakes", "balloons", "juice boxes", "cookies", "napkins")
    total = packs * size
    pairs = [g for g in range(2, 13) if total % g == 0 and total // g > 1]
    if not pairs:
        size, total = 6, packs * 6
        pairs = [2, 3, 6]
    guests = d.of(pairs)
    each = total // guests
    d.ask(
        f"{p} invites {guests} guests and wants to give {each} {thing} to each.",
        (
            f"The {thing} are sold in packs of {size} for ${price} a pack.",
            f"A pack of {size} {thing} costs ${price}.",
        ),
        (f"How much do the {thing} cost?", f"How much does {p.he} have to pay?"),
    )
    x = d.step(f"{p} needs @ {thing}.", guests, "*", each)
    y = d.step("That is @ packs.", x, "/", size)
    d.step("The packs cost $@.", y, "*", price)


@scenario
def pizza_slices(d: Draft) -> None:
    p = d.person()
    large, small = d.number(2, 9), d.number(2, 9)
    slices, slices2 = d.pick(8, 10, 12, 16), d.pick(4, 6, 8)
    total = large * slices + small * slices2
    people = d.number(3, 12)
    each = min(d.number(1, 5), (total - 1) // people)
    each = max(each, 1)
    people = min(people, total // each)
    d.ask(
        f"{p} orders {large} large pizzas and {small} small pizzas.",
        f"A large pizza has {slices} slices and a small pizza has {slices2} slices.",
        f"{people} people eat {each} slices each."
        if each > 1
        else f"{people} people eat 1 slice each.",
        ("How many slices are left?", "How many slices remain?"),
    )
    x = d.step("The large pizzas have @ slices.", large, "*", slices)
    y = d.step("The small pizzas have @ slices.", small, "*", slices2)
    s = d.step("There are @ slices.", x, "+", y)
    e = d.step("The people eat @ slices.", people, "*", each)
    d.step("There are @ slices left.", s, "-", e)


@scenario
def recipe(d: Draft) -> None:
    p, treat = d.person(), d.of(words.TREATS)
    batch, cups, batches = d.number(4, 24), d.number(2, 9), d.number(2, 9)
    has = d.number(1, cups * batches - 1)
    what = d.pick("flour", "sugar", "milk", "oats")
    d.ask(
        f"A recipe for {batch} {treat} needs {cups} cups of {what}.",
        (f"{p} wants to bake {batch * batches} {treat}.", f"{p} needs {batch * batches} {treat}."),
        (f"{p.He} already has {has} cups." if has > 1 else f"{p.He} already has 1 cup."),
        (
            f"How many more cups of {what} does {p.he} need?",
            f"How many cups must {p.he} still buy?",
        ),
    )
    n = d.step(f"{p} bakes the recipe @ times.", batch * batches, "/", batch)
    x = d.step(f"That needs @ cups of {what}.", n, "*", cups)
    d.step(f"{p} needs @ more cups.", x, "-", has)


@scenario
def rope_pieces(d: Draft) -> None:
    p = d.person()
    what, unit = (
        d.pick("rope", "ribbon", "wire", "cloth", "board"),
        d.pick("feet", "meters", "inches"),
    )
    piece, n, used = d.number(2, 12), d.number(3, 30), d.number(2, 40)
    d.ask(
        (
            f"{p} has a {what} that is {piece * n + used} {unit} long.",
            f"{p} bought {piece * n + used} {unit} of {what}.",
        ),
        (f"{p.He} uses {used} {unit} for a project.", f"{p.He} gives {used} {unit} to a friend."),
        f"The rest is cut into pieces of {piece} {unit}.",
        (f"How many pieces does {p.he} get?", "How many pieces are there?"),
    )
    x = d.step(f"There are @ {unit} left.", piece * n + used, "-", used)
    d.step(f"{p} gets @ pieces.", x, "/", piece)


@scenario
def shelves(d: Draft) -> None:
    shelves, each, out, back = d.number(3, 12), d.number(5, 30), d.number(3, 60), d.number(2, 40)
    out = min(out, shelves * each - 1)
    place = d.pick("library", "bookstore", "school")
    what = d.pick("books", "magazines", "comics", "films")
    d.ask(
        (
            f"The {place} has {shelves} shelves with {each} {what} each.",
            f"There are {shelves} shelves in the {place}, and each holds {each} {what}.",
        ),
        f"On {d.of(words.DAYS)}, {out} {what} were taken out and {back} were brought back.",
        (f"How many {what} are there now?", f"How many {what} does the {place} have then?"),
    )
    x = d.step(f"There were @ {what}.", shelves, "*", each)
    y = d.step(f"After some were taken there were @ {what}.", x, "-", out)
    d.step(f"Now there are @ {what}.", y, "+", back)


# --- groups of people and animals ----------------------------------------------------------------


@scenario
def percent_of_class(d: Draft) -> None:
    percent, k = d.of(words.PERCENTS)
    n = k * d.number(3, 240 // k)
    place = d.pick("class", "school", "camp", "choir", "club", "team")
    group = d.pick("girls", "new", "left-handed", "wearing glasses")
    extra = d.number(2, 30)
    who = d.pick("students", "children", "members")
    d.ask(
        (
            f"There are {n} {who} in a {place}, and {percent}% of them are {group}.",
            f"A {place} has {n} {who}. {percent}% are {group}.",
        ),
        f"Then {extra} more {who} join who are not {group}.",
        (f"How many {who} are not {group} now?", f"How many of the {who} are then not {group}?"),
    )
    x = d.step(f"@ {who} are {group}.", n, "/", k)
    y = d.step(f"@ {who} are not {group}.", n, "-", x)
    d.step(f"Now @ {who} are not {group}.", y, "+", extra)


@scenario
def buses(d: Draft) -> None:
    n, seats, adults = d.number(2, 9), d.number(10, 60), d.number(2, 20)
    empty = d.number(1, 20)
    seats += max(0, (adults + empty + 12) // n + 1 - seats)
    students = n * seats - adults - empty
    d.ask(
        (
            f"{students} students and {adults} teachers go on a trip with {n} buses.",
            f"A school rents {n} buses for {students} students and {adults} teachers.",
        ),
        (f"Each bus has {seats} seats.", f"There are {seats} seats in every bus."),
        ("How many seats stay empty?", "How many seats are not taken?"),
        shuffle=2,
    )
    x = d.step("The buses have @ seats.", n, "*", seats)
    y = d.step("There are @ people.", students, "+", adults)
    d.step("So @ seats stay empty.", x, "-", y)


@scenario
def bus_stops(d: Draft) -> None:
    vehicle = d.pick("bus", "train", "tram", "ferry")
    start, off, on = d.number(20, 120), d.number(2, 19), d.number(2, 40)
    share, k = d.share()
    on += (-(start - off + on)) % k
    d.ask(
        (f"A {vehicle} starts with {start} people.", f"There are {start} people on a {vehicle}."),
        f"At the first stop {off} get off and {on} get on.",
        f"At the second stop {share} of the people get off.",
        (f"How many people are on the {vehicle} now?", "How many people are left?"),
    )
    x = d.step("After some get off there are @ people.", start, "-", off)
    y = d.step("After some get on there are @ people.", x, "+", on)
    z = d.step("At the second stop @ people get off.", y, "/", k)
    d.step("Now there are @ people.", y, "-", z)


@scenario
def farm_animals(d: Draft) -> None:
    a, b = d.two(words.ANIMALS)
    c = d.of([x for x in words.ANIMALS if x not in (a, b)])
    word, k = d.times()
    y, fewer = d.number(4, 60), d.number(1, 20)
    fewer = min(fewer, y * k - 1)
    p = d.person()
    d.ask(
        (f"{p}'s farm has {y} {a}.", f"There are {y} {a} on {p}'s farm."),
        f"There are {word} as many {b} as {a} and {fewer} fewer {c} than {b}.",
        ("How many animals are there in total?", f"How many animals does {p} have?"),
    )
    x = d.step(f"There are @ {b}.", y, "*", k)
    z = d.step(f"There are @ {c}.", x, "-", fewer)
    s = d.step(f"There are @ {a} and {b}.", y, "+", x)
    d.step("In total there are @ animals.", s, "+", z)


@scenario
def legs(d: Draft) -> None:
    (a, la), (b, lb) = d.two(
        [("cows", 4), ("chickens", 2), ("spiders", 8), ("ants", 6), ("dogs", 4), ("birds", 2)]
    )
    n, m = d.number(2, 40), d.number(2, 40)
    p = d.person()
    d.ask(
        (f"{p} counts {n} {a} and {m} {b}.", f"There are {n} {a} and {m} {b} in a barn."),
        f"One of the {a} has {la} legs and one of the {b} has {lb} legs.",
        ("How many legs do they have altogether?", "How many legs are there in total?"),
    )
    x = d.step(f"The {a} have @ legs.", n, "*", la)
    y = d.step(f"The {b} have @ legs.", m, "*", lb)
    d.step("In total there are @ legs.", x, "+", y)


@scenario
def wheels(d: Draft) -> None:
    place = d.pick("parking lot", "garage", "street", "shop")
    (a, wa), (b, wb) = d.two([("cars", 4), ("bikes", 2), ("tricycles", 3), ("trucks", 6)])
    n, total_extra = d.number(3, 40), d.number(2, 30)
    total = n * wa + total_extra * wb
    d.ask(
        f"In a {place} there are {n} {a} and some {b}, with {total} wheels in total.",
        f"One of the {a} has {wa} wheels and one of the {b} has {wb} wheels.",
        (f"How many {b} are there?", f"What is the number of {b}?"),
    )
    x = d.step(f"The {a} have @ wheels.", n, "*", wa)
    y = d.step(f"The {b} have @ wheels.", total, "-", x)
    d.step(f"There are @ {b}.", y, "/", wb)


@scenario
def game_points(d: Draft) -> None:
    a, b = d.person(), d.person()
    twos, threes = d.number(2, 20), d.number(2, 15)
    fewer = d.number(1, 15)
    d.ask(
        (
            f"In a game {a} made {twos} two-point shots and {threes} three-point shots.",
            f"{a} scored {twos} times for 2 points and {threes} times for 3 points.",
        ),
        f"{b} scored {fewer} more points than {a}.",
        ("How many points did they score together?", f"What is the total of {a} and {b}?"),
    )
    x = d.step("The two-point shots bring @ points.", twos, "*", 2)
    y = d.step("The three-point shots bring @ points.", threes, "*", 3)
    s = d.step(f"{a} scored @ points.", x, "+", y)
    t = d.step(f"{b} scored @ points.", s, "+", fewer)
    d.step("Together they scored @ points.", s, "+", t)


@scenario
def quiz_score(d: Draft) -> None:
    p, subject = d.person(), d.of(words.SUBJECTS)
    right, plus, wrong, minus = d.number(8, 40), d.number(2, 6), d.number(1, 8), d.number(1, 2)
    d.ask(
        (
            f"In a quiz on {subject} a right answer gives {plus} points and a "
            f"wrong one costs {minus}.",
            f"A {subject} test gives {plus} points for a right answer and takes "
            f"{minus} for a wrong "
            "one.",
        ),
        f"Of {right + wrong} questions {p} answered {right} right and the others wrong.",
        (f"How many points did {p.he} get?", f"What was {p}'s score?"),
    )
    x = d.step("The right answers give @ points.", right, "*", plus)
    w = d.step("There were @ wrong answers.", right + wrong, "-", right)
    y = d.step("They cost @ points.", w, "*", minus)
    d.step(f"{p} got @ points.", x, "-", y)


@scenario
def average(d: Draft) -> None:
    p, subject = d.person(), d.of(words.SUBJECTS)
    a, b, mean = d.number(50, 99), d.number(50, 99), d.number(50, 99)
    c = 3 * mean - a - b
    if not 20 <= c <= 150:
        c = 60 + (-(a + b + 60)) % 3
    d.ask(
        (
            f"{p} scored {a}, {b} and {c} on three {subject} tests.",
            f"On three {subject} tests {p} got {a}, {b} and {c} points.",
        ),
        (f"What is {p.his} average score?", "What is the average of the scores?"),
    )
    x = d.step("The first two scores add up to @.", a, "+", b)
    y = d.step("All three add up to @.", x, "+", c)
    d.step("The average is @.", y, "/", 3)


@scenario
def needed_for_average(d: Draft) -> None:
    p = d.person()
    mean = d.number(10, 90)
    a = d.number(max(2, mean - 15), mean + 4)
    b = d.number(max(2, mean - 15), mean + 4)
    what = d.pick("points", "miles", "pages", "dollars")
    d.ask(
        f"{p} got {a} {what} in the first week and {b} {what} in the second.",
        (
            f"How many {what} does {p.he} need in the third week for an average of {mean}?",
            f"{p.He} wants an average of {mean} {what} over three weeks. How many {what} must "
            f"{p.he} get in the third week?",
        ),
    )
    total = d.step(f"For that average {p} needs @ {what} in all.", 3, "*", mean)
    s = d.step(f"So far {p.he} has @ {what}.", a, "+", b)
    d.step(f"{p.He} needs @ {what} in the third week.", total, "-", s)


@scenario
def lost_and_eaten(d: Draft) -> None:
    a, b = d.person(), d.person()
    fruit = d.of(words.FRUIT)
    rows, each = d.number(2, 12), d.number(3, 12)
    share, k = d.share()
    bad = (rows * each) % k
    x = rows * each - bad
    if x < k:
        rows, bad = k, 0
        x = rows * each
    facts = [
        f"{a} has {rows} trees with {each} {fruit} on each.",
        f"{bad} of the {fruit} fell down and were lost." if bad > 1 else "",
    ]
    if bad == 1:
        facts[1] = f"1 of the {fruit} was lost."
    d.ask(
        *[f for f in facts if f],
        (
            f"{a.He} gave {share} of the {'rest' if bad else fruit} to {b}.",
            f"{b} took {share} of the {'remaining ' if bad else ''}{fruit}.",
        ),
        (f"How many {fruit} does {a} have left?", f"How many {fruit} are left for {a}?"),
    )
    n = d.step(f"The trees have @ {fruit}.", rows, "*", each)
    if bad:
        n = d.step(f"After the loss there are @ {fruit}.", n, "-", bad)
    g = d.step(f"{b} got @ {fruit}.", n, "/", k)
    d.step(f"{a} has @ {fruit} left.", n, "-", g)


# --- measures ------------------------------------------------------------------------------------


@scenario
def rectangle_cost(d: Draft) -> None:
    p = d.person()
    what, cover = d.pick(
        ("garden", "grass"),
        ("room", "carpet"),
        ("wall", "paint"),
        ("floor", "wood"),
        ("yard", "soil"),
    )
    a, b, price = d.number(3, 12), d.number(3, 12), d.number(2, 9)
    if d.chance(0.5):
        d.ask(
            f"{p}'s {what} is {a} meters long and {b} meters wide.",
            f"One square meter of {cover} costs ${price}.",
            (f"How much does the {cover} for the {what} cost?", f"How much does {p} have to pay?"),
            shuffle=2,
        )
        x = d.step("The area is @ square meters.", a, "*", b)
        d.step(f"The {cover} costs $@.", x, "*", price)
    else:
        d.ask(
            f"{p}'s {what} is {a} meters long and {b} meters wide.",
            f"One meter of fence costs ${price}.",
            f"How much does a fence around the {what} cost?",
        )
        s = d.step("One length and one width are @ meters.", a, "+", b)
        x = d.step("The way around is @ meters.", s, "*", 2)
        d.step("The fence costs $@.", x, "*", price)


@scenario
def garden_rows(d: Draft) -> None:
    p, crop = d.person(), d.of(words.CROPS)
    rows, plants, yield_ = d.number(2, 10), d.number(3, 12), d.number(2, 6)
    share, k = d.share()
    rows = k if rows * plants % k else rows
    d.ask(
        (
            f"{p} planted {rows} rows of {plants} {crop} plants.",
            f"In {p}'s garden there are {rows} rows with {plants} {crop} plants in each.",
        ),
        f"Bugs ate {share} of the plants.",
        f"Each plant that is left gives {yield_} pounds.",
        (f"How many pounds does {p} harvest?", "How many pounds is that in total?"),
    )
    x = d.step("There were @ plants.", rows, "*", plants)
    y = d.step("Bugs ate @ plants.", x, "/", k)
    z = d.step("There are @ plants left.", x, "-", y)
    d.step(f"{p} harvests @ pounds.", z, "*", yield_)


@scenario
def bricks(d: Draft) -> None:
    p = d.person()
    rows, each, has = d.number(3, 20), d.number(10, 60, 5), d.number(5, 200)
    what = d.pick("bricks", "tiles", "stones", "blocks")
    has = min(has, rows * each - 1)
    walls = d.number(2, 3)
    d.ask(
        f"{p} builds {walls} walls.",
        f"Each wall has {rows} rows of {each} {what}.",
        (f"{p} already has {has} {what}.", f"{p.He} has {has} {what} at home."),
        (f"How many more {what} does {p.he} need?", f"How many {what} must {p.he} buy?"),
    )
    x = d.step(f"One wall needs @ {what}.", rows, "*", each)
    y = d.step(f"{walls} walls need @ {what}.", x, "*", walls)
    d.step(f"{p} needs @ more {what}.", y, "-", has)


@scenario
def loaded_weight(d: Draft) -> None:
    boxes, weight, crates = d.number(3, 12), d.number(2, 20), d.number(2, 9)
    weight2 = d.number(5, 40)
    empty, vehicle = d.number(100, 400, 10), d.pick("truck", "wagon", "trailer", "boat", "van")
    unit = d.pick("pounds", "kilograms")
    d.ask(
        f"An empty {vehicle} weighs {empty} {unit}.",
        (
            f"It carries {boxes} boxes of {weight} {unit} each and {crates} crates of {weight2} "
            f"{unit} each.",
        ),
        (f"How much does the loaded {vehicle} weigh?", f"What is the total weight in {unit}?"),
    )
    x = d.step(f"The boxes weigh @ {unit}.", boxes, "*", weight)
    y = d.step(f"The crates weigh @ {unit}.", crates, "*", weight2)
    s = d.step(f"The load weighs @ {unit}.", x, "+", y)
    d.step(f"The loaded {vehicle} weighs @ {unit}.", s, "+", empty)


@scenario
def letters_per_year(d: Draft) -> None:
    p = d.person()
    pages, friends, times, weeks = d.number(2, 6), d.number(2, 6), d.number(2, 4), d.number(3, 12)
    what = d.pick("letter", "report", "story", "note")
    d.ask(
        (
            f"{p} writes a {pages}-page {what} to {friends} different friends "
            f"{times} times a week.",
            f"{times} times a week {p} writes a {what} of {pages} pages to each "
            f"of {friends} friends.",
        ),
        (
            f"How many pages does {p.he} write in {weeks} weeks?",
            f"How many pages are that in {weeks} weeks?",
        ),
    )
    x = d.step(f"Each time {p} writes @ pages.", pages, "*", friends)
    y = d.step(f"In a week {p.he} writes @ pages.", x, "*", times)
    d.step(f"In {weeks} weeks {p.he} writes @ pages.", y, "*", weeks)


@scenario
def water_bottles(d: Draft) -> None:
    p = d.person()
    cups, days = d.number(2, 9), d.number(3, 14)
    family = d.number(2, 6)
    what = d.pick("bottles of water", "cups of tea", "glasses of milk", "cans of juice")
    have = cups * family * days + d.number(1, 60)
    d.ask(
        f"{p}'s family has {family} people, and each drinks {cups} {what} a day.",
        (f"They bought {have} {what}.", f"There are {have} {what} in the house."),
        (
            f"How many {what} are left after {days} days?",
            f"How many will be left after {days} days?",
        ),
    )
    x = d.step(f"The family drinks @ {what} a day.", family, "*", cups)
    y = d.step(f"In {days} days they drink @.", x, "*", days)
    d.step("There are @ left.", have, "-", y)


@scenario
def stock_days(d: Draft) -> None:
    p = d.person()
    pets, food = d.pick(("dogs", "cans"), ("cats", "cups of food"), ("rabbits", "carrots"))
    n, each, days = d.number(2, 9), d.number(1, 5), d.number(3, 30)
    per_day = n * each
    total = per_day * days
    bags = next(b for b in (10, 9, 8, 7, 6, 5, 4, 3, 2, 1) if total % b == 0)
    d.ask(
        f"{p} has {n} {pets}, and each eats {each} {food} a day."
        if each > 1
        else f"{p} has {n} {pets}, and each eats 1 of the {food} a day.",
        f"{p.He} buys {bags} boxes with {total // bags} {food} each."
        if bags > 1
        else f"{p.He} buys 1 box with {total} {food}.",
        ("For how many days is that enough?", "How many days does it last?"),
    )
    x = d.step(f"The {pets} eat @ {food} a day.", n, "*", each)
    y = d.step(f"{p} buys @ {food}.", bags, "*", total // bags)
    d.step("It is enough for @ days.", y, "/", x)


_NAMES = list(SCENARIOS)


def make(rng: random.Random) -> Problem:
    """One problem. Raises: ValueError if the numbers did not work out; draw again."""
    name = _NAMES[int(rng.random() * len(_NAMES))]
    draft = Draft(rng)
    SCENARIOS[name](draft)
    return draft.finish(name)
