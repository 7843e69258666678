"""Small tables of facts, and the questions and statements that are made from them."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from functools import lru_cache

Pair = tuple[str, str]

CAPITALS = """
France Paris|Germany Berlin|Italy Rome|Spain Madrid|Portugal Lisbon|England London|the United Kingdom London|
Ireland Dublin|Scotland Edinburgh|Wales Cardiff|Norway Oslo|Sweden Stockholm|Finland Helsinki|Denmark Copenhagen|
Iceland Reykjavik|Poland Warsaw|Austria Vienna|Switzerland Bern|Belgium Brussels|the Netherlands Amsterdam|
Greece Athens|Turkey Ankara|Russia Moscow|Ukraine Kyiv|Hungary Budapest|the Czech Republic Prague|Slovakia Bratislava|
Slovenia Ljubljana|Croatia Zagreb|Serbia Belgrade|Romania Bucharest|Bulgaria Sofia|Albania Tirana|Estonia Tallinn|
Latvia Riga|Lithuania Vilnius|Belarus Minsk|Moldova Chisinau|Malta Valletta|Cyprus Nicosia|Luxembourg Luxembourg|
Japan Tokyo|China Beijing|India New_Delhi|South_Korea Seoul|North_Korea Pyongyang|Mongolia Ulaanbaatar|Nepal Kathmandu|
Thailand Bangkok|Vietnam Hanoi|Cambodia Phnom_Penh|Laos Vientiane|Malaysia Kuala_Lumpur|Indonesia Jakarta|
the Philippines Manila|Pakistan Islamabad|Bangladesh Dhaka|Afghanistan Kabul|Iran Tehran|Iraq Baghdad|Syria Damascus|
Lebanon Beirut|Jordan Amman|Saudi_Arabia Riyadh|Qatar Doha|Oman Muscat|Kuwait Kuwait_City|Armenia Yerevan|
Georgia Tbilisi|Azerbaijan Baku|Kazakhstan Astana|Uzbekistan Tashkent|Egypt Cairo|Morocco Rabat|Algeria Algiers|
Tunisia Tunis|Libya Tripoli|Sudan Khartoum|Ethiopia Addis_Ababa|Kenya Nairobi|Uganda Kampala|Tanzania Dodoma|
Rwanda Kigali|Nigeria Abuja|Ghana Accra|Senegal Dakar|Mali Bamako|Cameroon Yaounde|Angola Luanda|Zambia Lusaka|
Zimbabwe Harare|Mozambique Maputo|Madagascar Antananarivo|Namibia Windhoek|Botswana Gaborone|
the United States Washington|Canada Ottawa|Mexico Mexico_City|Cuba Havana|Jamaica Kingston|Haiti Port-au-Prince|
Panama Panama_City|Guatemala Guatemala_City|Honduras Tegucigalpa|Costa_Rica San_Jose|Brazil Brasilia|
Argentina Buenos_Aires|Chile Santiago|Peru Lima|Colombia Bogota|Venezuela Caracas|Ecuador Quito|Bolivia Sucre|
Paraguay Asuncion|Uruguay Montevideo|Australia Canberra|New_Zealand Wellington|Fiji Suva
"""
LANGUAGES = """
France French|Germany German|Italy Italian|Spain Spanish|Portugal Portuguese|England English|Norway Norwegian|
Sweden Swedish|Finland Finnish|Denmark Danish|Poland Polish|Greece Greek|Turkey Turkish|Russia Russian|
Hungary Hungarian|Japan Japanese|China Chinese|Vietnam Vietnamese|Mexico Spanish|Brazil Portuguese|Argentina Spanish|
Australia English|Egypt Arabic|Iran Persian|Austria German|Cuba Spanish|Chile Spanish|Peru Spanish
"""
CONTINENTS = """
France Europe|Germany Europe|Italy Europe|Spain Europe|Norway Europe|Poland Europe|Greece Europe|Sweden Europe|
Japan Asia|China Asia|India Asia|Thailand Asia|Vietnam Asia|Nepal Asia|Egypt Africa|Kenya Africa|Nigeria Africa|
Ghana Africa|Morocco Africa|Canada North_America|Mexico North_America|Brazil South_America|Peru South_America|
Chile South_America|Argentina South_America
"""
YOUNG = """
cat kitten|dog puppy|cow calf|horse foal|sheep lamb|goat kid|pig piglet|hen chick|duck duckling|goose gosling|bear cub|
lion cub|tiger cub|wolf pup|fox cub|deer fawn|kangaroo joey|swan cygnet|frog tadpole|elephant calf|whale calf|
owl owlet|rabbit kit|seal pup|eagle eaglet|butterfly caterpillar
"""
SOUNDS = """
cat meows|dog barks|cow moos|horse neighs|sheep bleats|pig grunts|duck quacks|rooster crows|lion roars|wolf howls|
bee buzzes|snake hisses|frog croaks|owl hoots|mouse squeaks|bird sings|donkey brays|elephant trumpets|goose honks|
crow caws|bear growls|turkey gobbles
"""
HOMES = """
bird in a nest|bee in a hive|bear in a den|fox in a den|rabbit in a burrow|mole under the ground|fish in water|
whale in the sea|dolphin in the sea|shark in the sea|lion in the grasslands of Africa|penguin near the South Pole|
polar bear near the North Pole|camel in the desert|frog near ponds|monkey in the trees of warm forests|
spider in a web|dog in a kennel or a house|horse in a stable|pig in a sty|hen in a henhouse|owl in hollow trees|
squirrel in trees|beaver in a lodge by the river|kangaroo in Australia|panda in the mountains of China|
giraffe in the grasslands of Africa|tiger in the forests of Asia|ant in an anthill|eagle high in the mountains
"""
FOOD = """
cow grass|horse grass, hay, and oats|sheep grass|rabbit grass, leaves, and carrots|cat meat and fish|dog meat and dog food|
lion meat|tiger meat|wolf meat|bear berries, fish, and honey|panda bamboo|koala leaves|monkey fruit and leaves|
elephant grass, leaves, and fruit|giraffe leaves from tall trees|mouse seeds and cheese|squirrel nuts|owl mice|
frog flies and other insects|spider insects|bee nectar from flowers|penguin fish|seal fish|whale fish and tiny sea animals|
duck plants and small insects|hen seeds and worms|pig almost anything|goat grass and leaves|eagle small animals and fish|
snake mice and other small animals|bird seeds, worms, and insects|kangaroo grass|deer grass and leaves|camel dry plants
"""
LEGS = "dog four|cat four|horse four|cow four|elephant four|mouse four|lion four|spider eight|ant six|bee six|butterfly six|bird two|duck two|hen two|snake no|fish no|crab ten|octopus eight arms and no"
COLORS = """
the sky blue|grass green|snow white|coal black|a banana yellow|a lemon yellow|a strawberry red|a tomato red|blood red|
the sun yellow|an orange orange|a carrot orange|milk white|a leaf green|chocolate brown|the sea blue|a frog green|
a polar bear white|a crow black|a cucumber green|gold yellow|silver gray|an elephant gray|a cherry red|a flamingo pink|
a pumpkin orange|a fire engine red|salt white|a plum purple|the night black
"""
OPPOSITES = """
hot cold|big small|up down|day night|black white|good bad|fast slow|happy sad|old young|new old|open closed|full empty|
light dark|hard soft|high low|long short|rich poor|strong weak|wet dry|clean dirty|early late|easy difficult|loud quiet|
first last|left right|in out|on off|begin end|buy sell|give take|laugh cry|win lose|push pull|love hate|near far|
thick thin|wide narrow|deep shallow|heavy light|true false|always never|inside outside|above below|friend enemy|
war peace|sweet sour|brave afraid|cheap expensive|sharp blunt|tall short|up down|yes no|summer winter
"""
SHAPES = "a triangle three|a square four|a rectangle four|a pentagon five|a hexagon six|an octagon eight|a circle no"
COUNTS = """
days|are in a week|seven|There are seven days in a week.
months|are in a year|twelve|There are twelve months in a year.
days|are in a year|365|There are 365 days in a year, and 366 in a leap year.
hours|are in a day|24|There are 24 hours in a day.
minutes|are in an hour|60|There are 60 minutes in an hour.
seconds|are in a minute|60|There are 60 seconds in a minute.
seasons|are in a year|four|There are four seasons in a year: spring, summer, autumn, and winter.
weeks|are in a year|52|There are about 52 weeks in a year.
fingers|do people have|ten|Most people have ten fingers.
eyes|do people have|two|People have two eyes.
letters|are in the English alphabet|26|There are 26 letters in the English alphabet.
planets|are in the solar system|eight|There are eight planets in the solar system.
continents|are there|seven|There are seven continents.
wheels|does a bicycle have|two|A bicycle has two wheels.
wheels|does a car have|four|A car has four wheels.
strings|does a violin have|four|A violin has four strings.
strings|does a guitar have|six|Most guitars have six strings.
colors|are in a rainbow|seven|There are seven colors in a rainbow.
legs|does a chair have|four|Most chairs have four legs.
cents|are in a dollar|100|There are 100 cents in a dollar.
"""
DAYS = "Monday Tuesday Wednesday Thursday Friday Saturday Sunday".split()
MONTHS = "January February March April May June July August September October November December".split()
NUMBERS = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
).split()


@lru_cache
def _rows(table: str) -> list[tuple[str, str]]:
    """Rows `first rest`; a leading article or `the` belongs to the first, and `_` stands for a space in a name."""
    rows = []
    for row in table.replace("\n", "").split("|"):
        words = row.strip().split(" ")
        head = 1
        if words[0] in ("a", "an", "the") or words[:2] == ["polar", "bear"]:
            head = 2
        if words[:2] in (["the", "United"], ["the", "Czech"], ["a", "polar"], ["a", "fire"]):
            head = 3
        rows.append((" ".join(words[:head]).replace("_", " "), " ".join(words[head:]).replace("_", " ")))
    return rows


def _an(noun: str) -> str:
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


def _plural(noun: str) -> str:
    return {"mouse": "mice", "goose": "geese", "sheep": "sheep", "deer": "deer", "fish": "fish", "wolf": "wolves",
            "fox": "foxes", "butterfly": "butterflies"}.get(noun, noun + "s")  # fmt: skip


def _geography(rng: random.Random) -> Pair:
    country, city = rng.choice(_rows(CAPITALS))
    kind = rng.random()
    if kind < 0.62:
        asked = rng.choice(("What is the capital of {c}?", "What is the capital city of {c}?", "What's the capital of {c}?", "Which city is the capital of {c}?", "Tell me the capital of {c}.", "Name the capital of {c}.", "Do you know the capital of {c}?", "Capital of {c}?"))  # fmt: skip
        return asked.format(c=country), f"The capital of {country} is {city}."
    if kind < 0.74:
        return rng.choice((f"Where is {city}?", f"In which country is {city}?")), f"{city} is the capital of {country}."
    if kind < 0.87:
        country, language = rng.choice(_rows(LANGUAGES))
        asked = rng.choice(("What language do people speak in {c}?", "Which language is spoken in {c}?"))
        return asked.format(c=country), f"People in {country} speak {language}."
    country, continent = rng.choice(_rows(CONTINENTS))
    return rng.choice((f"Where is {country}?", f"On which continent is {country}?")), f"{country} is in {continent}."


def _animals(rng: random.Random) -> Pair:
    kind = rng.randrange(5)
    if kind == 0:
        animal, young = rng.choice(_rows(YOUNG))
        asked = rng.choice(("What is a young {a} called?", "What do you call a baby {a}?", "What is a baby {a} called?", "What is the name for a young {a}?"))  # fmt: skip
        return asked.format(a=animal), f"A young {animal} is called {_an(young)}."
    if kind == 1:
        animal, sound = rng.choice(_rows(SOUNDS))
        asked = rng.choice(("What sound does {a} make?", "What noise does {a} make?", "What does {a} say?"))
        return asked.format(a=_an(animal)), f"{_an(animal).capitalize()} {sound}."
    if kind == 2:
        animal, home = rng.choice(_rows(HOMES))
        many = _plural(animal)
        asked = rng.choice((f"Where do {many} live?", f"Where does {_an(animal)} live?", f"Where can you find {many}?"))
        return (
            asked,
            f"{many.capitalize()} live {home.replace(' a ', ' ') + 's' if home.startswith('in a ') and ' ' not in home[5:] else home}.",
        )
    if kind == 3:
        animal, food = rng.choice(_rows(FOOD))
        many = _plural(animal)
        return rng.choice((f"What do {many} eat?", f"What does {_an(animal)} eat?")), f"{many.capitalize()} eat {food}."
    row = rng.choice(LEGS.split("|"))
    animal, count = row.split(" ", 1)
    return f"How many legs does {_an(animal)} have?", f"{_an(animal).capitalize()} has {count} legs."


def _words(rng: random.Random) -> Pair:
    kind = rng.randrange(4)
    if kind == 0:
        first, second = rng.choice(_rows(OPPOSITES))
        if rng.random() < 0.4 and first not in ("old", "light", "short", "up"):
            first, second = second, first
        asked = rng.choice(("What is the opposite of {w}?", "What's the opposite of {w}?", "Tell me the opposite of {w}.", 'What is the opposite of "{w}"?'))  # fmt: skip
        pairs = dict(_rows(OPPOSITES))
        second = pairs.get(first, second)
        return asked.format(w=first), f"The opposite of {first} is {second}."
    if kind == 1:
        thing, color = rng.choice(_rows(COLORS))
        asked = rng.choice(("What color is {t}?", "What is the color of {t}?", "Which color is {t}?"))
        return asked.format(t=thing), f"{thing[0].upper()}{thing[1:]} is {color}."
    if kind == 2:
        shape, count = rng.choice(_rows(SHAPES))
        return f"How many sides does {shape} have?", f"{shape.capitalize()} has {count} sides."
    subject, verb, _, answer = rng.choice([row.split("|") for row in COUNTS.strip().split("\n")])
    return f"How many {subject} {verb}?", answer


def _calendar(rng: random.Random) -> Pair:
    days = rng.random() < 0.5
    names = DAYS if days else MONTHS
    index = rng.randrange(len(names))
    kind = "day" if days else "month"
    after, before = names[(index + 1) % len(names)], names[index - 1]
    ordinals = "first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth".split()
    return rng.choice((
        (f"What {kind} comes after {names[index]}?", f"{after} comes after {names[index]}."),
        (f"Which {kind} comes after {names[index]}?", f"{after} comes after {names[index]}."),
        (f"What {kind} comes before {names[index]}?", f"{before} comes before {names[index]}."),
        (f"What is the {ordinals[index]} {kind} of the {'week' if days else 'year'}?",
         f"The {ordinals[index]} {kind} of the {'week' if days else 'year'} is {names[index]}."),
        ("What are the days of the week?", "The days of the week are " + ", ".join(DAYS[:-1]) + ", and Sunday."),
        ("Name the months of the year.", "The months are " + ", ".join(MONTHS[:-1]) + ", and December."),
        ("What are the four seasons?", "The four seasons are spring, summer, autumn, and winter."),
    ))  # fmt: skip


def _sums(rng: random.Random) -> Pair:
    first, second = rng.randint(0, 10), rng.randint(0, 10)
    kind = rng.random()
    if kind < 0.5:
        total = first + second
        asked = rng.choice(("What is {a} + {b}?", "What is {a} plus {b}?", "How much is {a} plus {b}?", "What's {a} + {b}?", "Add {a} and {b}.", "{a} + {b} = ?", "Calculate {a} + {b}."))  # fmt: skip
        if rng.random() < 0.2:
            words = asked.format(a=NUMBERS[first], b=NUMBERS[second]).replace("+", "plus").replace("= ?", "is what?")
            return words[0].upper() + words[
                1:
            ], f"{NUMBERS[first].capitalize()} plus {NUMBERS[second]} is {NUMBERS[total]}."
        return asked.format(
            a=first, b=second
        ), f"{first} + {second} = {total}." if "+" in asked else f"{first} plus {second} is {total}."
    if kind < 0.8:
        total = first + second
        asked = rng.choice(("What is {a} - {b}?", "What is {a} minus {b}?", "How much is {a} minus {b}?"))
        answer = f"{total} - {second} = {first}." if "-" in asked else f"{total} minus {second} is {first}."
        return asked.format(a=total, b=second), answer
    asked = rng.choice(("What is {a} times {b}?", "How much is {a} times {b}?"))
    return asked.format(a=first, b=second), f"{first} times {second} is {first * second}."


GROUPS = {
    "animals": "dogs cats horses cows sheep rabbits foxes bears lions elephants mice owls",
    "farm animals": "cows pigs sheep hens horses goats", "wild animals": "lions bears wolves foxes tigers elephants",
    "pets": "dogs cats rabbits hamsters parrots", "birds": "owls ducks sparrows robins eagles penguins swans",
    "insects": "bees ants butterflies flies beetles", "fruits": "apples bananas oranges pears plums cherries grapes",
    "vegetables": "carrots potatoes tomatoes onions peas cabbages", "colors": "red blue green yellow black white",
    "countries": "France Germany Italy Spain Japan China Brazil Egypt Canada", "flowers": "roses tulips daisies lilies",
    "cities": "Paris London Rome Berlin Tokyo Madrid Cairo", "seasons": "spring summer autumn winter",
    "musical instruments": "guitars pianos violins drums flutes", "tools": "hammers saws axes shovels",
    "planets": "Mercury Venus Earth Mars Jupiter Saturn", "languages": "English French German Spanish Italian Chinese",
    "sports": "football tennis swimming running basketball", "drinks": "water tea coffee milk juice",
    "pieces of furniture": "chairs tables beds sofas shelves", "days of the week": " ".join(DAYS),
}  # fmt: skip


def _lists(rng: random.Random) -> Pair:
    kind = rng.random()
    if kind < 0.1:
        top = rng.choice((3, 5, 10))
        asked = rng.choice(
            (f"Count to {NUMBERS[top]}.", f"Count from one to {NUMBERS[top]}.", f"Can you count to {top}?")
        )
        return asked, ", ".join(NUMBERS[1:top]).capitalize() + f", {NUMBERS[top]}."
    if kind < 0.35:
        thing, color = rng.choice(_rows(COLORS))
        other = rng.choice([c for c in "red blue green yellow black white".split() if c != color])
        named = other if rng.random() < 0.5 else color
        return f"Is {thing} {named}?", f"{'Yes' if named == color else 'No'}, {thing} is {color}."
    if kind < 0.5:
        first, second = rng.sample(range(1, 21), 2)
        asked, holds = rng.choice(((f"Is {first} bigger than {second}?", first > second), (f"Which number is bigger, {first} or {second}?", None)))  # fmt: skip
        large, small = max(first, second), min(first, second)
        fact = f"{large} is bigger than {small}."
        return asked, fact if holds is None else f"{'Yes' if holds else 'No'}, {fact}"
    group, members = rng.choice(list(GROUPS.items()))
    count = rng.choice((2, 3, 3, 3, 4))
    chosen = rng.sample(members.split(), count)
    listed = " and ".join(chosen) if count == 2 else ", ".join(chosen[:-1]) + f", and {chosen[-1]}"
    asked = rng.choice(
        ("Name {n} {g}.", "Tell me {n} {g}.", "Give me {n} {g}.", "List {n} {g}.", "Can you name {n} {g}?")
    )
    lead = f"{NUMBERS[count].capitalize()} {group} are "
    return asked.format(n=NUMBERS[count], g=group), lead + listed + "."


_MAKERS: tuple[tuple[Callable[[random.Random], Pair], int], ...] = (
    (_geography, 32), (_animals, 22), (_words, 22), (_calendar, 8), (_sums, 16), (_lists, 16)
)  # fmt: skip


def questions(count: int, rng: random.Random) -> Iterator[Pair]:
    """`count` questions with their right answers."""
    makers, weights = [maker for maker, _ in _MAKERS], [weight for _, weight in _MAKERS]
    for maker in rng.choices(makers, weights, k=count):
        yield maker(rng)
