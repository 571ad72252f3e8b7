"""Stories of money: wallets, shopping, discounts, wages."""

# ruff: noqa: E501  (a wording is one line, however long)

from __future__ import annotations

from mamba2_math import story_words as w
from mamba2_math.registry import story
from mamba2_math.stories.writing import (
    MAX_STEPS,
    PERIODS,
    Actor,
    Part,
    Story,
    article,
    cap,
    every,
    fraction,
    take_share,
    tell,
)
from mamba2_math.story_words import PAST, THIRD, Noun


def priced(d: Story, k: int, price: int, x: Noun) -> str:
    """``k`` things at a price each."""
    n, usd, things = d.n(k), d.usd(price), x.one if k == 1 else x.many
    if k == 1:
        return (
            d.pick(
                f"a {x.one} for {usd}",
                f"a {x.one} that costs {usd}",
                f"one {x.one} for {usd}",
                f"a {usd} {x.one}" if not d.dollars else f"a {x.one} for {usd}",
            )
            .replace("a a", "an a")
            .replace("a o", "an o")
            .replace("a e", "an e")
            .replace("a i", "an i")
            .replace("a u", "an u")
        )
    return d.pick(
        f"{n} {things} for {usd} each",
        f"{n} {things} at {usd} each",
        f"{n} {things} that cost {usd} each",
        f"{n} {things} for {usd} each",
        f"{n} {things} costing {usd} each",
        f"{n} {things}, which cost {usd} each",
        f"{n} {things}, each costing {usd}",
    )


def usd_form(d: Story, word: str) -> str:
    return d.pick(
        f"How much money {word}",
        f"How much {word}",
        f"How much money {word}",
        f"How many dollars {word}",
    )


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
        parts.append(
            Part(w.conjugate(d.pick(f"save {amount}", f"earn {amount}", f"save {amount}"))[form])
        )
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
                parts.append(
                    Part(
                        w.conjugate(
                            f"spend {words} of {d.pick('it', 'the money', f'{actor.his} money')} on {on}"
                        )[form]
                    )
                )
                cost = take_share(d, value, divisor, pieces, "dollars")
            else:
                cost = d.number(1, value)
                parts.append(Part(_money(d, d.of(w.MONEY_LOSSES)[form], actor, d.usd(cost))))
            value = d.add("spend", f"Then {actor.name} {actor.has} $@ left.", value, "-", cost)
        elif value < 600:
            if r > 0.85 and len(d.lines) < MAX_STEPS - 1:
                m, k, unit = d.number(2, 15), d.number(2, 10), d.of(PERIODS)
                parts.append(
                    Part(
                        w.conjugate(
                            d.pick(f"earn {_each(d, k, m, unit)}", f"save {_each(d, k, m, unit)}")
                        )[form]
                    )
                )
                got = d.add("daily", f"In {k} {unit[1]} it is $@.", k, "*", m)
            elif r > 0.78 and len(d.lines) < MAX_STEPS - 1:
                k, m = d.number(2, 10), d.number(2, 15)
                job = d.pick(
                    "mow {k} lawns",
                    "wash {k} cars",
                    "sell {k} cups of lemonade",
                    "walk {k} dogs",
                    "sell {k} cakes",
                    "sell {k} old books",
                )
                parts.append(Part(w.conjugate(f"{job.format(k=d.n(k))} for {d.usd(m)} each")[form]))
                got = d.add("jobs", "That brings $@.", k, "*", m)
            else:
                got = d.size(1, 100)
                if d.chance(0.25):
                    given = w.conjugate(
                        d.pick(
                            "give {him} {a}",
                            "give {him} {a}",
                            "send {him} {a}",
                            "pay {him} {a}",
                            "give {him} another {a}",
                        )
                    )
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
        d.say(
            f"{who} {w.conjugate('want')[form]} to buy a {thing} that costs {d.usd(goal)}.",
            f"{cap(who)} would like to buy a {thing} for {d.usd(goal)}.",
            f"A {thing} costs {d.usd(goal)}.",
        )
        d.end(
            f"How much more money {actor.does} {who} need?",
            f"How much more {actor.does} {who} need to buy it?",
            f"How much money {actor.does} {who} still need?",
            f"How many more dollars {actor.does} {who} need to buy the {thing}?",
        )
        d.add(
            "goal",
            f"{actor.name} still {'needs' if actor.form == THIRD else 'need'} $@.",
            goal,
            "-",
            value,
        )
    elif r < 0.22 and len(d.lines) < MAX_STEPS and (price := d.divisor(value)):
        x = d.of(w.PRICED)
        d.say(
            f"{x.many} cost {d.usd(price)} each.",
            f"A {x.one} costs {d.usd(price)}.",
            f"One {x.one} costs {d.usd(price)}.",
        )
        d.end(
            f"How many {x.many} can {who} buy with {d.pick('the money', 'the rest', 'the money that is left')}?",
            f"How many {x.many} can {who} buy?",
        )
        d.add("buys", f"{actor.name} can buy @ {x.many}.", value, "/", price)
    elif d.shape[-1] == "earn" and d.chance(0.7):
        d.end(
            f"{usd_form(d, does)} {who} have now?",
            f"{usd_form(d, does)} {who} have in total?",
            f"{usd_form(d, does)} {who} have altogether?",
            f"{usd_form(d, does)} {who} have in all?",
            f"{usd_form(d, does)} {who} have?",
        )
    else:
        d.end(
            f"{usd_form(d, does)} {who} have left?",
            f"{usd_form(d, does)} {who} have left?",
            f"{usd_form(d, does)} {who} have now?",
            "How much money is left?",
            "How much is left?",
            f"{usd_form(d, actor.does)} {who} still have?",
            f"{usd_form(d, does)} {who} have in the end?",
            f"How much money {actor.does} {who} have remaining?",
        )


def _each(d: Story, k: int, m: int, unit: tuple[str, str]) -> str:
    return (
        every(d, k, m, "dollars", unit)
        if d.dollars
        else f"${every(d, k, m, '', unit).replace('  ', ' ')}"
        if not d.wordy
        else every(d, k, m, "dollars", unit)
    )


def _money(d: Story, phrase: str, actor: Actor, amount: str) -> str:
    if "{one}" in phrase:
        phrase = phrase.replace("a {one}", article(d.of(w.PRICED).one))
    if "{r}" in phrase:
        phrase = phrase.replace("{r}", d.relative(actor))
    return phrase.format(a=amount, his=actor.his, him=actor.him)


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
        d.say(
            f"{' and '.join(listed)}.",
            ". ".join(cap(t) for t in listed) + ".",
            f"{cap(xs[0].many)} cost {d.usd(prices[0])} each{''.join(f' and {x.many} cost {d.usd(p)} each' for x, p in zip(xs[1:], prices[1:]))}.",
        )
        things = " and ".join(
            f"{d.n(k) if k > 1 else d.pick('1', 'a', 'one')} {x.one if k == 1 else x.many}"
            for x, k in zip(xs, ks)
        )
        if d.chance(0.4):
            things_question = True
            if d.chance(0.4):
                d.text[-1] = (
                    f"If {d.pick(' and '.join(listed), f'one {xs[0].one} costs {d.usd(prices[0])}' if count == 1 else ' and '.join(listed))},"
                )
        else:
            things_question = False
            d.say(
                f"{actor.first} {w.conjugate(d.pick('buy', 'buy', 'order', 'get', 'want to buy' if not d.past else 'purchase'))[form]} {things}."
            )
    else:
        things_question = False
        listed = [priced(d, k, p, x) for k, p, x in zip(ks, prices, xs)]
        text = (
            listed[0]
            if count == 1
            else f"{', '.join(listed[:-1])}{d.pick(' and', ' and', ', and')} {listed[-1]}"
        )
        verb = w.conjugate(d.pick("buy", "buy", "buy", "order", "purchase", "get"))[form]
        if count == 2 and d.chance(0.2):
            d.say(f"{actor.first} {verb} {listed[0]}. {cap(d.who(actor))} also {verb} {listed[1]}.")
        else:
            d.say(
                f"{actor.first} {verb} {text}.",
                f"{actor.first} {verb} {text}.",
                f"{d.pick('At the store,', 'At the market,', 'In a shop,')} {actor.first} {verb} {text}.",
            )
    costs = [
        d.add("cost", f"The {x.many} cost $@.", k, "*", p) if k > 1 else p
        for x, k, p in zip(xs, ks, prices)
    ]
    total = costs[0]
    for i, cost in enumerate(costs[1:], 1):
        total = d.add(
            "sum",
            "In total it costs $@." if i == count - 1 else "So far it costs $@.",
            total,
            "+",
            cost,
        )
    r = d._rng.random()
    if things_question:
        if d.text[-1].startswith("If "):
            d.text[-1] += d.pick(
                f" how much do {things} cost?",
                f" how much will {things} cost?",
                f" how much do {things} cost in total?",
                f" what is the price of {things}?",
            )
            d.question = " ".join(d.text)
            return
        d.end(
            f"How much do {things} cost?",
            f"How much do {things} cost together?",
            f"What is the total cost of {things}?",
            f"What is the price of {things}?",
            f"How much does it cost to buy {things}?",
            f"How much would {things} cost?",
        )
    elif r < 0.5 or len(d.lines) >= MAX_STEPS:
        d.end(
            f"How much {does} {who} spend?",
            f"How much {does} {who} pay?",
            f"How much {does} {who} spend in total?",
            f"How much money {does} {who} spend altogether?",
            "What is the total cost?",
            f"How much {actor.does} {who} have to pay?",
            f"How much {does} {who} pay in total?",
            f"How much {does} {who} spend altogether?",
            "What is the total price?",
            f"How much money {actor.does} {who} need?",
            "How much does it cost in total?",
            f"How much {does} it cost altogether?".replace("do it", "does it"),
        )
    elif r < 0.78:
        bills = [b for b in (10, 20, 50, 100, 200) if b > total]
        paid = bills[0] if bills and d.chance(0.7) else total + d.number(1, 40)
        bill = d.chance(0.5)
        if bill and paid in (10, 20, 50, 100):
            d.say(
                f"{who} {w.conjugate('pay')[form]} with a ${paid} bill.",
                f"{who} {w.conjugate('give')[form]} the {d.pick('cashier', 'clerk', 'seller')} a ${paid} bill.",
                f"{who} {w.conjugate('hand')[form]} over a ${paid} bill.",
                f"{who} {w.conjugate('pay')[form]} with a {paid} dollar bill.",
                f"{who} {w.conjugate('pay')[form]} with {d.usd(paid)}.",
            )
            change = True
        elif bill:
            d.say(
                f"{who} {w.conjugate('pay')[form]} with {d.usd(paid)}.",
                f"{who} {w.conjugate('give')[form]} the {d.pick('cashier', 'clerk', 'seller')} {d.usd(paid)}.",
            )
            change = True
        else:
            had = f"{actor.first} {w.conjugate(d.pick('have', 'have', 'start with', 'go to the store with'))[form]} {d.usd(paid)}."
            d.text.insert(0, cap(had)) if d.chance(0.7) and not actor.first.startswith(
                "a "
            ) else d.say(f"{who} {w.conjugate('have')[form]} {d.usd(paid)}.")
            change = False
        if change:
            d.end(
                f"How much change {does} {who} get?",
                f"How much change {does} {who} get back?",
                f"How much change {does} {who} receive?",
                f"How much change should {who} get?",
                f"What is {actor.his} change?",
                f"How much money {does} {who} get back?",
                f"How much change will {who} get?",
            )
            d.add("change", "The change is $@.", paid, "-", total)
        else:
            d.end(
                f"How much money {does} {who} have left?",
                f"How much {does} {who} have left?",
                "How much money is left?",
                f"How many dollars {does} {who} have left?",
                f"How much money {actor.does} {who} have now?",
                f"How much money will {who} have left?",
            )
            d.add("left", f"{actor.name} {actor.has} $@ left.", paid, "-", total)
    elif r < 0.9:
        off = d.number(1, min(20, total - 1))
        d.say(
            f"{who} {w.conjugate('have')[form]} a coupon for {d.usd(off)} off.",
            f"{who} {w.conjugate('use')[form]} a {d.pick('coupon', 'discount')} of {d.usd(off)}.",
            f"{who} {w.conjugate('get')[form]} a discount of {d.usd(off)}.",
        )
        d.end(
            f"How much {does} {who} pay?",
            f"How much {actor.does} {who} have to pay?",
            "What is the total cost?",
            f"How much {does} {who} pay in the end?",
        )
        d.add("off", "After the discount it costs $@.", total, "-", off)
    else:
        k = d.divisor(total)
        if k is None:
            raise ValueError("no share")
        d.say(
            f"The cost {'was' if d.past else 'is'} split equally between {d.n(k)} friends.",
            f"{d.n(k)} people share the cost equally.",
            f"{d.n(k)} friends split the bill evenly.",
        )
        d.end(
            "How much does each person pay?",
            "How much does each of them pay?",
            "How much does each one have to pay?",
            "How much did each of them pay?",
        )
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
        d.say(
            f"{actor.first} {w.conjugate('buy')[form]} {article(x.one)} for {d.usd(price)} and {w.conjugate('pay')[form]} with a ${paid} bill.",
            f"{actor.first} {w.conjugate('pay')[form]} for {article(x.one)} that costs {d.usd(price)} with a ${paid} bill.",
            f"{cap(article(x.one))} costs {d.usd(price)}. {cap(actor.first)} {w.conjugate('pay')[form]} with a ${paid} bill.",
            f"{actor.first} {w.conjugate('pay')[form]} for a ${price} {x.one} with a ${paid} bill.",
            f"{actor.first} {w.conjugate('use')[form]} a {paid} dollar bill to buy {article(x.one)} for {d.usd(price)}.",
            f"{actor.first} {w.conjugate('give')[form]} the cashier {d.usd(paid)} for {article(x.one)} that costs {d.usd(price)}.",
        )
        d.end(
            f"How much change {does} {who} get?",
            f"How much change {does} {who} get back?",
            f"How much change {does} {who} receive?",
            f"How much money {does} {who} get back?",
            f"What is {actor.his} change?",
            f"How much change should {who} get?",
        )
        d.add("change", "The change is $@.", paid, "-", price)
    elif r < 0.5:
        k, price = d.number(2, 12), d.number(2, 25)
        total = k * price
        d.say(
            f"{actor.first} {w.conjugate('pay')[form]} {d.usd(total)} for {d.n(k)} {x.many}.",
            f"{d.n(k)} {x.many} cost {d.usd(total)}.",
            f"{actor.first} {w.conjugate('buy')[form]} {d.n(k)} {x.many} for {d.usd(total)}.",
            f"{actor.first} {w.conjugate('spend')[form]} {d.usd(total)} on {d.n(k)} {x.many}.",
        )
        if d.chance(0.6):
            d.end(
                f"How much does one {x.one} cost?",
                f"How much does each {x.one} cost?",
                f"What is the price of one {x.one}?",
                f"How much is one {x.one}?",
                f"How much did each {x.one} cost?",
                f"What is the cost of each {x.one}?",
                f"If each {x.one} costs the same, how much is one {x.one}?",
            )
            d.add("unit", f"One {x.one} costs $@.", total, "/", k)
        else:
            j = d.number(2, 12)
            d.end(
                f"How much do {d.n(j)} {x.many} cost?",
                f"How much would {d.n(j)} {x.many} cost?",
                f"What is the price of {d.n(j)} {x.many}?",
            )
            each = d.add("unit", f"One {x.one} costs $@.", total, "/", k)
            d.add("cost", f"The {j} {x.many} cost $@.", j, "*", each)
    elif r < 0.65:
        k, each = d.number(2, 12), d.number(2, 25)
        people = d.pick(
            "friends", "friends", "people", "students", "coworkers", "sisters", "roommates"
        )
        bill = d.pick(
            "bill", "meal", "dinner", "pizza", "gift", "present", "taxi ride", "trip", "lunch"
        )
        was = "was" if d.past else "is"
        d.say(
            f"{d.n(k)} {people} {'went' if d.past else 'go'} to a restaurant. The bill {was} {d.usd(k * each)} and they split it {d.pick('evenly', 'equally')}.",
            f"{d.n(k)} {people} {'shared' if d.past else 'share'} the cost of a {bill} equally. It {'cost' if d.past else 'costs'} {d.usd(k * each)}.",
            f"{d.n(k)} {people} split a {bill} that {'cost' if d.past else 'costs'} {d.usd(k * each)} equally.",
            f"The {bill} {'cost' if d.past else 'costs'} {d.usd(k * each)}. {cap(d.n(k))} {people} split the cost {d.pick('evenly', 'equally')}.",
        )
        d.end(
            "How much does each person pay?",
            "How much did each of them pay?",
            "How much does each of them have to pay?",
            "How much does each one pay?",
            "How much should each person pay?",
        )
        d.add("split", "Each person pays $@.", k * each, "/", k)
    elif r < 0.85:
        thing, goal = d.of(w.COSTLY), d.size(20, 300)
        have = d.number(2, goal - 1)
        d.say(
            f"{actor.first} {w.conjugate('want')[form]} to buy a {thing} that costs {d.usd(goal)}.",
            f"{actor.first} {w.conjugate('want')[form]} to buy a {thing} for {d.usd(goal)}.",
            f"A {thing} costs {d.usd(goal)}. {cap(actor.first)} {w.conjugate('want')[form]} to buy it.",
            f"{actor.first} {w.conjugate('need')[form]} {d.usd(goal)} for a {thing}.",
        )
        d.say(
            f"{who} already {w.conjugate('have')[form]} {d.usd(have)}.",
            f"{who} {w.conjugate('have')[form]} {d.usd(have)}.",
            f"{who} {actor.has} saved {d.usd(have)}.",
            f"So far {who} {actor.has} {d.usd(have)}.",
        )
        need = goal - have
        d.add(
            "goal",
            f"{actor.name} still {'needs' if actor.form == THIRD else 'need'} $@.",
            goal,
            "-",
            have,
        )
        if d.chance(0.4) and (k := d.divisor(need, 2, 25)):
            d.say(
                f"{who} {w.conjugate('save')[form]} {d.usd(k)} {d.pick('a', 'each', 'every', 'per')} week.",
                f"{who} can save {d.usd(k)} a week.",
            )
            d.end(
                f"How many weeks {actor.does} {who} need?",
                "How many weeks will it take?",
                f"In how many weeks can {who} buy the {thing}?",
                "How many weeks will it take to save enough?",
            )
            d.add("weeks", "It takes @ weeks.", need, "/", k)
        else:
            d.end(
                f"How much more money {actor.does} {who} need?",
                f"How much more {actor.does} {who} need?",
                f"How much money {actor.does} {who} still need?",
                f"How much more money must {who} save?",
                f"How many more dollars {actor.does} {who} need?",
            )
    else:
        k, price = d.number(2, 20), d.number(2, 15)
        total = k * price
        d.say(
            f"{actor.first} {w.conjugate('have')[form]} {d.usd(total)}. {cap(article(x.one))} costs {d.usd(price)}.",
            f"{cap(article(x.one))} costs {d.usd(price)}. {cap(actor.first)} {w.conjugate('have')[form]} {d.usd(total)}.",
            f"{actor.first} {w.conjugate('spend')[form]} {d.usd(total)} on {x.many} that cost {d.usd(price)} each.",
        )
        if "spen" in d.text[0]:
            d.end(f"How many {x.many} {does} {who} buy?")
        else:
            d.end(f"How many {x.many} can {who} buy?", f"How many {x.many} can {who} get?")
        d.add("buys", f"{actor.name} can buy @ {x.many}.", total, "/", price)


@story(3)
def discount(d: Story) -> None:
    """So many percent off, or so many dollars."""
    actor, x = d.actor(), d.pick(*(Noun(t, t + "s") for t in w.COSTLY[:18]), d.of(w.PRICED))
    words, divisor, parts = d.pick(
        ("10%", 10, 1),
        ("20%", 5, 1),
        ("25%", 4, 1),
        ("50%", 2, 1),
        ("10%", 10, 1),
        ("20%", 5, 1),
        ("25%", 4, 1),
        ("50%", 2, 1),
        ("30%", 10, 3),
        ("40%", 5, 2),
        ("75%", 4, 3),
        ("60%", 5, 3),
        ("70%", 10, 7),
    )
    price = divisor * d.number(1, 240 // divisor)
    one, usd = x.one, d.usd(price)
    if d.chance(0.15):
        words = f"{words[:-1]} percent"
    r = d._rng.random()
    if r < 0.6:
        d.say(
            f"{article(one)} costs {usd}. It is on sale for {words} off.",
            f"{article(one)} costs {usd} and is {words} off.",
            f"{article(one)} that costs {usd} is {words} off.",
            f"The price of {article(one)} is {usd}. There is a {words} discount.",
            f"{article(one)} normally costs {usd}. Today it is {words} off.",
            f"{article(one)} is priced at {usd}. The store gives a {words} discount.",
            f"The regular price of {article(one)} is {usd}. It is on sale for {words} off.",
            f"{actor.first} {w.conjugate('buy')[d.form(actor)]} {article(one)} with a {words} discount. The price {'was' if d.past else 'is'} {usd} before the discount.",
            f"{article(one)} costs {usd}. The store takes {words} off the price.",
        )
        k = d.add(
            "share", "One part is $@." if parts > 1 else "The discount is $@.", price, "/", divisor
        )
        if parts > 1:
            k = d.add("parts", "The discount is $@.", k, "*", parts)
        if d.chance(0.12):
            d.end("How much is the discount?", "How much money do you save?", "How much is saved?")
            return
        d.end(
            "What is the sale price?",
            "How much does it cost now?",
            "What is the new price?",
            f"How much does the {one} cost now?",
            f"What is the price of the {one} after the discount?",
            f"How much is the {one} now?",
            "What is the final price?",
            f"How much {actor.does} {actor.name} pay for it?"
            if actor.name in d.text[0]
            else "How much do you pay?",
            "What does it cost on sale?",
            f"What is the sale price of the {one}?",
        )
        d.add("off", "The new price is $@.", price, "-", k)
    elif r < 0.8:
        off = d.number(1, price - 1)
        d.say(
            f"{article(one)} costs {usd}. It is {d.usd(off)} off.",
            f"{article(one)} normally costs {usd}, but today it is {d.usd(off)} cheaper.",
            f"The price of {article(one)} was {usd}. It was reduced by {d.usd(off)}.",
        )
        d.end("How much does it cost now?", "What is the new price?", f"How much is the {one} now?")
        d.add("off", "The new price is $@.", price, "-", off)
    else:
        d.say(
            f"{article(one)} {'cost' if d.past else 'costs'} {usd}. The price {d.pick('goes up', 'rises', 'increases')} by {words}.",
            f"The price of {article(one)} is {usd}. It {d.pick('goes up', 'rises', 'increases')} by {words}.",
        )
        k = d.add(
            "share", "One part is $@." if parts > 1 else "The increase is $@.", price, "/", divisor
        )
        if parts > 1:
            k = d.add("parts", "The increase is $@.", k, "*", parts)
        d.end(
            "What is the new price?",
            "How much does it cost now?",
            f"What is the new price of the {one}?",
        )
        d.add("up", "The new price is $@.", price, "+", k)


@story(4)
def wages(d: Story) -> None:
    """So much an hour, for so many hours on so many days; and what remains of it."""
    actor = d.actor()
    form, who = d.form(actor), d.who(actor)
    wage = d.number(4, 25)
    does = "did" if d.past else actor.does
    d.say(
        f"{actor.first} {w.conjugate(d.pick('earn', 'make', 'earn', 'get'))[form]} {d.usd(wage)} {d.pick('an hour', 'per hour', 'for each hour of work', 'every hour', 'an hour')}.",
        f"{actor.first} {w.conjugate('work')[form]} for {d.usd(wage)} {d.pick('an hour', 'per hour')}.",
        f"{actor.first} {'was' if d.past and actor.form == THIRD else 'were' if d.past else 'is' if actor.form == THIRD else 'am' if actor.he == 'I' else 'are'} paid {d.usd(wage)} {d.pick('an hour', 'per hour')}.".replace(
            "I were", "I was"
        ),
    )
    r = d._rng.random()
    worked = w.conjugate("work")[form]
    if r < 0.35:
        a, b = d.number(2, 10), d.number(2, 10)
        i, j = sorted(d._rng.sample(range(7), 2))
        one, two = w.DAYS[i], w.DAYS[j]
        d.say(
            f"{who} {worked} {d.n(a)} hours on {one} and {d.n(b)} hours on {two}.",
            f"On {one} {who} {worked} {d.n(a)} hours and on {two} {d.n(b)} hours.",
            f"{who} {worked} for {d.n(a)} hours on {one} and {d.n(b)} on {two}.",
        )
        hours = d.add(
            "hours", f"{actor.name} {w.conjugate('work')[actor.form]} @ hours.", a, "+", b
        )
    elif r < 0.65:
        hours, days = d.number(2, 9), d.number(2, 6)
        d.say(
            f"{who} {worked} {d.n(hours)} hours {d.pick('a', 'per', 'each', 'every')} day for {d.n(days)} days.",
            f"{who} {worked} {d.n(days)} days for {d.n(hours)} hours {d.pick('a day', 'each day')}.",
            f"{who} {worked} {d.n(hours)} hours a day, {d.n(days)} days a week.",
        )
        week = "a week" in d.text[-1]
        hours = d.add(
            "hours", f"{actor.name} {w.conjugate('work')[actor.form]} @ hours.", hours, "*", days
        )
        if week:
            d.end(
                f"How much {actor.does} {who} earn {d.pick('in a week', 'per week', 'each week', 'a week')}?",
                f"How much money {actor.does} {who} make in one week?",
            )
            d.add("pay", f"{actor.name} {w.conjugate('earn')[actor.form]} $@.", hours, "*", wage)
            return
    else:
        hours = d.number(2, 40)
        if d.chance(0.4):
            d.end(
                f"How much {actor.does} {who} earn in {d.n(hours)} hours?",
                f"How much will {who} make in {d.n(hours)} hours?",
                f"How much money {actor.does} {who} make for {d.n(hours)} hours of work?",
            )
            d.add("pay", f"{actor.name} {w.conjugate('earn')[actor.form]} $@.", hours, "*", wage)
            return
        d.say(
            f"{who} {worked} {d.n(hours)} hours {d.pick('this week', 'last week', 'in total', 'yesterday') if d.past else 'this week'}.",
            f"{who} {worked} for {d.n(hours)} hours.",
        )
    total = d.add("pay", f"{actor.name} {w.conjugate('earn')[actor.form]} $@.", hours, "*", wage)
    if d.chance(0.3):
        k = d.number(1, min(total - 1, 100))
        d.say(
            f"{who} {w.conjugate('spend')[form]} {d.usd(k)}{d.pick(' on food', ' on a gift', '', ' on clothes', ' for rent')}."
        )
        d.end(
            f"How much money {does} {who} have left?",
            f"How much {actor.does} {who} have left?",
            "How much money is left?",
        )
        d.add("spend", f"Then {actor.name} {actor.has} $@ left.", total, "-", k)
    else:
        d.end(
            f"How much {does} {who} earn?",
            f"How much money {does} {who} make?",
            f"How much {does} {who} earn in total?",
            f"How much money {does} {who} earn altogether?",
            f"How much {does} {who} get paid?",
            f"How much money {does} {who} make in total?",
        )
