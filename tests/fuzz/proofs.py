"""Proofs by the thousand, with the truth at hand: honest updates, decoys, and forged updates of ten kinds.

    cd tests && PYTHONPATH=. python -m fuzz.proofs --write ../benchmarks/results/proofs.md

Tiny encoders with random weights, dropout off: what proves is the same algebra as in a large one.
"""

from __future__ import annotations

import argparse
import dataclasses
import random
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

import tiny_models
from fuzz.tables import rows, write_page
from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.leakage.decoding.taking_out import take_out
from gradaudit.leakage.rowspace.deflation import matrices, remainder
from gradaudit.models.transformers import TransformersModel
from gradaudit.streams import stream
from gradaudit.types import Batch, LocalTraining, Observation

EPS = torch.finfo(torch.float32).eps
LOSSES = ("plain", "scaled", "unequal weights", "smoothed labels", "smoothed, unequal weights")
DECOYS = ("one word exchanged", "two words swapped", "a word left out", "another batch's sentence")
Tensors = dict[str, Tensor]


def drawn(model: TransformersModel, rng: random.Random) -> Batch:
    """Draw two to four sentences of two to four words."""
    sizes = [rng.randint(2, 4) for _ in range(rng.randint(2, 4))]
    texts = tiny_models.sentences(sizes, rng.randrange(1 << 30), tiny_models.WORDS, distinct=False)
    return tiny_models.batch_of(model, texts, [rng.randrange(model.spec.labels) for _ in sizes])


def honest(model: TransformersModel, batch: Batch, loss: str, rng: random.Random) -> Observation:
    """Return what backward passes of one sentence each add up to, under a loss."""
    smoothing = rng.choice([0.05, 0.1, 0.3]) if "smoothed" in loss else 0.0
    client = Client(model, LocalTraining(label_smoothing=smoothing))
    count = len(batch.ids)
    weights = [10 ** rng.uniform(-1.5, 1.5) if "unequal" in loss else 1 / count for _ in range(count)]
    scale = 10 ** rng.uniform(-6, 6) if loss != "plain" else 1.0
    parts = [
        tiny_models.seen_of(client, Batch(batch.ids[[i]], batch.mask[[i]], batch.labels[[i]], ())) for i in range(count)
    ]
    whole = {n: sum(scale * w * p.tensors[n] for w, p in zip(weights, parts, strict=True)) for n in parts[0].tensors}
    return dataclasses.replace(parts[0], tensors=whole)


def decoy(kind: str, sentence: tuple[int, ...], words: list[int], other: tuple[int, ...], rng: random.Random):
    """Return a sentence that is near the batch's and not in it."""
    at = rng.randrange(1, len(sentence) - 1)
    if kind == DECOYS[0]:
        return (*sentence[:at], rng.choice(words), *sentence[at + 1 :])
    if kind == DECOYS[1]:
        inner = list(sentence[1:-1])
        rng.shuffle(inner)
        return (sentence[0], *inner, sentence[-1])
    return (*sentence[:at], *sentence[at + 1 :]) if kind == DECOYS[2] else other


def trials(count: int, models: list[TransformersModel], rng: random.Random) -> dict[str, Counter[str]]:
    """Take right and wrong sentences out of honest updates; counts by loss, or by kind of decoy."""
    said: dict[str, Counter[str]] = {name: Counter() for name in (*LOSSES, *DECOYS)}
    done = 0
    while done < count:
        model, loss = rng.choice(models), rng.choice(LOSSES)
        batch, other = drawn(model, rng), drawn(model, rng)
        right = [tuple(s) for s in batch.sequences()]
        seen = honest(model, batch, loss, rng)
        rest = remainder(matrices(seen, 3), EPS)
        if not 0 < rest.span(1).rank < model.width:
            continue
        words = sorted({t for s in right for t in s[1:-1]})
        sentence = rng.choice(right)
        tried = [(loss, sentence)]
        for kind in DECOYS:
            wrong = decoy(kind, sentence, words, tuple(other.sequences()[0]), rng)
            if wrong not in right and len(wrong) > 2:
                tried.append((kind, wrong))
        for name, one in tried:
            taken = take_out(model, rest, one, [1 / len(right)], [1, 2])
            said[name]["tried"] += 1
            said[name]["proven"] += taken is not None and taken.proven
            done += 1
    return said


def _proving(seen: Observation, blocks: range) -> set[str]:
    return {v.parameter for layer in blocks for role in "qkv" for v in seen.model.views(layer, role)}


def _roles(seen: Observation, roles: str) -> set[str]:
    return {v.parameter for layer in range(seen.model.depth) for r in roles for v in seen.model.views(layer, r)}


def forgeries(seen: Observation, other: Observation, rng: torch.Generator) -> dict[str, Callable[[], Tensors]]:
    """Return ten forged updates by name; what proves is a batch's in all of them, the rest is not."""
    model, mine = seen.model, _proving(seen, range(3))
    rest = set(seen.tensors) - mine

    def noise(tensor: Tensor) -> Tensor:
        return torch.randn(tensor.shape, generator=rng) * tensor.norm() / tensor.numel() ** 0.5

    def with_(names: set[str], made: Callable[[str, Tensor], Tensor]) -> Callable[[], Tensors]:
        return lambda: {n: made(n, t) if n in names else t for n, t in seen.tensors.items()}

    return {
        "the rest is noise": with_(rest, lambda n, t: noise(t)),
        "the rest is another batch's": with_(rest, lambda n, t: other.tensors[n]),
        "the rest has the other sign": with_(rest, lambda n, t: -t),
        "the rest is turned upside down": with_(rest, lambda n, t: t.flip(0)),
        "embeddings of another batch": with_(set(model.group("embeddings")), lambda n, t: other.tensors[n]),
        "head of another batch": with_(set(model.group("head")), lambda n, t: other.tensors[n]),
        "attention outputs of noise": with_(_roles(seen, "o"), lambda n, t: noise(t)),
        "feed-forwards of another batch": with_(_roles(seen, "fp"), lambda n, t: other.tensors[n]),
        "half of each is another batch's": with_(rest, lambda n, t: t + other.tensors[n]),
        "two batches' attention, the rest is noise": lambda: {
            n: t + other.tensors[n] if n in mine else noise(t) for n, t in seen.tensors.items()
        },
    }


def forged(each: int, models: list[TransformersModel], rng: random.Random) -> dict[str, Counter[str]]:
    """Attack forged updates, and the honest ones that they are made of; counts by kind."""
    said: dict[str, Counter[str]] = {}
    noise = torch.Generator().manual_seed(rng.randrange(1 << 30))
    for _ in range(each):
        model = rng.choice(models)
        first, second = drawn(model, rng), drawn(model, rng)
        seen, other = (tiny_models.seen_of(Client(model), one) for one in (first, second))
        right = {tuple(s) for s in first.sequences()} | {tuple(s) for s in second.sequences()}
        known = dataclasses.replace(seen.knowledge, batch_size=None)
        made = {"none: the honest update": lambda seen=seen: dict(seen.tensors), **forgeries(seen, other, noise)}
        for name, make in made.items():
            found = Decode()(dataclasses.replace(seen, tensors=make(), knowledge=known), stream(0, "attack"))
            count = said.setdefault(name, Counter())
            proven = [s for s, c in zip(found.sequences, found.certificates or (), strict=True) if c == "proven"]
            count["tried"] += 1
            count["found"] += bool(set(found.sequences) & right)
            count["proven"] += bool(proven)
            count["wrong"] += any(s not in right for s in proven)
    return said


def page(given: argparse.Namespace, rng: random.Random) -> list[str]:
    """Run the trials and the forgeries, and return the page's lines."""
    with tempfile.TemporaryDirectory() as where:
        folder = tiny_models.make_folder("bert", Path(where) / "bert")
        models = [tiny_models.tiny(folder, labels=labels) for labels in (2, 4, 7)]
    forged_, tried = forged(given.each, models, rng), trials(given.trials, models, rng)
    right = [(f"right: {kind}", tried[kind]["tried"], tried[kind]["proven"]) for kind in LOSSES]
    wrong = [(f"wrong: {kind}", tried[kind]["tried"], f"**{tried[kind]['proven']}**") for kind in DECOYS]
    decoys = sum(tried[kind]["tried"] for kind in DECOYS)
    return [
        "Proofs: honest updates, decoys, forged updates",
        "tiny BERTs of 2, 4 and 7 classes with random weights (width 32, three blocks), dropout off, 2 to 4 sentences.",
        f"{sum(c['tried'] for c in tried.values())} sentences taken out of honest updates, right ones and decoys made "
        "of them. Scales are 1e-6 to 1e6 (all but plain), unequal weights 1 to 1000. Decoys are tried on every loss. "
        f"If none of {decoys} decoys is proven, that happens to fewer than {3 / max(decoys, 1):.1g} of them at 95% "
        "(rule of three).",
        "",
        *rows(("sentence", "tried", "called proven"), right + wrong),
        "",
        "Forged updates: queries, keys and values prove a batch, and something else was put in the place of the rest "
        "([what is compared](../../docs/exact-decoding.md#what-a-proof-assumes)). An update that is forged as a whole, "
        "the gradient of sentences that the client never had, is no other than an honest one, and is not counted.",
        "",
        *rows(("forged", "updates", "a sentence found", "some proven", "a proven one in neither batch"),
              [(kind, c["tried"], c["found"], c["proven"], c["wrong"]) for kind, c in forged_.items()]),
    ]  # fmt: skip


if __name__ == "__main__":
    write_page({"trials": (10_000, "sentences"), "each": (50, "forged updates of each kind")}, page)
