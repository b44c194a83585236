"""What is read from the updates that clients really send: weight changes of AdamW and SGD, low precision, noise.

    OMP_NUM_THREADS=1 python benchmarks/real_updates.py adamw sgd words sentences peers precision defenses \\
        strongest decoders untold undropped

Dropout 0.1 is on in every cell of a model that has it, but for the last group; labels and lengths are unknown. Draw
2026 (11113 for precision) was not used in development. Groups: adamw (one step with frozen word and position
embeddings, and one as the transformers Trainer takes it), sgd (one step, and minibatches), words and sentences
(several steps of AdamW, embeddings trained), peers (TAG and LAMP on the latter, every step replayed), precision
(autocast, bfloat16), defenses (noise, pruning), strongest (the strongest of these on a wider model, and read by Grab,
which is told labels and lengths), decoders, untold, undropped. Records go to out/benchmarks (a run that was stopped
goes on there) and hold no text. Failures count 0.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grid import PRACTICAL, Cell, Done, Program, main, mean_of
from matching import GRAB

from gradaudit.metrics.summary import summarize

DRAW = 2026
OTHER_DRAWS = {"precision": 11113}
"""Some batches of draws 2026 and 9091 were looked at to mend what autocast hides."""
TRAINER = {"dropout": True, "optimizer": "adamw", "learning_rate": 5e-5, "clip_norm": 1.0, "schedule": "linear"}
"""What the transformers Trainer does when nothing is said, in one step."""


def one(size: int, batches: int, **client: Any) -> Cell:
    """Return a cell of MiniLM on CoLA that sees block 0's attention."""
    return Cell("cola", size, batches, PRACTICAL | client, tensors="0:q,k,v", seed=DRAW)


def adamw() -> list[Cell]:
    """One step, two rates; then the Trainer's defaults."""
    step = {"optimizer": "adamw", "weight_decay": 0.01}
    cells = [
        one(b, n, **step, learning_rate=rate)
        for b, n in ((1, 10), (2, 10), (4, 10), (8, 10), (16, 3))
        for rate in (5e-5, 1e-5)
    ]
    return [*cells, *(Cell("cola", b, n, TRAINER, seed=DRAW) for b, n in ((1, 10), (8, 5)))]


def sgd() -> list[Cell]:
    """One step at four rates, and minibatches of two."""
    cells = [
        one(b, n, optimizer="sgd", learning_rate=rate)
        for b, n in ((1, 10), (4, 5), (8, 3))
        for rate in (1e-1, 1e-2, 1e-3, 1e-4)
    ]
    return [*cells, *(one(8, 2, optimizer="sgd", learning_rate=rate, minibatch=2) for rate in (1e-2, 1e-3))]


def words() -> list[Cell]:
    """Several steps of eight sentences, as the Trainer takes them, with weight decay; the word embedding is enough."""
    how = TRAINER | {"weight_decay": 0.01, "minibatch": 8}
    steps = ((2, 10), (4, 10), (8, 5), (16, 5), (64, 2))
    return [Cell("cola", 8 * count, n, how, tensors="word", seed=DRAW) for count, n in steps]


def sentences() -> list[Cell]:
    """Several steps of eight sentences, for what becomes of their order; few batches: a step takes 20 s."""
    return [replace(cell, batches=n, tensors="all") for cell, n in zip(words(), (5, 3, 2, 1), strict=False)]


def peers() -> list[Cell]:
    """Two steps for TAG and LAMP: a step of theirs takes over a second, so that their budgets are below the papers'."""
    tag = {"name": "tag", "steps": 1000}
    lamp = {"name": "lamp", "steps": 500, "starts": 50, "permutations": 50, "edits": 20}
    return [replace(sentences()[0], attack=attack, batches=1) for attack in (tag, lamp)]


def precision() -> list[Cell]:
    """One gradient under autocast, and of a model whose weights are bfloat16."""
    sizes = ((1, 10), (4, 5), (8, 2))
    adam = {"optimizer": "adamw", "learning_rate": 5e-5, "weight_decay": 0.01, "precision": "bf16"}
    gradients = [one(b, n, precision=p) for p in ("bf16", "fp16", "bf16-weights") for b, n in sizes]
    return [*gradients, *(one(b, n, **adam) for b, n in sizes)]


def defenses() -> list[Cell]:
    """One gradient behind noise on unit-norm tensors, pruning, integers."""
    cells = []
    for b, n in ((1, 10), (4, 5)):
        for sigma in (1e-5, 1e-4, 1e-3, 1e-2, 5e-2):
            told = ({"name": "normalized-gaussian", "sigma": sigma},)
            cells.append(Cell("cola", b, n, PRACTICAL, defense=told, seed=DRAW))
        for rate in (0.75, 0.9, 0.99):
            cells.append(Cell("cola", b, n, PRACTICAL, defense=({"name": "random-pruning", "rate": rate},), seed=DRAW))
        cells.append(Cell("cola", b, n, PRACTICAL, defense=({"name": "quantize", "bits": 8},), seed=DRAW))
    return cells


def strongest() -> list[Cell]:
    """The strongest noise and pruning, where `decode` is below Grab's published curve: a wider model, and Grab here."""
    told = ({"name": "normalized-gaussian", "sigma": 5e-2},), ({"name": "random-pruning", "rate": 0.99},)
    ours = [Cell("cola", 1, 5, PRACTICAL, "mpnet", defense=one, seed=DRAW) for one in told]
    given = {"knowledge": {"labels": True, "lengths": True}}
    return [*ours, *(Cell("cola", 1, 5, PRACTICAL, defense=one, seed=DRAW, attack=GRAB, more=given) for one in told)]


def decoders() -> list[Cell]:
    """One step of SmolLM2, which drops nothing out; then of GPT-2's shape, which does."""
    step = PRACTICAL | {"dropout": False}
    steps = [step | {"optimizer": "adamw", "weight_decay": 0.01, "learning_rate": rate} for rate in (5e-5, 1e-5)]
    steps.append(step | {"optimizer": "sgd", "learning_rate": 1e-2})
    shape = {"dropout": True, "optimizer": "adamw", "learning_rate": 5e-5, "weight_decay": 0.01}
    return [
        *(
            Cell("cola", b, n, how, "smollm2", tensors="0:q,k,v", seed=DRAW)
            for how in steps
            for b, n in ((1, 10), (4, 5), (8, 3))
        ),
        *(Cell("cola", b, n, shape, "random:gpt2", seed=DRAW) for b, n in ((1, 5), (4, 3))),
    ]


def untold() -> list[Cell]:
    """One step of which the attacker knows neither optimizer, rate, decay, dropout nor the number of sentences."""
    nothing = {"knowledge": dict.fromkeys(("training", "batch_size", "dropout", "defenses"), False)}
    adam = {"optimizer": "adamw", "learning_rate": 5e-5, "weight_decay": 0.01}
    steps = (adam, {"optimizer": "sgd", "learning_rate": 0.01})
    return [
        Cell("cola", b, n, {"dropout": True, **step}, seed=DRAW, more=nothing)
        for step in steps
        for b, n in ((1, 10), (4, 5))
    ]


def undropped() -> list[Cell]:
    """One step, or one gradient in few bits, with dropout off."""
    adam = {"optimizer": "adamw", "weight_decay": 0.01}
    steps = [adam | {"learning_rate": rate} for rate in (5e-5, 1e-5)]
    steps += [{"optimizer": "sgd", "learning_rate": 1e-2}, steps[0] | {"precision": "bf16"}, {"precision": "bf16"}]
    return [
        Cell("cola", b, n, PRACTICAL | {"dropout": False} | step, seed=DRAW)
        for step in steps
        for b, n in ((1, 10), (4, 5), (8, 3))
    ]


GROUPS = {
    "adamw": adamw,
    "sgd": sgd,
    "words": words,
    "sentences": sentences,
    "peers": peers,
    "precision": precision,
    "defenses": defenses,
    "strongest": strongest,
    "decoders": decoders,
    "untold": untold,
    "undropped": undropped,
}
COLUMNS = (
    "update", "model", "B", "batches", "load b/d", "R-1", "R-L", "exact %", "proven", "proven, wrong", "blind R-L",
    "median s", "slowest s", "published",
)  # fmt: skip
OF_WORDS = (
    "update", "steps of 8", "batches", "words named %", "of them right %", "blind named %", "step right %",
    "of words in one step %", "of words in two %", "names and numbers %", "median s",
)  # fmt: skip


def said(cell: Cell) -> str:
    """Return how the update was made, in words."""
    own = {k: v for k, v in cell.client.items() if k not in ("dropout", "freeze", "optimizer", "learning_rate")}
    made = (
        [f"{cell.client['optimizer']} {cell.client['learning_rate']:g}"] if "optimizer" in cell.client else ["gradient"]
    )
    made += [f"{k.replace('_', ' ')} {v}" for k, v in own.items()]
    made += [" ".join(str(v) for v in one.values()) for one in cell.defense]
    made.append("embeddings frozen" if cell.client.get("freeze") else "all trained")
    told = cell.more.get("knowledge", {})
    if told:
        made.append("labels and lengths told" if all(told.values()) else "nothing told")
    if (attack := dict(cell.attack)) != {"name": "decode"}:
        made.append(" ".join([f"by {attack.pop('name')}:", *(f"{v} {k}" for k, v in attack.items())]))
    return ", ".join(made)


def row(done: Done) -> list[str]:
    """Return a cell's table row."""
    cell, records = done.cell, done.records
    summary = summarize(records)[0]
    sentences = [s for r in records for s in r.sentences]
    proven = [s for s in sentences if s.certificate == "proven"]
    loads = [r.load or 0.0 for r in records]
    scores = [summary.scores[k].mean or 0 for k in ("rouge1", "rougeL", "exact")]
    return [
        said(cell), cell.model, str(cell.size), str(len(records)), f"{min(loads):.2f}-{max(loads):.2f}",
        *(f"{v:.1f}" for v in scores), f"{len(proven)}/{len(sentences)}", str(sum(not s.exact for s in proven)),
        f"{summary.baseline['rougeL'].mean or 0:.1f}", f"{summary.seconds:.1f}",
        f"{max(r.seconds for r in records):.0f}", cell.published,
    ]  # fmt: skip


def row_of_words(done: Done) -> list[str]:
    """Return a row of words."""
    cell, summary = done.cell, summarize(done.records)[0]
    told = ("minibatch", "alone", "twice", "sensitive")
    return [
        said(cell), str(cell.size // 8), str(len(done.records)), mean_of(summary.words, "recall"),
        mean_of(summary.words, "precision"), mean_of(summary.baseline_words, "recall"),
        *(mean_of(summary.words, name) for name in told), f"{summary.seconds:.1f}",
    ]  # fmt: skip


def table(done: Sequence[Done]) -> list[list[str]]:
    """Return a group's rows."""
    return [row_of_words(d) if d.cell.name.startswith("real-words-") else row(d) for d in done if d.records]


def name(group: str, cell: Cell) -> str:
    """Return the name of a cell's folder."""
    return f"real-{group}-{said(cell)}-{cell.model}-b{cell.size}"


PROGRAM = Program(
    about=__doc__,
    groups={
        group: lambda given, group=group, make=make: [
            replace(c, name=name(group, c), seed=OTHER_DRAWS.get(group, c.seed)) for c in make()
        ]
        for group, make in GROUPS.items()
    },
    columns={group: OF_WORDS if group == "words" else COLUMNS for group in GROUPS},
    table=table,
    words=lambda group, given: (
        f"Dropout {'off' if group == 'undropped' else '0.1 on where the model has it'}, labels and lengths unknown, "
        f"draw {OTHER_DRAWS.get(group, DRAW)}, not used in development."
    ),
    results=Path("benchmarks/results/real-updates"),
)

if __name__ == "__main__":
    sys.exit(main(PROGRAM))
