"""Short conversations of several turns, in which an answer depends on what was said before."""

from __future__ import annotations

import random

from deepseek_tgi.convert.demo_model import facts, words
from deepseek_tgi.convert.demo_model.definitions import definition
from deepseek_tgi.convert.demo_model.knowledge import SCIENCE, SMALL_TALK

Turns = list[tuple[str, str]]


def by_hand(rng: random.Random) -> tuple[str, str]:
    """A question of the hand-written tables, and one of its answers."""
    asked, answers = rng.choice(SCIENCE if rng.random() < 0.6 else SMALL_TALK)
    return rng.choice(asked), rng.choice(answers)


def conversation(rng: random.Random) -> Turns:
    """Two to five turns."""
    turns: Turns = []
    if rng.random() < 0.4:
        turns.append(
            (rng.choice(("Hello!", "Hi!", "Hello", "Hi", "Good morning!")), "Hello! How can I help you today?")
        )
    kind = rng.random()
    if kind < 0.35:
        turns += _remembering(rng)
    else:
        for _ in range(rng.randint(1, 3)):
            turns.append(_single(rng))
    if rng.random() < 0.3:
        turns.append((rng.choice(("Thank you!", "Thanks!", "Thanks, that helped.", "Thank you very much.")), "You are welcome!"))  # fmt: skip
    if rng.random() < 0.15:
        turns.append((rng.choice(("Goodbye!", "Bye!", "See you!")), "Goodbye! Have a nice day."))
    return turns


def _single(rng: random.Random) -> tuple[str, str]:
    draw = rng.random()
    if draw < 0.4:
        return next(facts.questions(1, rng))
    return definition(rng) if draw < 0.65 else by_hand(rng)


def _remembering(rng: random.Random) -> Turns:
    name = rng.choice(words.GIRLS + words.BOYS)
    pet, pet_name = rng.choice(("dog", "cat", "rabbit", "horse", "parrot")), rng.choice(words.GIRLS + words.BOYS)
    color = rng.choice("red blue green yellow black white purple orange".split())
    city = rng.choice("Paris London Berlin Rome Madrid Vienna Oslo Dublin Boston Chicago Tokyo".split())
    food = rng.choice("pizza soup pancakes apples bread rice pasta salad cheese chocolate".split())
    stories = (
        ((f"My name is {name}.", f"Nice to meet you, {name}! How can I help you?"), ("What is my name?", f"Your name is {name}.")),
        ((f"I am {name}.", f"Hello, {name}! It is nice to meet you."), ("Do you remember my name?", f"Yes, your name is {name}.")),
        ((f"I have a {pet} named {pet_name}.", f"How nice! I am sure that {pet_name} is a lovely {pet}."),
         (f"What is the name of my {pet}?", f"The name of your {pet} is {pet_name}.")),
        ((f"My favorite color is {color}.", f"{color.capitalize()} is a beautiful color."),
         ("What is my favorite color?", f"Your favorite color is {color}.")),
        ((f"I live in {city}.", f"{city} is an interesting city. Do you like living there?"), ("Where do I live?", f"You live in {city}.")),
        ((f"My favorite food is {food}.", f"I have heard that {food} can be very good."), ("What is my favorite food?", f"Your favorite food is {food}.")),
    )  # fmt: skip
    chosen = list(rng.choice(stories))
    if rng.random() < 0.5:
        chosen.insert(1, _single(rng))
    return chosen
