"""What the teacher is asked: templates times word lists, each prompt with the words that a fair answer must hold."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

from deepseek_tgi.convert.demo_model import words
from deepseek_tgi.convert.demo_model.examples import ANSWERS, STORIES

PLAIN = "You answer in short, simple English sentences."
SYSTEMS = (
    PLAIN,
    "You give short, clear answers in plain English.",
    "You are a helpful assistant. You write simple English.",
)
STORYTELLER = "You write short stories in simple English."


@dataclass(frozen=True, slots=True)
class Prompt:
    """One question. `opening` is how the answer must begin, and then the text is a story and the question is dropped;
    `needed` are words of a fair answer, in lower case; `before` are answered questions; `room` is the answer's tokens."""

    kind: str
    system: str
    question: str
    opening: str
    needed: tuple[str, ...]
    temperature: float
    before: tuple[tuple[str, str], ...] = ()
    room: int = 72

    def with_examples(self, rng: random.Random) -> Prompt:
        """The same question after two or three answered ones, of its kind where it has some."""
        if self.kind in ("story", "tale"):
            return replace(self, before=(rng.choice(STORIES),), room=180)
        alike = [pair for pair in ANSWERS[self.kind] if pair[0] != self.question]
        other = rng.choice(ANSWERS[rng.choice(("define", "why", "how"))])
        count = min(2, len(alike))
        return replace(self, before=(other, *rng.sample(alike, count)), room=110 if self.kind == "describe" else 72)


def article(noun: str) -> str:
    """`noun` with `a` or `an`."""
    vowel = noun[0] in "aeiou" and not noun.startswith(("uni", "use", "eu", "one"))
    an = vowel or noun.startswith(("hon", "hour"))
    return f"{'an' if an else 'a'} {noun}"


def plural(noun: str) -> str:
    """The plural of a countable noun of the word lists."""
    irregular = {
        "mouse": "mice", "goose": "geese", "sheep": "sheep", "deer": "deer", "fish": "fish", "wolf": "wolves",
        "knife": "knives", "shelf": "shelves", "leaf": "leaves", "moose": "moose", "reindeer": "reindeer",
        "salmon": "salmon", "stairs": "stairs", "fisherman": "fishermen", "postman": "postmen", "scarf": "scarves",
        "snowman": "snowmen", "potato": "potatoes", "tomato": "tomatoes", "volcano": "volcanoes",
        "tornado": "tornadoes", "buffalo": "buffaloes",
    }  # fmt: skip
    if noun in irregular:
        return irregular[noun]
    if noun.endswith(("s", "x", "ch", "sh")):
        return noun + "es"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return noun[:-1] + "ies"
    return noun + "s"


def gerund(phrase: str) -> str:
    """`bake bread` to `baking bread`."""
    verb, _, rest = phrase.partition(" ")
    doubled = {"run", "cut", "set", "plan", "swim", "stop", "wrap", "dig", "sit", "get", "put"}
    if verb in doubled:
        verb += verb[-1]
    elif verb.endswith("e") and verb not in ("be", "see"):
        verb = verb[:-1]
    return f"{verb}ing {rest}".rstrip()


def make_prompts(count: int, seed: int) -> list[Prompt]:
    """`count` prompts of all kinds in random order, the same for the same seed."""
    rng = random.Random(seed)
    makers: list[tuple[Callable[[random.Random], Prompt], int]] = [
        (_story, 14), (_opened_story, 14), (_definition, 26), (_description, 14), (_reason, 4), (_advice, 14),
        (_sentence, 10), (_feeling, 3), (_poem, 2), (_animal, 12), (_job, 5), (_compare, 6),
    ]  # fmt: skip
    chosen = rng.choices([maker for maker, _ in makers], [weight for _, weight in makers], k=count)
    return [maker(rng).with_examples(rng) for maker in chosen]


def _hero(rng: random.Random) -> tuple[str, str, str]:
    """A name, a pronoun, and what its bearer is."""
    girl = rng.random() < 0.5
    name = rng.choice(words.GIRLS if girl else words.BOYS)
    being = (
        rng.choice(words.ANIMALS)
        if rng.random() < 0.6
        else rng.choice(("girl", "girl", words.PEOPLE[0]) if girl else ("boy", "boy", "farmer"))
    )
    return name, "she" if girl else "he", f"{rng.choice(words.ADJECTIVES)} {being}"


def _story(rng: random.Random) -> Prompt:
    name, _pronoun, being = _hero(rng)
    thing, place = rng.choice(words.OBJECTS), rng.choice(words.PLACES)
    event = rng.choice(words.EVENTS).format(thing)
    first, second = rng.sample(words.ANIMALS, 2)
    person = rng.choice(words.PEOPLE)
    last = thing.split()[-1]
    kind = being.split()[-1]
    asked, needed = rng.choice((
        (f"Write a short story about {name}, {article(being)} who {event}.", (name, kind, last)),
        (f"Write a short story about {article(being)} named {name} who {event}.", (name, kind, last)),
        (f"Tell me a story about {name}, {article(being)} who lives in the {place}.", (name, kind)),
        (f"Tell me a short story about {article(person)} and {article(first)}.", (person, first)),
        (f"Write a story about {article(first)} and {article(second)} who become friends.", (first, second)),
        (f"Tell me a bedtime story about {article(being)} named {name}.", (name,)),
        (f"Write a story about {article(rng.choice(words.LOOKS))} {place}.", (place,)),
        (f"Tell me a story about {rng.choice(words.TOPICS)}.", ()),
        (f"Write a short story about {rng.choice(words.TOPICS)}.", ()),
        (f"Tell me a story about {article(first)}.", (first,)),
        (f"Write a short story about {article(person)}.", (person,)),
    ))  # fmt: skip
    return Prompt(
        "story", rng.choice((PLAIN, STORYTELLER, STORYTELLER)), asked, "", _lower(needed), rng.choice((0.7, 0.8))
    )


def _opened_story(rng: random.Random) -> Prompt:
    name, pronoun, being = _hero(rng)
    other = rng.choice(words.ANIMALS + words.PEOPLE)
    thing, place = rng.choice(words.OBJECTS), rng.choice(words.PLACES)
    day = rng.choice(
        ("One day", "One morning", "One evening", "One sunny day", "One cold day", "One night", "One Sunday")
    )
    her = "her" if pronoun == "she" else "his"
    opening = rng.choice((
        f"Once upon a time, there was {article(being)} named {name}.",
        f"Once upon a time, {article(being)} named {name} lived near the {place}. {day}, {pronoun}",
        f"Once upon a time, there was {article(being)} named {name} who lived in a {place}. {day}, {name} found {thing}.",
        f"{name} was {article(being)}. {pronoun.capitalize()} lived in a small house near the {place}. {day},",
        f"{name} was {article(being)} who loved {gerund(rng.choice(words.ACTIVITIES).replace('my', her))}. {day},",
        f"{day}, {name} went to the {place} with {her} friend. They",
        f"{day}, {article(being)} named {name} saw {thing} in the {place}. {pronoun.capitalize()}",
        f"{day}, {name} woke up early and looked out of the window. {pronoun.capitalize()} saw",
        f"{name} wanted {thing} more than anything else. {day},",
        f"There was once {article(other)} who lived alone in the {place}. {day},",
        f"In a small village there lived {article(being)} called {name}. Everyone in the village",
        f"{name} and {her} mother went to the market. They bought",
        f"{name} had {thing}. {pronoun.capitalize()} carried it everywhere. {day},",
        f"It was a cold winter night. {name} sat by the fire and",
        f"It was a warm summer day. {name} and {rng.choice(words.BOYS + words.GIRLS)} were playing in the {place} when",
        f"\"Where is {thing.replace('a ', 'my ', 1).replace('an ', 'my ', 1)}?\" asked {name}. {pronoun.capitalize()} looked",
        f"The {other} was sad. \"What is wrong?\" asked {name}.",
        f"{name} was afraid of the dark. {day},",
        f"{day}, the old {rng.choice(words.PEOPLE)} met {article(being)} in the {place}.",
        f"Long ago, in a land far away, there was a {place} where",
    ))  # fmt: skip
    needed = (name,) if name in opening else ()
    return Prompt("tale", STORYTELLER, "Tell me a short story.", opening, _lower(needed), rng.choice((0.7, 0.8)))


def _definition(rng: random.Random) -> Prompt:
    if rng.random() < 0.6:
        noun = rng.choice(words.THINGS + words.FOODS + words.PLACES)
        asked = rng.choice(("What is {a}?", "What is {a}?", "What is {a} used for?", "Explain what {a} is.", "Tell me about {s}.", "What are {s}?", "Why do people use {s}?", "How does {a} work?"))  # fmt: skip
        question = asked.format(a=article(noun), s=plural(noun))
    else:
        noun = rng.choice(words.STUFF)
        asked = rng.choice(("What is {n}?", "What is {n}?", "Explain {n}.", "Tell me about {n}.", "Why is {n} important?", "What can you tell me about {n}?"))  # fmt: skip
        question = asked.format(n=noun)
    stem = noun if len(noun) < 5 else noun[:-1]
    return Prompt("define", rng.choice(SYSTEMS), question, "", _lower((stem,)), rng.choice((0.4, 0.6, 0.7)))


def _description(rng: random.Random) -> Prompt:
    place, look = rng.choice(words.PLACES), rng.choice(words.LOOKS)
    asked, needed = rng.choice((
        (f"Describe {article(look)} {place}.", (place,)),
        (f"Write a short paragraph about {article(look)} {place}.", (place,)),
        (f"Write a few sentences about {rng.choice(words.TOPICS)}.", ()),
        (f"Describe {article(rng.choice(words.THINGS))}.", ()),
        (f"Write a short paragraph about {article(rng.choice(words.PEOPLE))} who works in the {place}.", ()),
        (f"Describe {rng.choice(words.TOPICS)}.", ()),
    ))  # fmt: skip
    return Prompt("describe", rng.choice(SYSTEMS), asked, "", _lower(needed), rng.choice((0.6, 0.8)))


def _reason(rng: random.Random) -> Prompt:
    clause = rng.choice(words.WHY)
    stem = clause.split()[-1]
    return Prompt("why", rng.choice(SYSTEMS), f"Why {clause}?", "", _lower((stem[:4],)), rng.choice((0.5, 0.7)))


def _advice(rng: random.Random) -> Prompt:
    deed = rng.choice(words.ACTIVITIES)
    asked = rng.choice(("How do I {d}?", "How can I {d}?", "Give me some advice: how can I {d}?", "Give me three tips for {g}.", "What do I need to {d}?", "Is it hard to {d}?", "What are the benefits of {g}?", "Can you help me {d}?"))  # fmt: skip
    question = asked.format(d=deed, g=gerund(deed.replace("my ", "a ")))
    return Prompt("how", rng.choice(SYSTEMS), question, "", _lower((deed.split()[-1][:4],)), rng.choice((0.5, 0.7)))


def _sentence(rng: random.Random) -> Prompt:
    noun = rng.choice(words.THINGS + words.FOODS + words.ANIMALS + words.PLACES + words.STUFF)
    asked = rng.choice(
        ("Write a sentence with the word {n}.", "Use the word {n} in a sentence.", "Make a sentence about {n}.")
    )
    return Prompt("sentence", PLAIN, asked.format(n=noun), "", _lower((noun,)), 0.8)


def _feeling(rng: random.Random) -> Prompt:
    feeling = rng.choice(words.FEELINGS)
    asked = rng.choice(
        ("I feel {f} today.", "I am {f}.", "I am so {f}.", "What can I do when I feel {f}?", "Why do I feel {f}?")
    )
    return Prompt("feel", PLAIN, asked.format(f=feeling), "", (), 0.7)


def _poem(rng: random.Random) -> Prompt:
    topic = rng.choice(words.TOPICS)
    return Prompt("poem", PLAIN, f"Write a short poem about {topic}.", "", (topic.split()[-1],), 0.8)


def _animal(rng: random.Random) -> Prompt:
    animal = rng.choice(words.ANIMALS + words.MORE_ANIMALS)
    asked = rng.choice(("What is {a}?", "Tell me about {s}.", "What do {s} eat?", "Where do {s} live?", "Tell me a fact about {s}.", "Describe {a}.", "What do you know about {s}?"))  # fmt: skip
    question = asked.format(a=article(animal), s=plural(animal))
    return Prompt(
        "animal", rng.choice(SYSTEMS), question, "", (animal[: max(3, len(animal) - 1)],), rng.choice((0.4, 0.6))
    )


def _job(rng: random.Random) -> Prompt:
    job = rng.choice(words.JOBS)
    asked = rng.choice(("What does {a} do?", "What is {a}?", "Where does {a} work?", "Tell me about the work of {a}."))
    return Prompt("job", rng.choice(SYSTEMS), asked.format(a=article(job)), "", (job[:-1],), rng.choice((0.4, 0.6)))


def _compare(rng: random.Random) -> Prompt:
    first, second = rng.sample(rng.choice((words.ANIMALS, words.FOODS, words.JOBS, words.PLACES)), 2)
    question = f"What is the difference between {article(first)} and {article(second)}?"
    return Prompt("compare", rng.choice(SYSTEMS), question, "", (first, second), 0.5)


def _lower(needed: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(word.lower() for word in needed)
