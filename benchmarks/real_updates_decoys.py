"""Certificates against changed updates: how many sentences that were not in the batch are proven.

    OMP_NUM_THREADS=1 python benchmarks/real_updates_decoys.py --count 500

Each decoy is an AdamW step of one sentence of CoLA, dropout on, changed or told wrong in one of seven ways. What
is done is kept in out/benchmarks/real-decoys.jsonl (no text), and a run that was stopped goes on there; two runs with
`--part 0/2` and `--part 1/2` share the work. A sentence of either batch is counted apart where two were mixed: proofs
assume an honest client.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from grid import PRACTICAL, Cell, made, markdown, options, write_table
from torch import Tensor

from gradaudit.audit.batch import sent
from gradaudit.audit.prepare import Prepared, pick_device, prepare, private_batch
from gradaudit.case import parse_case
from gradaudit.errors import AuditError
from gradaudit.leakage.uneven.entries import grid
from gradaudit.machine import ready_process
from gradaudit.streams import stream
from gradaudit.types import Observation

STEP = {"optimizer": "adamw", "learning_rate": 5e-5, "weight_decay": 0.01}
DRAW = 3033
PLACE = Path("out/benchmarks/real-decoys.jsonl")
FORGED, EVERY = "values of another batch", 20
"""One update in so many is made of two batches: it takes minutes, since the rows of both are there."""
Change = Callable[[Observation, Observation, torch.Generator], Observation]


def entrywise(change: Callable[[Tensor, Tensor, torch.Generator], Tensor]) -> Change:
    """Return the change of every tensor, of its change and the weights before."""

    def changed(seen: Observation, other: Observation, rng: torch.Generator) -> Observation:
        before = {name: view(seen.model.parameters()[view.parameter]).detach() for name, view in seen.views.items()}
        return replace(seen, tensors={name: change(t, before[name], rng) for name, t in seen.tensors.items()})

    return changed


def told(**wrong: Any) -> Change:
    """Return an observation whose attacker is told another training."""

    def changed(seen: Observation, other: Observation, rng: torch.Generator) -> Observation:
        assert seen.knowledge.training is not None
        training = replace(seen.knowledge.training, **wrong)
        return replace(seen, knowledge=replace(seen.knowledge, training=training))

    return changed


def mixed(seen: Observation, other: Observation, rng: torch.Generator) -> Observation:
    """Return an update whose values are another batch's."""
    return replace(seen, tensors={n: other.tensors[n] if n.endswith("v") else t for n, t in seen.tensors.items()})


def flipped(change: Tensor, before: Tensor, rng: torch.Generator) -> Tensor:
    """Return a change with the signs of one entry in a thousand turned."""
    return torch.where(torch.rand(change.shape, generator=rng) < 1e-3, -change, change)


def jittered(change: Tensor, before: Tensor, rng: torch.Generator) -> Tensor:
    """Return a change with three grid steps of noise."""
    return change + 3 * grid(before).to(change) * torch.randn(change.shape, generator=rng)


KINDS: dict[str, Change] = {
    "rate told a fifth too large": told(learning_rate=6e-5),
    "eps told ten times too large": told(eps=1e-7),
    "decay not told": told(weight_decay=0.0),
    FORGED: mixed,
    "one sign in a thousand turned": entrywise(flipped),
    "three grid steps of noise": entrywise(jittered),
    "weights rounded to bf16": entrywise(lambda change, before, rng: (before + change).bfloat16().float() - before),
}


def kind_of(number: int) -> str:
    """Return how a decoy is changed."""
    others = [kind for kind in KINDS if kind != FORGED]
    return FORGED if number % EVERY == EVERY - 1 else others[number % len(others)]


def tried(ready: Prepared, number: int, kind: str) -> dict[str, Any]:
    """Return what came of one decoy."""
    batches = [private_batch(ready, n % len(ready.batches)) for n in (number, number + 1)]
    seen, other = (sent(ready, batch, n)[1] for n, batch in enumerate(batches, number))
    rng = stream(0, "decoy", number)
    try:
        found = ready.attack(KINDS[kind](seen, other, rng), rng)
    except AuditError as error:
        return {"kind": kind, "number": number, "error": str(error)}
    own, others = ({tuple(s) for s in batch.sequences()} for batch in batches)
    proven = [s for s, c in zip(found.sequences, found.certificates or (), strict=False) if c == "proven"]
    return {
        "kind": kind,
        "number": number,
        "proven": len(proven),
        "wrong": sum(s not in own for s in proven),
        "of neither": sum(s not in own | others for s in proven),
    }


def main() -> None:
    """Run what is missing and write the counts."""
    parser = options(__doc__)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--part", default="0/1", help="K/N: every Nth decoy from the Kth on")
    parser.add_argument("--write", type=Path, default=Path("benchmarks/results/real-updates/decoys.md"))
    given = parser.parse_args()
    ready_process()
    cell = Cell("cola", 1, given.count + 1, PRACTICAL | STEP, tensors="0:q,k,v", seed=DRAW)
    ready = prepare(parse_case(cell.case()), Path.cwd(), pick_device("cpu"))
    PLACE.parent.mkdir(parents=True, exist_ok=True)
    first, parts = map(int, given.part.split("/"))

    def done() -> list[dict[str, Any]]:
        return [json.loads(line) for line in PLACE.read_text().splitlines()] if PLACE.exists() else []

    known = {one["number"] for one in done()}
    for number in [n for n in range(first, given.count, parts) if n not in known]:
        one = json.dumps(tried(ready, number, kind_of(number)))
        with PLACE.open("a") as lines:
            lines.write(one + "\n")
        rows = []
        for kind in KINDS:
            of = [one for one in done() if one["kind"] == kind]
            total = Counter({name: sum(one.get(name, 0) for one in of) for name in ("proven", "wrong", "of neither")})
            rows.append([kind, str(len(of)), *(str(total[n]) for n in ("proven", "wrong", "of neither"))])
        columns = ("changed", "updates", "proven", "not in the batch", "in neither batch")
        head = f"{made()} MiniLM, CoLA, one sentence an update, AdamW at 5e-5, dropout 0.1 on, draw {DRAW}."
        write_table(given.write, head, markdown(columns, rows))


if __name__ == "__main__":
    main()
