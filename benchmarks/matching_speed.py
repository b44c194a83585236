"""How fast the matching family is: candidates of the beam search, and steps; medians of one run.

    OMP_NUM_THREADS=1 python benchmarks/matching_speed.py

Candidates: slots tried with every token of the batch, as Grab's discrete stage does, with its beam of four guesses, (a)
each candidate's whole-batch gradient by itself, (b) many together, (c) only the changed sentence anew, (d) ranked on a
share of each matrix first, the best of these in full. (a) and (b) take three slots of the first sentence and one guess,
a candidate costing the same in all; (c) and (d) a whole pass over all sentences. Writes its sections of
benchmarks/results/matching-speed.md. Run it alone on the machine.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from grid import PRACTICAL, Cell, made, options

from gradaudit.audit.batch import sent
from gradaudit.audit.prepare import pick_device, prepare, private_batch
from gradaudit.case import parse_case
from gradaudit.leakage.matching.beams import BeamSearch
from gradaudit.leakage.matching.candidates import Candidates, permutations, reordered
from gradaudit.leakage.matching.compiled import compiling
from gradaudit.leakage.matching.distances import L2, Cosine, Distance, SquaredL2
from gradaudit.leakage.matching.layout import Layout
from gradaudit.leakage.matching.masks import Masks
from gradaudit.leakage.matching.objective import Objective
from gradaudit.machine import ready_process
from gradaudit.models.transformers import TransformersModel
from gradaudit.types import Batch, Observation

TIMES = 3
WIDTH = 4
"""Guesses kept, as published."""
WAYS = {
    "(a) whole batch, one by one": {"screen": 1, "together": 1, "anew": False},
    "(b) whole batch, together": {"screen": 1, "together": 0, "anew": False},
    "(c) changed sentence anew, together": {"screen": 1, "together": 0, "anew": True},
    "(d) the same, ranked on a share first": {"screen": 8, "together": 0, "anew": True},
}


def median_seconds(act: Callable[[], object], times: int) -> float:
    """Return the median time of a call, after one that is not counted."""
    act()
    took = []
    for _ in range(times):
        began = now()
        act()
        took.append(now() - began)
    return statistics.median(took)


def now() -> float:
    """Return the time once all work handed to a GPU is done."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def step_of(
    measured: Objective, vectors: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor, masks: Masks | None
) -> None:
    """Compute what one step of the continuous search needs."""
    value = measured(vectors, mask, labels, masks).sum()
    wanted = [vectors, *(masks.variables() if masks is not None else [])]
    torch.autograd.grad(value, wanted, allow_unused=True)


@dataclass(frozen=True)
class Scene:
    """One batch as its attacker sees it, and the truth that guesses are made of."""

    model: TransformersModel
    batch: Batch
    seen: Observation

    @property
    def size(self) -> int:
        """Return the number of sentences."""
        return len(self.batch.ids)


def candidates(scene: Scene) -> list[str]:
    """Return rows of the candidates' table."""
    ids, mask, table, size = scene.batch.ids, scene.batch.mask, scene.model.word_vectors(), scene.size
    assert scene.batch.labels is not None
    special = torch.tensor(sorted(scene.model.special.ids), device=ids.device)
    frame = Layout(ids, mask, torch.isin(ids, special) & mask)
    objective, masks = Objective(scene.seen, L2()), Masks(size, torch.Generator().manual_seed(0))
    pool = sorted(set(ids[mask].tolist()) - scene.model.special.ids)
    rng, free = torch.Generator().manual_seed(0), mask & ~frame.fixed
    wrong = ids.clone()
    wrong[free] = torch.tensor(pool)[torch.randint(len(pool), (int(free.sum()),), generator=rng)].to(ids)
    starts = [wrong, *reordered(wrong, permutations(~free, WIDTH - 1, rng))]
    open_slots = torch.zeros_like(free)
    open_slots[0, torch.where(free[0])[0][:3]] = True
    few = Layout(ids, mask, ~open_slots)
    lines: list[str] = []
    first, reference = 0.0, 0.0
    for way, how in WAYS.items():
        took, ends = [], []
        for _ in range(1 if way.startswith("(c)") else TIMES):
            slots = frame if how["anew"] else few
            of = Candidates(objective, slots, scene.batch.labels, (masks,), int(how["screen"]), int(how["together"]))
            search = BeamSearch(of, table, scene.model.special, anew=bool(how["anew"]))
            began = now()
            if how["anew"]:
                ends.append(search.run(starts, [pool] * size, 1, WIDTH).loss)
            else:
                ends.append(search.run([wrong], [pool] * size, 1, 1).loss)
            took.append((now() - began) / of.evaluations)
        each = statistics.median(took)
        first = first or each
        # the ways of a group differ by rounding, and by what a ranking misses
        reference = reference if way[1] in "bd" else ends[0]
        lines.append(
            f"| {size} | {way} | {of.evaluations} | {1e3 * each:.1f} | {first / each:.1f} "
            f"| {100 * (ends[0] / reference - 1):+.2f}% |"
        )
        print(lines[-1], flush=True)
    return lines


def steps(scene: Scene) -> list[str]:
    """Return rows of the steps' table."""
    masks, lines = Masks(scene.size, torch.Generator().manual_seed(0)), []
    distances: list[tuple[str, Distance, Masks | None]] = [
        ("grab, masks learned", L2(), masks), ("lamp cos", Cosine(), None), ("tag", SquaredL2(0.01), None)
    ]  # fmt: skip
    assert scene.batch.labels is not None
    for name, distance, some in distances:
        measured = Objective(scene.seen, distance)
        vectors = scene.model.word_vectors()[scene.batch.ids][None].clone().requires_grad_()
        act = partial(step_of, measured, vectors, scene.batch.mask, scene.batch.labels[None], some)
        took_step = median_seconds(act, 9)
        with compiling():
            took_compiled = median_seconds(act, 9)
        lines.append(
            f"| {scene.size} | {int(scene.batch.mask.sum())} | {name} | {'yes' if some is not None else 'no'} "
            f"| {1e3 * took_step:.0f} | {1e3 * took_compiled:.0f} | {measured.compiled} |"
        )
        print(lines[-1], flush=True)
    return lines


PARTS: dict[str, tuple[Callable[[Scene], list[str]], str]] = {
    "candidates": (
        candidates,
        "| B | way | candidates | ms each, median of 3; c once | times (a) | distance found, against the line before |",
    ),
    "steps": (steps, "| B | tokens | distance | masks | ms a step | compiled | was it |"),
}


def main() -> None:
    """Measure what was asked for, and write its sections of the file; the others stay."""
    parser = options(__doc__)
    parser.add_argument("--part", choices=list(PARTS), help="one alone; both unless named")
    given = parser.parse_args()
    asked = [given.part] if given.part else list(PARTS)
    ready_process()  # as the program does
    device, model = pick_device("auto"), None
    rows: dict[str, list[str]] = {part: [] for part in asked}
    for size in (1, 8):
        ready = prepare(parse_case(Cell("cola", size, 1, PRACTICAL).case()), Path.cwd(), device, model)
        model = ready.model
        assert isinstance(model, TransformersModel)
        batch = private_batch(ready, 0)
        assert batch.labels is not None
        here = replace(batch, ids=batch.ids.to(device), mask=batch.mask.to(device), labels=batch.labels.to(device))
        scene = Scene(model, here, sent(ready, batch, 0)[1])
        for part in asked:
            rows[part] += PARTS[part][0](scene)
    path = Path("benchmarks/results/matching-speed.md")
    before = path.read_text(encoding="utf8") if path.exists() else ""
    found = dict(re.findall(r"^## (\w+)\n(.*?)(?=^## |\Z)", before, flags=re.MULTILINE | re.DOTALL))
    for part in asked:
        header = PARTS[part][1]
        found[part] = (
            f"\n{made(device)} MiniLM, "
            "CoLA, practical setting. The released code takes 110 ms an evaluation and 250 to 360 ms a step at B = 1, "
            "one thread ([peers](../../docs/peers.md)).\n\n"
            + "\n".join([header, "|---" * (header.count("|") - 1) + "|", *rows[part]])
            + "\n\n"
        )
    text = "".join(f"## {part}\n{found[part]}" for part in PARTS if part in found)
    path.write_text(text.rstrip() + "\n", encoding="utf8")


if __name__ == "__main__":
    main()
