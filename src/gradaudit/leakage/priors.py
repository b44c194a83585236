"""What an attacker knows before seeing any gradient: the frequent words of English, the mean of public images."""

import string
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import torch

from gradaudit.kinds import ByKind
from gradaudit.models.base import TextModel
from gradaudit.models.images import ImageModel
from gradaudit.types import Observation, Reconstruction


def frequent_words() -> list[str]:
    """Return about 200 frequent English words, most frequent first (public knowledge, shipped with the package)."""
    text = files("gradaudit.data").joinpath("frequent_words.txt").read_text(encoding="utf8")
    return [line.strip() for line in text.splitlines() if line.strip() and not line.startswith("#")]


def frequent_tokens(model: TextModel) -> list[int]:
    """Return the token ids of frequent words that are a single token inside a sentence, most frequent first."""
    found: list[int] = []
    for word in frequent_words():
        ids = model.content(model.encode(f"a {word}")[0])[len(model.content(model.encode("a")[0])) :]
        if len(ids) == 1 and ids[0] not in found:
            found.append(ids[0])
    # a vocabulary without whole words (characters, another language) still has tokens to guess
    return found or [i for i in range(model.vocabulary_size) if i not in model.special.ids][:50]


def marks(model: TextModel, among: str = string.punctuation) -> list[int]:
    """Return the token ids of punctuation marks that are a single token inside a sentence.

    Args:
        model: whose tokens.
        among: the marks; all of them unless told otherwise.
    """
    before = model.content(model.encode("a")[0])
    found = [model.content(model.encode(f"a{mark}")[0])[len(before) :] for mark in among]
    return list(dict.fromkeys(ids[0] for ids in found if len(ids) == 1))


def usual_places(model: TextModel) -> list[int]:
    """Return each token's place by a guess at how often it is used: frequent words first, then by id.

    Vocabularies of subwords list their tokens by frequency, roughly.
    """
    first = frequent_tokens(model)
    places = [len(first) + token for token in range(model.vocabulary_size)]
    for place, token in enumerate(first):
        places[token] = place
    return places


def _usual_words(seen: Observation, size: int, length: int) -> Reconstruction:
    special, prior = seen.model.special, frequent_tokens(seen.model)
    frame = len(special.prefix) + len(special.suffix)
    lengths = seen.knowledge.lengths or (length + frame,) * size
    guesses = tuple(
        (*special.prefix, *(prior[i % len(prior)] for i in range(max(n - frame, 0))), *special.suffix) for n in lengths
    )
    return Reconstruction(sequences=guesses)


def _usual_images(seen: Observation[ImageModel], size: int, length: int) -> Reconstruction:
    if seen.public is None:  # gray
        image = torch.full((1, *seen.model.shape), 0.5, device=seen.model.device)
    else:
        image = seen.public.images.mean(0, keepdim=True).to(seen.model.device)
    return Reconstruction(images=image.expand(size, -1, -1, -1).clone())


GUESSES: ByKind[Callable[[Any, int, int], Reconstruction]] = ByKind("blind guess")
"""What one guesses without looking at the update: of so many examples, so many words each where that is not known."""
GUESSES.add("text", _usual_words)
GUESSES.add("images", _usual_images)
