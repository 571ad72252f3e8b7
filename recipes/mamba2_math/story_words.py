"""What the stories are told with: people, nouns, verbs, events and the turns of a question.

Events are verb phrases whose first word is a verb's base form; :func:`conjugate` makes the three
forms of each when the module is loaded. In braces: ``a`` the amount ("5 more apples"), ``r``
someone ("her brother"), ``his`` and ``him`` the actor's pronouns, ``x`` the things.
"""

# ruff: noqa: E501  (long lists of words)

from __future__ import annotations

from typing import NamedTuple

PAST, THIRD, BASE = 0, 1, 2  # index into a verb phrase's forms

_PAST_FORMS = dict(
    pair.split(":")
    for pair in (
        "be:were buy:bought bring:brought get:got find:found win:won make:made give:gave "
        "lose:lost sell:sold break:broke eat:ate use:used put:put throw:threw leave:left "
        "send:sent lend:lent take:took have:had pay:paid spend:spent catch:caught hide:hid "
        "hand:handed go:went come:came fly:flew swim:swam run:ran drive:drove fall:fell "
        "drop:dropped swap:swapped hop:hopped pop:popped burst:burst see:saw sit:sat "
        "draw:drew write:wrote grow:grew do:did feed:fed keep:kept tear:tore hit:hit "
        "read:read ride:rode drink:drank build:built cut:cut set:set dig:dug plan:planned "
        "get:got begin:began rise:rose sink:sank steal:stole wear:wore step:stepped "
        "knit:knitted chop:chopped mop:mopped split:split hold:held blow:blew transfer:transferred"
    ).split()
)


def past(verb: str) -> str:
    if verb in _PAST_FORMS:
        return _PAST_FORMS[verb]
    if verb.endswith("e"):
        return verb + "d"
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ied"
    return verb + "ed"


def third(verb: str) -> str:
    if verb in ("have", "be"):
        return {"have": "has", "be": "is"}[verb]
    if verb.endswith("y") and verb[-2] not in "aeiou":
        return verb[:-1] + "ies"
    return verb + ("es" if verb.endswith(("s", "sh", "ch", "x", "z", "o")) else "s")


def conjugate(phrase: str) -> tuple[str, str, str]:
    """A verb phrase in the past, in the present's third person, and as many or I say it."""
    verb, space, rest = phrase.partition(" ")
    rest = space + rest
    return past(verb) + rest, third(verb) + rest, ("are" if verb == "be" else verb) + rest


def _phrases(text: str) -> list[tuple[str, str, str]]:
    return [conjugate(line.strip()) for line in text.strip().splitlines()]


class Noun(NamedTuple):
    one: str
    many: str
    food: bool = False


def _plural(one: str) -> str:
    if one.endswith(("s", "sh", "ch", "x")):
        return one + "es"
    if one.endswith("y") and one[-2] not in "aeiou":
        return one[:-1] + "ies"
    return one + "s"


def _nouns(text: str, food: bool = False) -> list[Noun]:
    """Words separated by commas; ``one/many`` where the plural is irregular."""
    nouns = []
    for word in text.split(","):
        one, _, many = word.strip().partition("/")
        nouns.append(Noun(one, many or _plural(one), food))
    return nouns


FOODS = _nouns(
    """apple, orange, banana, peach, pear, plum, mango/mangoes, lemon, lime, cherry, strawberry,
    grape, blueberry, berry, cookie, cupcake, muffin, brownie, donut, doughnut, candy, chocolate,
    cracker, sandwich, egg, carrot, tomato/tomatoes, potato/potatoes, pretzel, pancake, waffle,
    jelly bean, gummy bear, lollipop, walnut, peanut, almond, nut, pie, roll, bagel, taco, hot dog,
    popsicle, olive, kiwi, pumpkin, watermelon, melon, pineapple, coconut, onion, pepper, cucumber,
    chocolate bar, candy bar, piece of candy/pieces of candy, piece of cake/pieces of cake,
    slice of pizza/slices of pizza, pizza slice, biscuit, croissant, burger, apricot, fig, date,
    sweet, granola bar, marshmallow, ice cream cone, cake, tart, pastry, loaf of bread/loaves of
    bread, radish, mushroom, nectarine, avocado, mint, chip, raisin, gumdrop, dumpling, meatball""".replace(
        "\n", " "
    ).replace("    ", ""),
    food=True,
)
ITEMS = _nouns(
    """marble, sticker, pencil, book, card, stamp, seashell, shell, coin, button, balloon, toy,
    bead, crayon, notebook, rock, ribbon, paper clip, eraser, photo, postcard, keychain, badge,
    puzzle, figurine, toy car, baseball card, trading card, comic book, toy soldier, doll, bracelet,
    pebble, block, magnet, pen, marker, ruler, paintbrush/paintbrushes, bottle, cup, plate, candle,
    sock, hat, shirt, ticket, key, game, video game, ball, tennis ball, kite, puppet, magazine,
    envelope, letter, bookmark, hair clip, rubber band, straw, paper plane, poster, token, rose,
    tulip, flower, daisy, sunflower, plant, seed, stick, leaf/leaves, acorn, feather, gem, medal,
    stuffed animal, teddy bear, toy train, robot, action figure, dinosaur, mug, spoon, fork, glass,
    towel, T-shirt, scarf/scarves, glove, folder, sheet of paper/sheets of paper, stone, diamond,
    necklace, ring, hair tie, toy truck, dice/dice, battery, screw, nail, brick, log, jar, box, bag,
    gift, present, painting, drawing, DVD, CD, bandage, mask, flag, lamp, pillow, basketball,
    baseball, football, golf ball, bow, pumpkin seed, origami crane, cactus/cacti, photograph,
    pin, wooden block, crystal, dollhouse, backpack, umbrella, chess piece, tile, binder, stapler,
    point, star, gold star, sticky note, thumbtack, tea bag, bar of soap/bars of soap""".replace(
        "\n", " "
    ).replace("    ", "")
)
ANIMALS = _nouns(
    "cow, sheep/sheep, goat, horse, pig, duck, chicken, rabbit, fish/fish, bird, frog, butterfly, "
    "bee, kitten, puppy, turtle, hamster, parrot, goose/geese, mouse/mice, hen, dog, cat, pigeon, "
    "snail, goldfish/goldfish, lizard, monkey, penguin, bug, ladybug, pony, lamb, deer/deer, owl"
)
FLOWERS = _nouns("rose, tulip, daisy, sunflower, lily, violet, orchid, flower, tree, bush, plant")
NOUNS = FOODS + ITEMS
CONTAINERS = _nouns(
    "bag, box, pack, packet, package, basket, jar, carton, crate, case, set, bundle, tray, tin, "
    "bucket, container, bin, sack, drawer, pile, stack, bowl, chest, pouch, bunch, group, tub"
)

GIRLS = (
    "Natalia Betty Julie Anna Maria Emma Olivia Sophia Mia Grace Lily Chloe Ella Hannah Sarah Sara "
    "Rachel Nina Carla Diana Elena Fiona Gina Helen Irene Janet Karen Laura Megan Nora Paula Rita "
    "Sandra Tina Wendy Zoe Amy Claire Jasmine Priya Aisha Mei Yuki Lucia Rosa Jenny Kate Kelly Lisa "
    "Mary Jane Susan Linda Ava Isabella Amelia Charlotte Evelyn Abigail Emily Madison Lucy Ruby "
    "Alice Clara Daisy Eva Heidi Ivy Jill Kim Lena Molly Naomi Olga Penny Rose Stella Tara Uma Vera "
    "Willow Yasmin Zara Beth Carol Donna Ellen Faith Gloria Hope Iris Joan Kayla Leah Mandy Nancy "
    "Pam Robin Sally Tracy Vicky Anita Bella Cindy Debbie Erin Fatima Greta Hazel Ingrid Jessica "
    "Katie Layla Monica Nadia Petra Renee Sofia Tanya Ursula Violet Whitney Victoria Alicia Ashley "
    "Brenda Courtney Denise Eliza Frida Gemma Holly Jade Kylie Lola Marta Noor Pia Shanti Ada"
).split()
BOYS = (
    "James Mark Albert Ken Tom John Jack Noah Liam Ethan Oscar Peter Paul Ryan Sam Tim Victor "
    "Walter Adam Ben Carl David Eric Frank George Henry Ivan Jake Kevin Leo Martin Nathan Omar "
    "Quentin Robert Steve Tyler Uri Vincent Will Xavier Zach Ali Raj Diego Hiro Josh Mike Alex Bob "
    "Dan Dave Joe Jim Max Luke Lucas Mason Logan Aiden Owen Dylan Carlos Juan Pedro Luis Jose "
    "Miguel Andy Billy Brian Charlie Chris Daniel Edward Fred Gary Harry Ian Jason Kyle Larry "
    "Matt Nick Oliver Phil Ray Sean Ted Toby Wes Yusuf Zane Arthur Bruce Caleb Derek Elijah Felix "
    "Gabriel Hugo Isaac Jacob Kurt Louis Marco Neil Otto Patrick Rob Simon Thomas Vijay Wyatt Ahmed "
    "Bill Connor Dennis Evan Finn Greg Hassan Jeff Karl Lenny Mohamed Nico Pablo Roger Stan Tony "
    "Theo Anton Boris Chen Emil Gus Ravi Jonah Levi Eli Ron Rick Michael William Joseph"
).split()
ROLES_HER = ("teacher", "baker", "librarian", "nurse", "cook", "girl", "woman", "seamstress")
ROLES_HIS = (
    "farmer",
    "gardener",
    "shopkeeper",
    "boy",
    "man",
    "carpenter",
    "chef",
    "coach",
    "painter",
)
RELATIONS = (
    "brother sister friend neighbor teacher mother mom father dad cousin uncle aunt grandmother "
    "grandma grandfather grandpa classmate brother sister friend friend daughter son roommate"
).split() + ["best friend", "little sister", "older brother", "younger brother", "little brother"]
SYLLABLES = (
    "ba bri cor da del fen gal ha jo ka kel lor ma mil na nor pa pri ra ri sa shi ta tor va vi wen "
    "ya zo zu blo flim gro kri plo sni tru"
).split()

# --- events of a collection: what one has, gets and no longer has --------------------------------

STARTS = _phrases(
    """have {a}
    have {a}
    have {a}
    have {a}
    have {a}
    have {a}
    own {a}
    have a collection of {a}
    start with {a}
    start with {a}
    have {a} in {his} bag
    have {a} in {his} room
    have {a} at home
    have {a} in a box
    begin with {a}
    keep {a} in a drawer"""
)
GAINS = _phrases(
    """buy {a}
    buy {a}
    buy {a}
    buy {a} at the store
    buy {a} from the shop
    buy {a} at the market
    get {a}
    get {a}
    get {a} from {r}
    get {a} as a gift
    get {a} for {his} birthday
    receive {a}
    receive {a} from {r}
    receive {a} as a present
    find {a}
    find {a}
    find {a} at the park
    find {a} under the bed
    find {a} in a drawer
    find {a} on the way home
    win {a}
    win {a} at the fair
    win {a} in a game
    win {a} from {r}
    collect {a}
    collect {a}
    pick up {a}
    earn {a}
    earn {a} at school
    order {a} online
    add {a}
    add {a} to {his} collection
    borrow {a} from {r}
    make {a}
    bring home {a}
    gather {a}
    take {a} from {r}
    purchase {a}
    gain {a}"""
)
FOOD_GAINS = _phrases(
    """bake {a}
    bake {a}
    make {a}
    pick {a}
    pick {a} from a tree
    pick {a} in the garden
    prepare {a}
    cook {a}
    harvest {a}"""
)
LOSSES = _phrases(
    """give {a} to {r}
    give {a} to {r}
    give {a} to {r}
    give {r} {a}
    give {r} {a}
    give away {a}
    give away {a}
    give {a} away
    give {a} to a friend
    give {a} to some friends
    lose {a}
    lose {a}
    lose {a} on the way home
    sell {a}
    sell {a}
    sell {a} at the market
    sell {a} to {r}
    donate {a}
    donate {a} to charity
    donate {a} to the school
    break {a}
    throw away {a}
    throw {a} away
    use {a}
    use {a}
    use up {a}
    use {a} for a project
    trade away {a}
    misplace {a}
    drop {a}
    leave {a} at school
    hand out {a}
    share {a} with {r}
    send {a} to {r}
    lend {a} to {r}
    lend {r} {a}
    return {a}
    mail {a} to {r}
    pass {a} on to {r}
    take {a} to school"""
)
FOOD_LOSSES = _phrases(
    """eat {a}
    eat {a}
    eat {a}
    eat {a} for lunch
    eat {a} for breakfast
    eat {a} after dinner
    eat {a} on the way home
    feed {a} to the birds
    share {a} with {r}
    serve {a} to guests"""
)
GIVEN = _phrases(  # by somebody else
    """give {him} {a}
    give {him} {a}
    give {him} {a}
    bring {him} {a}
    buy {him} {a}
    send {him} {a}
    hand {him} {a}
    add {a}
    lend {him} {a}"""
)
TAKEN = _phrases(
    """take {a}
    take {a}
    borrow {a}
    lose {a}
    take {a} away
    use {a}
    break {a}"""
)
FOOD_TAKEN = _phrases("eat {a}\neat {a}\neat {a}\ntake {a}")
MISHAPS = _phrases(  # of the things themselves, more than one
    """break
    get lost
    be stolen
    fall out of the bag
    be damaged
    get broken
    be thrown away
    go missing
    be broken"""
)
FOOD_MISHAPS = _phrases(
    """go bad
    be rotten
    be eaten
    get eaten
    be spoiled
    fall on the floor
    be burnt"""
)

# --- places: (nouns, where, what comes, what goes) -----------------------------------------------


class Place(NamedTuple):
    nouns: list[Noun]
    where: list[str]
    come: list[tuple[str, str, str]]
    go: list[tuple[str, str, str]]


def _place(nouns: str, where: str, come: str, go: str) -> Place:
    def split(text: str) -> list[str]:
        return [word.strip() for word in text.split(",")]

    come_forms, go_forms = ([conjugate(w) for w in split(text)] for text in (come, go))
    return Place(_nouns(nouns), split(where), come_forms, go_forms)


HUMANS = frozenset(
    "person passenger child kid student boy girl pupil customer guest visitor man woman player "
    "dancer singer runner swimmer member".split()
)
PLACES = [
    _place(
        "bird, sparrow, pigeon, crow, robin",
        "in a tree, on a tree, on a branch, on a wire, on a fence, on the roof, in the garden",
        "fly in, join them, land, come, arrive, fly over, join the group",
        "fly away, fly off, leave, fly away, fly away",
    ),
    _place(
        "person/people, passenger",
        "on a bus, on the bus, on a train, in a subway car, on the train",
        "get on, board, get in, enter, hop on, get on at the next stop, get on at the first stop",
        "get off, leave, get out, exit, get off at the next stop, get off at the second stop",
    ),
    _place(
        "child/children, kid, student, boy, girl",
        "at the playground, in the pool, at a "
        "party, in the classroom, in the park, in the gym, on the field, in a room, at the "
        "library, in the swimming pool",
        "join them, arrive, come, join in, show up, come in, come to play",
        "leave, go home, go away, leave early, walk away, go inside",
    ),
    _place(
        "car, truck, taxi, van, bike, motorcycle",
        "in a parking lot, in the parking lot, in a garage, on the street, at the gas station",
        "arrive, drive in, park there, come, enter, pull in",
        "leave, drive away, drive off, depart, drive out",
    ),
    _place(
        "fish/fish, goldfish/goldfish, guppy, turtle",
        "in a tank, in an aquarium, in the fish tank, in a pond, in the pond",
        "be added, be put in, be born, be bought",
        "be sold, die, be given away, be taken out, be moved to another tank",
    ),
    _place(
        "book, magazine, DVD, comic book",
        "on a shelf, on the bookshelf, in the library, in a box",
        "be added, be put on it, be returned, be donated, be bought",
        "be borrowed, be taken, be checked out, be removed, be lent out, be sold",
    ),
    _place(
        "cookie, muffin, cupcake, brownie, candy, donut, apple, orange, banana, egg, sandwich, "
        "strawberry",
        "on a plate, in a jar, on the table, in a bowl, in the kitchen, in a "
        "basket, in the fridge, in a box, on a tray",
        "be added, be put in, be baked, be bought",
        "be eaten, be taken, fall on the floor, be given away, be sold, be used, go bad",
    ),
    _place(
        "balloon",
        "at a party, at the party, in the room, tied to a fence",
        "be blown up, be added, be brought",
        "pop, burst, fly away, lose their air, pop",
    ),
    _place(
        "flower, rose, tulip, daisy, tree, bush, plant",
        "in a garden, in the garden, in the yard, in the park, in the field",
        "bloom, be planted, grow, be planted today",
        "wilt, be picked, be cut, die, be cut down, be dug up",
    ),
    _place(
        "duck, swan, goose/geese",
        "in a pond, on the lake, in the pond, in the water",
        "swim over, come, join them, arrive, land",
        "swim away, leave, fly away, fly off",
    ),
    _place(
        "frog, toad, turtle",
        "on a log, in a pond, on a rock, on lily pads",
        "jump on, join them, come, hop over",
        "jump off, jump into the water, hop away, leave",
    ),
    _place(
        "student, pupil",
        "in a class, in the class, in the room, on the school bus, in the "
        "cafeteria, in the drama club",
        "join the class, transfer in, come in, join, arrive",
        "leave, move away, be absent, go home, transfer to another school",
    ),
    _place(
        "cow, sheep/sheep, goat, horse, pig, chicken, hen, rabbit",
        "in a field, on a farm, in the barn, on the farm, in a pen",
        "be bought, come in, be born, be brought in",
        "run away, be sold, escape, leave, be given away",
    ),
    _place(
        "customer, guest, visitor, person/people, man/men, woman/women",
        "in a store, in a "
        "cafe, in the restaurant, at a museum, at the hotel, in line, in the waiting room, in a "
        "movie theater",
        "enter, come in, arrive, walk in, join the line",
        "leave, walk out, go home, go out, check out",
    ),
    _place(
        "player, dancer, singer, runner, swimmer, member",
        "on a team, in a club, in the game, in the competition",
        "join, sign up, be added, enter",
        "quit, leave, drop out, be eliminated",
    ),
    _place(
        "boat, ship, plane, airplane, bus",
        "in the harbor, at the dock, at the airport, at the station",
        "arrive, come in",
        "leave, depart, sail away",
    ),
    _place(
        "monkey, squirrel, butterfly, bee, ladybug, ant, bug",
        "in a tree, on a bush, on a leaf, on a picnic blanket, in the garden",
        "come, join them, arrive, climb up",
        "leave, run away, go away, crawl away",
    ),
    _place(
        "apple, pear, orange, leaf/leaves, peach, coconut",
        "on a tree, on the tree",
        "grow, ripen",
        "fall, fall off, fall down, be picked, be blown off",
    ),
    _place(
        "pencil, crayon, marker, marble, block, toy, ball, chair, cup, plate, coin, stamp",
        "in a drawer, in a box, in the classroom, on the desk, on the table, in a bag",
        "be added, be put in, be brought in, be found",
        "be taken, be taken out, be lost, break, be removed, be thrown away, be given away",
    ),
]

# --- money ---------------------------------------------------------------------------------------

MONEY_STARTS = _phrases(
    """have {a}
    have {a}
    have {a}
    have {a} in {his} wallet
    have {a} in {his} piggy bank
    start with {a}
    have {a} in savings
    go to the store with {a}
    go shopping with {a}
    get {a} from {r}
    bring {a} to the fair
    save {a}"""
)
MONEY_GAINS = _phrases(
    """earn {a}
    earn {a} mowing lawns
    earn {a} for washing cars
    earn {a} by babysitting
    earn {a} walking dogs
    earn {a} by doing chores
    receive {a} from {r}
    receive {a} for {his} birthday
    get {a} from {r}
    get {a} for {his} birthday
    get {a} as allowance
    find {a}
    find {a} on the street
    find {a} in {his} pocket
    make {a} selling lemonade
    make {a} at a garage sale
    save {a}
    win {a}
    borrow {a} from {r}
    deposit {a}"""
)
MONEY_LOSSES = _phrases(
    """spend {a}
    spend {a}
    spend {a} on lunch
    spend {a} on a toy
    spend {a} on snacks
    spend {a} on a book
    spend {a} on clothes
    spend {a} on a movie ticket
    spend {a} at the store
    pay {a} for a {one}
    buy a {one} for {a}
    buy a {one} that costs {a}
    buy a {one} for {a}
    pay {a} for the bus
    give {a} to {r}
    give {r} {a}
    lose {a}
    donate {a} to charity
    use {a} to buy a {one}
    lend {a} to {r}"""
)
PRICED = _nouns(
    """notebook, pen, pencil, shirt, hat, toy, book, sandwich, burger, juice box, salad, plant,
    candle, mug, puzzle, scarf/scarves, cake, ball, towel, T-shirt, cookie, cupcake, pizza, soda,
    drink, ticket, movie ticket, game, comic book, doll, toy car, marker, eraser, ruler, folder,
    backpack, sticker, balloon, apple, orange, banana, loaf of bread/loaves of bread, bottle of
    water/bottles of water, carton of milk/cartons of milk, box of cereal/boxes of cereal, bag of
    chips/bags of chips, hot dog, taco, ice cream, ice cream cone, coffee, muffin, donut, chocolate
    bar, candy bar, pair of socks/pairs of socks, pair of shoes/pairs of shoes, dress, belt, cap,
    jacket, bracelet, necklace, flower, rose, lamp, chair, plate, cup, magazine, card, kite, video
    game, basketball, soccer ball, paintbrush/paintbrushes, bag of apples/bags of apples, pack of
    gum/packs of gum, dozen eggs/dozens of eggs, lemon, melon, pie, sweater, umbrella, teddy bear,
    smoothie, milkshake, cup of coffee/cups of coffee, postcard, poster, lollipop, bar of soap/bars
    of soap, keychain, bowl of soup/bowls of soup, bag of candy/bags of candy""".replace(
        "\n", " "
    ).replace("    ", "")
)
COSTLY = (
    "bike phone camera guitar tablet printer desk skateboard watch jacket drone telescope tent "
    "keyboard monitor scooter laptop computer bicycle TV game dress dollhouse couch coat tablet wallet robot"
).split()

# --- what a day has ------------------------------------------------------------------------------

DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = (
    "January February March April May June July August September October November December".split()
)
COLORS = "red blue green yellow purple white orange pink black brown".split()
NUMBER_WORDS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen twenty"
).split()
FRACTIONS = (  # words, divisor, parts
    ("half", 2, 1),
    ("half", 2, 1),
    ("half", 2, 1),
    ("one half", 2, 1),
    ("1/2", 2, 1),
    ("a third", 3, 1),
    ("one third", 3, 1),
    ("1/3", 3, 1),
    ("a quarter", 4, 1),
    ("one fourth", 4, 1),
    ("1/4", 4, 1),
    ("one quarter", 4, 1),
    ("a fifth", 5, 1),
    ("1/5", 5, 1),
    ("50%", 2, 1),
    ("25%", 4, 1),
    ("20%", 5, 1),
    ("10%", 10, 1),
    ("two thirds", 3, 2),
    ("2/3", 3, 2),
    ("three quarters", 4, 3),
    ("three fourths", 4, 3),
    ("3/4", 4, 3),
    ("75%", 4, 3),
    ("two fifths", 5, 2),
    ("40%", 5, 2),
    ("60%", 5, 3),
    ("30%", 10, 3),
)
MULTIPLES = (
    ("twice", 2),
    ("twice", 2),
    ("twice", 2),
    ("two times", 2),
    ("2 times", 2),
    ("three times", 3),
    ("3 times", 3),
    ("four times", 4),
    ("4 times", 4),
    ("five times", 5),
    ("5 times", 5),
    ("6 times", 6),
    ("10 times", 10),
)
