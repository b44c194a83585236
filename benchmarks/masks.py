"""What learned dropout masks do to gradient matching, with the truth and the client's masks at hand.

    OMP_NUM_THREADS=1 python benchmarks/masks.py --out benchmarks/records/masks \\
        --write benchmarks/results/matching/mask-study.md

Two questions for each sentence. First: how far is the update of a text from the observed one, without masks, under
masks that are learned for this text alone, and under the client's own? Asked of the right text, of the same with two
words swapped, and of its words shuffled. Second: one continuous search of Grab (2000 steps from the best of 200
starts), with masks learned beside the words and without: what does it find, is the right text nearer than that under
its masks, and are these the client's? The second is left out with --alone, which is enough for a deep model.
Sentences that are done are kept in --out, a folder a model, and not run again.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from grid import PRACTICAL, Cell, made, markdown, options
from torch import Tensor

from gradaudit.audit.batch import sent
from gradaudit.audit.prepare import Prepared, pick_device, prepare, private_batch
from gradaudit.case import parse_case
from gradaudit.leakage.matching.compiled import compiling
from gradaudit.leakage.matching.descent import Descent, Schedule, minimize
from gradaudit.leakage.matching.distances import L2
from gradaudit.leakage.matching.masks import Masks
from gradaudit.leakage.matching.objective import Objective
from gradaudit.leakage.matching.start import first_labels, frame_of, gaussian
from gradaudit.leakage.observed import nearest_tokens
from gradaudit.machine import ready_process
from gradaudit.models.taps import DropoutSites
from gradaudit.streams import stream
from gradaudit.types import Observation

RATES, SENTENCES, DRAW = (0.1, 0.4), 16, 2026
STEPS, STARTS, ALONE = 2000, 200, 300
"""Steps of a search and starts that it takes the best of; steps in which masks are learned for one text."""
TEXTS = ("right", "two words swapped", "words shuffled")


def observed(ready: Prepared, number: int) -> tuple[Tensor, Observation, list[Tensor]]:
    """Return a sentence's token ids [1, T], what the attacker sees, and the client's masks by site."""
    masks: list[Tensor] = []

    def act(_: int, inner: Tensor, rate: float) -> Tensor:
        left = F.dropout(inner, rate, training=True)
        masks.append(((left != 0) | (inner == 0)).float())
        return left

    batch = private_batch(ready, number)
    with DropoutSites(act):
        _, seen = sent(ready, batch, number)
    return torch.tensor(batch.sequences()), seen, masks


class Matching:
    """What is measured of one observation."""

    def __init__(self, seen: Observation) -> None:
        self.seen, self.objective, self.frame = seen, Objective(seen, L2(0.01)), frame_of(seen, 16)
        self.table, self.labels = seen.model.word_vectors(), first_labels(seen, self.frame).values

    def distance(self, vectors: Tensor, masks: Masks | None) -> float:
        """Return how far the update of word vectors [1, T, d] is from the observed one."""
        with torch.no_grad():
            return float(self.objective(vectors[None], self.frame.mask, self.labels[None], masks)[0])

    def masks(self) -> Masks:
        """Return masks drawn at every site."""
        drawn = Masks(1, stream(0, "masks"))
        self.distance(self.table[self.frame.ids], drawn)
        return drawn

    def held(self, values: list[Tensor]) -> Masks:
        """Return the client's masks, where the search has sites: of the last block only the first token's."""
        drawn = self.masks()
        return drawn.holding([v[tuple(map(slice, m.shape))] for v, m in zip(values, drawn.variables(), strict=True)])

    def learned_alone(self, ids: Tensor) -> float:
        """Return how far a text is under masks learned for it, from what masks are in the mean."""
        masks = self.masks()
        masks.expect()
        still = torch.ones_like(self.frame.mask)
        schedule = Schedule(ALONE, 0.05, decay=0.985, decay_every=1)
        descent = Descent(self.table[ids][None], still, self.labels[None], None, schedule, masks)
        minimize(descent, self._loss(masks), ALONE, keep_best=False, what="masks of a text")
        return self.distance(self.table[ids], masks)

    def searched(self, right: Tensor, client: list[Tensor] | None) -> dict[str, float]:
        """Return what a search finds, with masks learned where the client's are given to compare with."""
        masks = self.masks() if client is not None else None
        norm = float(self.table.norm(dim=1).mean())
        starts = gaussian(self.frame, self.table, norm, STARTS, stream(0, "starts"))
        first = min(starts, key=lambda start: self.distance(start, masks))
        schedule = Schedule(STEPS, 0.01, decay=0.89, weight_decay=0.01)
        descent = Descent(first[None], self.frame.still, self.labels[None], None, schedule, masks)
        point = minimize(descent, self._loss(masks), STEPS, keep_best=False, what="search")
        special = sorted(self.seen.model.special.ids)
        found = nearest_tokens(point.embeddings[0], self.table, special)
        found = torch.where(self.frame.still, self.frame.ids, found)
        free = ~self.frame.still
        words, there = right[free].tolist(), found[free].tolist()
        told = {
            "found": self.distance(self.table[found], masks),
            "right": self.distance(self.table[right], masks),
            "words": 100 * len(set(words) & set(there)) / len(set(words)),
            "places": 100 * float((right == found)[free].float().mean()),
        }
        if masks is not None and client is not None:
            true = torch.cat([m.detach().flatten() for m in self.held(client).variables()])
            own = torch.cat([m.detach().flatten() for m in masks.variables()])
            told |= {"dropped": float(own[true == 0].mean()), "kept": float(own[true == 1].mean())}
        return told

    def _loss(self, masks: Masks | None) -> Any:
        return lambda vectors, labels: self.objective(vectors, self.frame.mask, labels, masks)


def measured(ready: Prepared, number: int, search: bool) -> dict[str, Any]:
    """Return all numbers of one sentence; those of a search where it is wanted."""
    right, seen, client = observed(ready, number)
    of = Matching(seen)
    rng = stream(number, "wrong texts")
    places = torch.where(~of.frame.still[0])[0]
    order = places[torch.randperm(len(places), generator=rng)]
    swapped, shuffled = right.clone(), right.clone()
    swapped[0, order[:2]] = right[0, order[:2].flip(0)]
    shuffled[0, places] = right[0, order]
    texts = dict(zip(TEXTS, (right, swapped, shuffled), strict=True))
    return {
        "tokens": right.shape[1],
        "client": {name: of.distance(of.table[ids], of.held(client)) for name, ids in texts.items()},
        "none": {name: of.distance(of.table[ids], None) for name, ids in texts.items()},
        "alone": {name: of.learned_alone(ids) for name, ids in texts.items()},
    } | ({"with": of.searched(right, client), "without": of.searched(right, None)} if search else {})


def mean(values: list[float]) -> str:
    """Return a mean for the table."""
    return f"{statistics.mean(values):.3g}"


def tables(done: Mapping[float, list[dict[str, Any]]]) -> str:
    """Return both tables, means over the sentences of each rate."""
    texts, searches = [], []
    for rate, some in done.items():
        for name in TEXTS:
            cells = [mean([one[how][name] for one in some]) for how in ("none", "alone", "client")]
            nearest = [sum(one[how]["right"] < one[how][name] for one in some) for how in ("none", "alone")]
            beaten = ["" if name == "right" else f"{n} of {len(some)}" for n in nearest]
            texts.append([f"{rate:g}", name, str(len(some)), *cells, *beaten])
        for how in ("with", "without"):
            mine = [one[how] for one in some if how in one]
            if not mine:
                continue
            cells = [mean([one[key] for one in mine]) for key in ("found", "right")]
            nearer = f"{sum(one['right'] < one['found'] for one in mine)} of {len(mine)}"
            scores = [f"{statistics.mean([one[key] for one in mine]):.0f}" for key in ("words", "places")]
            masks = [mean([one[key] for one in mine]) if how == "with" else "" for key in ("dropped", "kept")]
            searches.append([f"{rate:g}", f"{how} masks", str(len(mine)), *cells, nearer, *scores, *masks])
    told = markdown(("rate", "text", "sentences", "no masks", "masks learned for it", "the client's masks",
                     "the right one is nearer, no masks", "the same, learned"), texts)  # fmt: skip
    if not searches:
        return told
    return told + "\n\n" + markdown(
        ("rate", "search", "sentences", "distance of what it finds", "of the right text", "right one nearer",
         "words found, %", "places right, %", "mean mask where dropped", "where kept"), searches
    )  # fmt: skip


def main() -> None:
    """Measure what is missing and write the tables."""
    parser = options(__doc__)
    parser.add_argument("--write", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/masks"))
    parser.add_argument("--sentences", type=int, default=SENTENCES)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--alone", action="store_true", help="leave the searches out")
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    ready_process()
    given.out.mkdir(parents=True, exist_ok=True)
    known = {"knowledge": {"labels": True, "lengths": True}}
    done: dict[float, list[dict[str, Any]]] = {rate: [] for rate in RATES}
    with compiling(given.compile):
        for number in range(given.sentences):
            for rate in RATES:
                kept = given.out / f"{rate:g}-{number}.json"
                if not kept.exists():
                    case = Cell(
                        "cola",
                        1,
                        SENTENCES,
                        PRACTICAL | {"dropout_rate": rate},
                        seed=DRAW,
                        model=given.model,
                        more=known,
                    ).case()
                    ready = prepare(parse_case(case), Path.cwd(), pick_device("auto"))
                    kept.write_text(json.dumps(measured(ready, number, not given.alone)))
                done[rate].append(json.loads(kept.read_text()))
                print(f"dropout {rate:g}, sentence {number}: done", flush=True)
            text = (
                f"{made()} {given.model}, CoLA, draw {DRAW}, embeddings frozen, labels and lengths given.\n\n"
                f"{tables(done)}\n"
            )
            if given.write is not None:
                given.write.write_text(text, encoding="utf8")


if __name__ == "__main__":
    main()
