"""What words and sentences the updates of LoRA adapters give away, far beyond their directions.

    OMP_NUM_THREADS=1 python benchmarks/adapters.py gradients changes ranks encoders dropout sentences steps \\
        several noise noisy modules shapes precision fresh

Adapters on q, k, v and o of every block, after ten steps of AdamW on other text. The attacker sees q, k, v of block
0, for sentences and steps everything. Groups: gradients (one gradient, by sentences), ranks (by rank), changes (one
step of AdamW from a fresh state, as in a later round), encoders (MiniLM, dropout off), dropout (the same, on),
sentences (one gradient), steps (sentences from one step), several (words from several steps of AdamW together), noise
(words of one gradient under noise of so many times each tensor's root mean square, and DP-SGD), noisy (sentences
under such noise), modules (adapters on q and v, on all linear layers), shapes (of BERT's base size and GPT-2, random
weights), precision (autocast), fresh (the first update, B still zero). The attacker has the weights with the adapters
as they are, the batch size, the dropout rate, and of a change how it was made; not labels or lengths. Draws were seen
by nobody before the method stood. Records hold no text. Failures count 0; "certain" is over all batches.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from grid import Cell, Done, Program, main, mean_of

from gradaudit.metrics.summary import summarize

DRAW, LATER, NOISY, PRECISE, FIRST = 5051, 15151, 8087, 9091, 10103
DRAWS = {"several": LATER, "noise": NOISY, "noisy": NOISY, "precision": PRECISE, "fresh": FIRST}
"""Draws that nobody saw before the method stood."""


def one(
    size: int,
    batches: int,
    rank: int = 8,
    model: str = "smollm2",
    tensors: str = "0:q,k,v",
    warmup: int = 10,
    draw: int = DRAW,
    defense: Mapping[str, Any] | None = None,
    modules: str = "attention",
    **client: Any,
) -> Cell:
    """Return a cell of CoLA."""
    how = {"dropout": False} | client
    told = f"{client.get('optimizer', 'gradient')} {client.get('learning_rate', '')}".strip()
    told += ", dropout on" * how["dropout"] + ", fresh adapters" * (not warmup)
    told += f", {modules.replace(',', ' ')}" * (modules != "attention")
    told += f", {how.get('precision')}" * ("precision" in how)
    if "epochs" in how:
        some = how.get("minibatch")
        told += f", {how['epochs'] * -(-size // (some or size))} steps" + f" of {some}" * bool(some)
    if defense:
        told += ", " + " ".join(
            "rms" if v is True else f"{v:g}" if isinstance(v, float) else str(v) for v in defense.values()
        )
    return Cell(
        "cola", size, batches, how, model, tensors=tensors, seed=draw, title=told,
        defense=(defense,) if defense else (),
        name=f"adapters-{told.replace(', ', '-')}-{model}-r{rank}-b{size}{'-all' * (tensors == 'all')}",
        more={"lora": {"rank": rank, "warmup": warmup, "modules": modules}},
        facts={"rank": rank},
    )  # fmt: skip


SIZES = ((1, 10), (4, 10), (8, 10), (16, 5), (32, 3), (64, 2))
ADAMW = {"optimizer": "adamw", "weight_decay": 0.01}
SGD = {"optimizer": "sgd", "learning_rate": 1e-2}
GROUPS = {
    "gradients": lambda: [one(b, n) for b, n in SIZES],
    "ranks": lambda: [one(b, n, r) for r in (2, 4, 16, 32) for b, n in ((8, 5), (32, 2))],
    "changes": lambda: [one(b, n, learning_rate=rate, **ADAMW) for rate in (2e-4, 5e-5) for b, n in SIZES[:5]],
    "encoders": lambda: [
        one(b, n, model="minilm", **how)
        for how in ({}, {"learning_rate": 2e-4, **ADAMW})
        for b, n in ((1, 10), (4, 10), (8, 10), (16, 5))
    ],
    "modules": lambda: [
        *(one(b, n, r, tensors="0:q,v", modules="q,v") for r in (4, 8) for b, n in ((1, 5), (4, 5), (16, 2))),
        *(one(b, n, modules="all-linear") for b, n in ((1, 5), (4, 5), (16, 2))),
    ],
    "shapes": lambda: [
        *(
            one(b, n, model="random:bert-base", tensors="0:q,v", modules="q,v", dropout=on)
            for on in (False, True)
            for b, n in ((1, 5), (4, 3), (8, 2))
        ),
        *(one(b, n, model="random:gpt2", dropout=on) for on in (False, True) for b, n in ((1, 5), (4, 3), (8, 2))),
    ],
    "precision": lambda: [
        *(one(b, n, draw=PRECISE, precision="bf16") for b, n in ((1, 5), (4, 5), (8, 3))),
        one(4, 5, draw=PRECISE, precision="fp16"),
        *(one(b, n, draw=PRECISE, precision="bf16", learning_rate=2e-4, **ADAMW) for b, n in ((1, 5), (4, 5), (8, 3))),
        one(4, 3, model="minilm", draw=PRECISE, precision="bf16"),
    ],
    "fresh": lambda: [
        *(
            one(b, n, rank, tensors="all", warmup=0, draw=FIRST)
            for rank in (8, 16, 32, 64)
            for b, n in ((1, 10), (2, 10), (4, 5))
        ),
        *(one(b, n, 32, tensors="all", warmup=0, draw=FIRST, **SGD) for b, n in ((1, 10), (2, 10))),
        *(one(1, 10, r, tensors="all", warmup=0, draw=FIRST, learning_rate=2e-4, **ADAMW) for r in (16, 32, 64)),
        *(one(b, n, 32, "minilm", tensors="all", warmup=0, draw=FIRST) for b, n in ((1, 10), (2, 5))),
    ],
    "dropout": lambda: [one(b, n, model="minilm", dropout=True) for b, n in ((1, 10), (4, 10), (8, 5))],
    "sentences": lambda: [
        one(b, n, rank, tensors="all")
        for rank, most in ((8, 16), (2, 8), (32, 8))
        for b, n in ((1, 10), (2, 10), (4, 10), (8, 5), (16, 3))
        if b <= most
    ],
    "steps": lambda: [
        one(b, n, tensors="all", **how)
        for how in ({**ADAMW, "learning_rate": 2e-4}, {**ADAMW, "learning_rate": 5e-5}, SGD)
        for b, n in ((1, 10), (2, 10), (4, 5), (8, 3))
    ],
    "noise": lambda: [
        one(b, n, draw=NOISY, defense=told)
        for told in (
            *({"name": "gaussian", "sigma": sigma, "relative": True} for sigma in (1e-3, 1e-2, 0.1, 0.3, 1.0, 3.0)),
            *({"name": "dp-sgd", "clip": 1.0, "noise_multiplier": z} for z in (1e-6, 1e-5, 1e-4, 1e-3)),
        )
        for b, n in ((1, 10), (8, 5))
    ],
    "noisy": lambda: [
        one(b, n, tensors="all", draw=NOISY, defense={"name": "gaussian", "sigma": sigma, "relative": True})
        for sigma in (1e-3, 1e-2, 0.1, 0.3)
        for b, n in ((1, 10), (2, 5))
    ],
    "several": lambda: [
        one(b, n, learning_rate=2e-4, draw=LATER, **ADAMW, **how)
        for b, n, how in (
            (1, 10, {"epochs": 2}),
            (2, 5, {"epochs": 2}),
            (8, 3, {"epochs": 2}),
            (1, 5, {"epochs": 2, "warmup": 0}),
            (1, 5, {"epochs": 4}),
            (8, 2, {"epochs": 4}),
            (1, 5, {"epochs": 10}),
            (8, 2, {"epochs": 10}),
            (8, 2, {"epochs": 1, "minibatch": 4}),
        )
    ],
}
ALL = ("sentences", "steps", "noisy", "fresh")
"""Groups whose attacker sees all adapters."""
COLUMNS = (
    "update", "model", "rank", "B", "batches", "tokens", "words named %", "of them right %", "blind named %",
    "certain %", "of the certain right %", "exact sentences %", "proven", "proven, wrong", "median s", "slowest s",
)  # fmt: skip


def row(done: Done) -> list[str]:
    """Return a cell's table row."""
    cell, records = done.cell, done.records
    summary = summarize(records)[0]
    tokens = [r.tokens for r in records if r.tokens is not None]
    proven = [s for r in records for s in r.sentences if s.certificate == "proven"]
    return [
        cell.title, cell.model, str(cell.facts["rank"]), str(cell.size), str(len(records)),
        f"{min(tokens, default=0)}-{max(tokens, default=0)}", mean_of(summary.words, "recall"),
        mean_of(summary.words, "precision"), mean_of(summary.baseline_words, "recall"),
        mean_of(summary.words, "certain"), mean_of(summary.words, "certain_right"),
        f"{summary.scores['exact'].mean or 0:.1f}", f"{len(proven)}/{len(records) * cell.size}",
        str(sum(not s.exact for s in proven)), f"{summary.seconds:.1f}", f"{max(r.seconds for r in records):.0f}",
    ]  # fmt: skip


def table(done: Sequence[Done]) -> list[list[str]]:
    """Return a group's rows."""
    return [row(one) for one in done if one.records]


PROGRAM = Program(
    about=__doc__,
    groups={group: lambda given, make=make: make() for group, make in GROUPS.items()},
    columns=dict.fromkeys(GROUPS, COLUMNS),
    table=table,
    words=lambda group, given: (
        "CoLA, adapters on q, k, v, o after ten steps of AdamW on other text, but for fresh ones; "
        f"{'all adapters' if group in ALL else 'q, k, v of block 0'} seen, batch size and training known, labels and "
        f"lengths not; draw {DRAWS.get(group, DRAW)}, not used in development."
    ),
    results=Path("benchmarks/results/adapters"),
)

if __name__ == "__main__":
    sys.exit(main(PROGRAM))
