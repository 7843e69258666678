"""Stories from the plots: a cast is drawn, one sentence of each beat is taken, and the request is made to fit."""

from __future__ import annotations

import random
from dataclasses import dataclass

from deepseek_tgi.convert.demo_model import words
from deepseek_tgi.convert.demo_model.plots import DAYS, ENDINGS, OPENINGS, PLOTS, Plot
from deepseek_tgi.convert.demo_model.prompts import article

_PLACES = "forest garden village town park valley meadow orchard field".split()
_WATERS = "river lake pond sea".split()
_FOODS = (
    "bread and honey",
    "apples",
    "cookies",
    "cake",
    "berries",
    "bread and cheese",
    "nuts",
    "pancakes",
    "soup",
    "apple pie",
)
_THINGS = (
    "red kite", "golden key", "wooden boat", "old map", "shiny coin", "blue balloon", "silver bell", "small lantern",
    "warm scarf", "little drum", "green hat", "music box", "yellow umbrella", "paper crown", "silver ring", "toy train",
    "picture book", "wooden horse", "glass ball", "blue cup", "red ball", "flute", "teddy bear", "pocket watch",
    "golden necklace", "small boat", "straw hat", "new pencil", "little mirror", "soft blanket",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Story:
    """A request that fits, the story, and the words that its hero goes by."""

    request: str
    text: str


def story(rng: random.Random) -> Story:
    """One story."""
    plot = rng.choice(PLOTS)
    cast = _cast(rng)
    beats = [rng.choice(beat) for beat in plot.beats]
    ending = rng.choice(ENDINGS)
    day_at = next((index for index, beat in enumerate(beats) if beat.startswith(("{Day}", "One "))), 1)
    paragraphs = [[rng.choice(OPENINGS), *beats[:day_at]], beats[day_at:], [ending]]
    told = [" ".join(part.format(**cast) for part in parts if part) for parts in paragraphs]
    text = ("\n\n" if rng.random() < 0.15 else " ").join(part for part in told if part)
    return Story(_request(rng, plot, cast), text)


def _cast(rng: random.Random) -> dict[str, str]:
    name, girl = _name(rng)
    friend, friend_girl = _name(rng)
    while friend == name:
        friend, friend_girl = _name(rng)
    kind, friend_kind = _kind(rng, girl), _kind(rng, friend_girl)
    thing = rng.choice(_THINGS)
    day, day2 = rng.sample(DAYS, 2)
    being, friend_being = (article(f"{rng.choice(words.ADJECTIVES)} {k}") for k in (kind, friend_kind))
    he, him, his = ("she", "her", "her") if girl else ("he", "him", "his")
    fhe, fhim, fhis = ("she", "her", "her") if friend_girl else ("he", "him", "his")
    return {
        "N": name, "k": kind, "a": being, "F": friend, "fk": friend_kind, "fa": friend_being,
        "Fa": friend_being[0].upper() + friend_being[1:], "o": thing, "ao": article(thing), "p": rng.choice(_PLACES),
        "w": rng.choice(_WATERS), "food": rng.choice(_FOODS), "Day": day, "Day2": day2, "he": he, "him": him, "his": his,
        "He": he.capitalize(), "His": his.capitalize(), "fhe": fhe, "fhim": fhim, "fhis": fhis, "Fhe": fhe.capitalize(),
    }  # fmt: skip


def _name(rng: random.Random) -> tuple[str, bool]:
    girl = rng.random() < 0.5
    return rng.choice(words.GIRLS if girl else words.BOYS), girl


def _kind(rng: random.Random, girl: bool) -> str:
    draw = rng.random()
    if draw < 0.62:
        return rng.choice(words.ANIMALS)
    if draw < 0.85:
        return "girl" if girl else "boy"
    return rng.choice(("baker", "farmer", "teacher", "painter", "gardener", "tailor", "princess" if girl else "prince", "queen" if girl else "king", "knight", "sailor", "dragon", "robot", "dinosaur", "pirate", "giant", "ghost", "unicorn", "fairy", "wizard", "monster"))  # fmt: skip


def _request(rng: random.Random, plot: Plot, cast: dict[str, str]) -> str:
    deed = rng.choice(plot.asks)
    verb = rng.choice(("Write a short story", "Tell me a story", "Tell me a short story", "Write a story", "Can you tell me a story", "Please write a short story", "Write me a story", "Make up a story"))  # fmt: skip
    about = rng.choice((
        " about {N}, {a} who " + deed, " about {a} named {N} who " + deed, " about {a} who " + deed,
        " about {a} named {N}", " about {N} the {k}", " about {k_a}", " about {k_a} and {fk_a}", " about {a}",
        " about {k_a} named {N}", " about {N} and {F}", " about {ao}" if "{ao}" in deed else " about {k_a}", "",
    ))  # fmt: skip
    mark = "?" if verb.startswith("Can") else rng.choice((".", ".", ""))
    extended = {**cast, "k_a": article(cast["k"]), "fk_a": article(cast["fk"])}
    return (verb + about.format(**extended)) + mark
