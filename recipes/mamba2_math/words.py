"""The vocabulary of the word problems: people, things, places and the words for fractions."""

from __future__ import annotations

from typing import NamedTuple


def _listed(text: str) -> list[str]:
    return text.split()


class Person(NamedTuple):
    name: str
    he: str
    his: str
    him: str

    def __str__(self) -> str:
        return self.name

    @property
    def He(self) -> str:
        return self.he.capitalize()

    @property
    def His(self) -> str:
        return self.his.capitalize()


_WOMEN = (
    "Natalia Betty Julie Anna Maria Emma Olivia Sophia Mia Grace Lily Chloe Ella Hannah Sarah "
    "Rachel Nina Carla Diana Elena Fiona Gina Helen Irene Janet Karen Laura Megan Nora Paula Rita "
    "Sandra Tina Wendy Zoe Amy Claire Jasmine Priya Aisha Mei Yuki Lucia Rosa Jenny Kate Kelly Lisa"
)
_MEN = (
    "James Mark Albert Ken Tom John Jack Noah Liam Ethan Oscar Peter Paul Ryan Sam Tim Victor "
    "Walter Adam Ben Carl David Eric Frank George Henry Ivan Jake Kevin Leo Martin Nathan Omar "
    "Quentin Robert Steve Tyler Uri Vincent Will Xavier Zach Ali Raj Diego Hiro Josh Mike Alex Bob"
)
PEOPLE = [Person(name, "she", "her", "her") for name in _WOMEN.split()] + [
    Person(name, "he", "his", "him") for name in _MEN.split()
]

THINGS = _listed(
    "apples oranges marbles stickers pencils books cards stamps shells coins buttons balloons "
    "toys beads flowers candies cookies bottles magazines crayons notebooks rocks ribbons clips "
    "peaches lemons bananas erasers photos postcards keychains badges puzzles figurines plums"
)
FRUIT = _listed("apples oranges peaches lemons pears plums mangoes melons cherries bananas")
TREATS = _listed("cookies cupcakes muffins brownies donuts pies tarts pastries bagels rolls")
GOODS = _listed(
    "shirts hats books scarves mugs toys lamps chairs plates games bags jackets belts caps towels"
)
PRICED = (  # one, many
    ("notebook", "notebooks"),
    ("pen", "pens"),
    ("shirt", "shirts"),
    ("hat", "hats"),
    ("toy", "toys"),
    ("book", "books"),
    ("sandwich", "sandwiches"),
    ("burger", "burgers"),
    ("juice box", "juice boxes"),
    ("salad", "salads"),
    ("plant", "plants"),
    ("candle", "candles"),
    ("mug", "mugs"),
    ("puzzle", "puzzles"),
    ("scarf", "scarves"),
    ("cake", "cakes"),
    ("ball", "balls"),
    ("towel", "towels"),
)
COSTLY = _listed(
    "bike phone camera guitar tablet printer desk skateboard watch jacket drone telescope tent "
    "keyboard monitor scooter"
)
SHOPS = ["store", "market", "shop", "supermarket", "mall", "fair", "bazaar", "corner shop"]
DAYS = _listed("Monday Tuesday Wednesday Thursday Friday Saturday Sunday")
MONTHS = _listed(
    "January February March April May June July August September October November December"
)
CITIES = _listed("Boston Denver Austin Seattle Chicago Dallas Miami Portland Phoenix Atlanta")
COLORS = _listed("red blue green yellow purple white orange pink black brown")
CROPS = _listed("tomato pepper carrot cabbage lettuce corn bean potato onion pumpkin")
ANIMALS = _listed("cows sheep goats horses pigs ducks chickens rabbits")
SUBJECTS = _listed("math science history music art reading spelling geography")
JOBS = (
    "babysitting",
    "washing cars",
    "tutoring",
    "walking dogs",
    "at a bakery",
    "at a cafe",
    "at the library",
    "in a garden",
    "at a farm",
    "at a gas station",
)

SHARES = (
    ("half", 2),
    ("half", 2),
    ("a third", 3),
    ("one third", 3),
    ("a quarter", 4),
    ("one fourth", 4),
    ("a fifth", 5),
    ("50%", 2),
    ("25%", 4),
    ("20%", 5),
    ("10%", 10),
)
MULTIPLES = (
    ("twice", 2),
    ("twice", 2),
    ("two times", 2),
    ("three times", 3),
    ("3 times", 3),
    ("four times", 4),
    ("4 times", 4),
    ("five times", 5),
    ("5 times", 5),
)
PERCENTS = ((10, 10), (20, 5), (25, 4), (50, 2))  # percent, divisor
