"""Words and sentences of adapters, amid noise or not, by the thousand, the truth at hand: is what is certain right?

    cd tests && PYTHONPATH=. python -m fuzz.adapter_words --write ../benchmarks/results/adapters/proofs.md

A tiny Llama with random weights, adapters of rank 2, 4 and 8, one to four sentences of two to six words; the attacker
is told of the noise. It is told too large where a server saw the sum of clients that added it each.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from collections import Counter
from pathlib import Path

import tiny_models
from fuzz.tables import rows, write_page
from gradaudit.attacks.decode import Decode
from gradaudit.client.client import Client
from gradaudit.models.transformers import TransformersModel
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import LocalTraining
from test_sparse_words import adapted, held

NOISES = (1e-4, 1e-3, 1e-2, 0.03, 0.1, 0.3, 1.0)
"""In multiples of a tensor's root mean square; of the other kinds in numbers of about that size."""
KINDS: dict[str, tuple[str, str, float, dict[str, bool]] | None] = {
    "none": None,
    "none, one step of SGD": None,
    "none, one step of AdamW": None,
    "gaussian": ("gaussian", "sigma", 1.0, {"relative": True}),
    "gaussian, summed clients": ("gaussian", "sigma", 1.0, {"relative": True}),
    "gaussian, one step of SGD": ("gaussian", "sigma", 1.0, {"relative": True}),
    "normalized-gaussian": ("normalized-gaussian", "sigma", 1 / 8, {}),
    "laplace": ("laplace", "scale", 1e-3, {}),
    "dp-sgd": ("dp-sgd", "noise_multiplier", 1e-2, {}),
}
COLUMNS = ("batches", "words named", "wrong", "certain", "certain, wrong", "proven", "proven, wrong")


def trial(kind: str, models: list[TransformersModel], rng: random.Random) -> Counter[str]:
    """Return the counts of one batch."""
    model, size, guards = rng.choice(models), rng.randint(1, 4), ()
    if (told := KINDS[kind]) is not None:
        defense, field, unit, more = told
        guards = (build("defense", defense, {field: unit * rng.choice(NOISES), **more}),)
    how = LocalTraining("sgd", 0.1) if "SGD" in kind else LocalTraining()
    if "AdamW" in kind:
        how = LocalTraining("adamw", 2e-4, eps=1e-3)  # a tiny model's gradients are large
    clients = size if "clients" in kind else 1
    lengths = [rng.randint(2, 6) for _ in range(size)]
    batch = tiny_models.batch_of(model, tiny_models.sentences(lengths, rng.randrange(10**6)))
    client = Client(model, how, defenses=guards, clients=clients)
    found = Decode()(tiny_models.seen_of(client, batch, seed=rng.randrange(10**6)), stream(0, "attack"))
    true, texts = held(model, batch), {tuple(ids) for ids in batch.sequences()}
    words = found.words or ()
    proven = [s for s, told in zip(found.sequences, found.certificates or (), strict=True) if told == "proven"]
    counts = (
        1, len(words), sum(w.token not in true for w in words), sum(w.certain for w in words),
        sum(w.certain and w.token not in true for w in words), len(proven), sum(tuple(s) not in texts for s in proven),
    )  # fmt: skip
    return Counter(dict(zip(COLUMNS, counts, strict=True)))


def page(given: argparse.Namespace, rng: random.Random) -> list[str]:
    """Run the trials and return the page's lines."""
    with tempfile.TemporaryDirectory() as where:
        folder = tiny_models.make_folder("llama", Path(where) / "llama")
        models = [adapted(f"random:{folder}", rank) for rank in (2, 4, 8)]
        said = {kind: Counter[str]() for kind in KINDS}
        for at in range(given.trials):
            kind = list(KINDS)[at % len(KINDS)]
            said[kind] += trial(kind, models, rng)
    said["all"] = sum(said.values(), Counter[str]())
    return [
        "Adapters: what is certain or proven, and wrong",
        "a tiny Llama with random weights (width 32, three blocks), rank 2, 4 and 8, 1 to 4 sentences, the noise told "
        "(of summed clients each one's), 1e-4 to 1 times a tensor's root mean square.",
        *rows(("noise", *COLUMNS), [(kind, *(count[name] for name in COLUMNS)) for kind, count in said.items()]),
    ]


if __name__ == "__main__":
    write_page({"trials": (2000, "batches")}, page)
