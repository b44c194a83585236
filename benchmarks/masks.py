"""What learned dropout masks do to gradient matching, with the truth and the client's masks at hand.

    OMP_NUM_THREADS=1 python benchmarks/masks.py --out benchmarks/records/masks \\
        --write benchmarks/results/matching/mask-study.md

Three questions for each sentence. First (`texts`): how far is the update of a text from the observed one, without
masks, under masks that are learned for this text alone, and under the client's own? Asked of the right text, of the
same with two words swapped, and of its words shuffled. Second (`search`): one continuous search of Grab (2000 steps
from the best of 200 starts), with masks learned beside the words and without: what does it find, is the right text
nearer than that under its masks, and are these the client's? Third (`changes`): how many of 36 changes of the right
text (two words swapped, a word or a part moved) come nearer than it, by cosine, without masks and under masks learned
for each? A search that exchanges words cannot stop at the right text while there are any. --parts names what to run;
the first and the third are enough for a deep model. What is done is kept in --out, a folder a model, and not run again.
"""

from __future__ import annotations

import json
import random
import statistics
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from grid import PRACTICAL, Cell, made, markdown, options
from matching import interval
from torch import Tensor

from gradaudit.audit.batch import sent
from gradaudit.audit.prepare import Prepared, pick_device, prepare, private_batch
from gradaudit.case import parse_case
from gradaudit.leakage.matching.compiled import compiling
from gradaudit.leakage.matching.descent import Descent, Schedule, minimize
from gradaudit.leakage.matching.distances import L2, Cosine
from gradaudit.leakage.matching.masks import Masks
from gradaudit.leakage.matching.objective import Objective
from gradaudit.leakage.matching.start import first_labels, frame_of, gaussian
from gradaudit.leakage.observed import nearest_tokens
from gradaudit.machine import ready_process
from gradaudit.models.taps import Dropout, DropoutSites
from gradaudit.streams import stream
from gradaudit.types import Observation

RATES, SENTENCES, DRAW = (0.1, 0.4), 16, 2026
STEPS, STARTS, ALONE = 2000, 200, 300
"""Steps of a search and starts that it takes the best of; steps in which masks are learned for one text."""
TEXTS = ("right", "two words swapped", "words shuffled")
CHANGES, CHANGED = 36, 60
"""Changes of the right text that are tried; steps in which masks are learned for each, by cosine."""


class EachItsOwn(Masks):
    """Masks of each candidate's own, from what a mask is in the mean."""

    def at(self, candidates: int) -> Dropout:
        def act(site: int, inner: Tensor, rate: float) -> Tensor:
            parts = inner.view(candidates, -1, *inner.shape[1:])
            if site not in self._sites:
                self._sites[site] = torch.full_like(parts, 1 - rate).requires_grad_()
            return (parts * (self._sites[site] / (1 - rate))).view_as(inner)

        return act


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

    def each_alone(self, texts: Tensor) -> tuple[Tensor, Tensor]:
        """Return cosine distances of texts [N, 1, T], without masks and under masks learned for each."""
        objective, vectors = Objective(self.seen, Cosine()), self.table[texts]
        labels = self.labels[None].expand(len(texts), *self.labels.shape)
        masks = EachItsOwn(1, stream(0, "none are drawn"))
        with torch.no_grad():
            none = objective(vectors, self.frame.mask, labels, None)
            objective(vectors, self.frame.mask, labels, masks)  # sites are met in a first pass
        still, schedule = torch.ones_like(self.frame.mask), Schedule(CHANGED, 0.05, decay=0.985, decay_every=1)
        descent = Descent(vectors, still, labels, None, schedule, masks)

        def loss(guess: Tensor, classes: Tensor) -> Tensor:
            return objective(guess, self.frame.mask, classes, masks)

        return none, minimize(descent, loss, CHANGED, keep_best=False, what="masks of each text").loss

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


def changed(order: list[int], rng: random.Random) -> list[list[int]]:
    """Return orders that one change makes of another: two places swapped, one moved, or a part moved, all unlike.

    Args:
        order: places of words that differ.
        rng: draws them.
    """
    size, made = len(order), {tuple(order): None}
    for _ in range(100 * CHANGES):  # a short text has fewer
        if len(made) > CHANGES:
            break
        other, first = list(order), rng.randrange(size)
        kind, second = rng.randrange(3), rng.randrange(size)
        if kind == 0:
            other[first], other[second] = other[second], other[first]
        else:
            end = first + 1 if kind == 1 else rng.randrange(first + 1, size + 1)
            part, rest = other[first:end], other[:first] + other[end:]
            at = rng.randrange(len(rest) + 1)
            other = rest[:at] + part + rest[at:]
        made[tuple(other)] = None
    return [list(one) for one in made][1:]


def measured_changes(ready: Prepared, number: int) -> dict[str, float]:
    """Return what share of changes comes nearer than the right text, in percent."""
    right, seen, _ = observed(ready, number)
    of = Matching(seen)
    places = torch.where(~of.frame.still[0])[0]
    texts = {tuple(right[0].tolist()): right}
    for order in changed(list(range(len(places))), random.Random(number)):
        text = right.clone()
        text[0, places] = right[0, places[order]]
        texts[tuple(text[0].tolist())] = text  # a word that is said twice makes equal texts
    found = [of.each_alone(torch.stack(list(texts.values())[at : at + 12])) for at in range(0, len(texts), 12)]
    none, learned = (torch.cat([one[way] for one in found]) for way in (0, 1))
    return {
        "changes": len(texts) - 1,
        "none": 100 * float((none[1:] < none[0]).float().mean()),
        "learned": 100 * float((learned[1:] < learned[0]).float().mean()),
    }


def measured_texts(ready: Prepared, number: int) -> dict[str, Any]:
    """Return the distances of the three texts."""
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
    }


def measured_search(ready: Prepared, number: int) -> dict[str, Any]:
    """Return what a search finds with masks and without."""
    right, seen, client = observed(ready, number)
    of = Matching(seen)
    return {"with": of.searched(right, client), "without": of.searched(right, None)}


PARTS = {"texts": measured_texts, "changes": measured_changes, "search": measured_search}


def mean(values: list[float]) -> str:
    """Return a mean for the table."""
    return f"{statistics.mean(values):.3g}"


Records = Mapping[tuple[str, float], list[dict[str, Any]]]
"""What was measured, by part and rate, a sentence each."""


def of_texts(done: Records) -> str:
    """Return the table of the three texts, means over the sentences of each rate."""
    rows = []
    for rate, some in ((rate, done["texts", rate]) for rate in RATES if done["texts", rate]):
        for name in TEXTS:
            cells = [mean([one[how][name] for one in some]) for how in ("none", "alone", "client")]
            nearest = [sum(one[how]["right"] < one[how][name] for one in some) for how in ("none", "alone")]
            beaten = ["" if name == "right" else f"{n} of {len(some)}" for n in nearest]
            rows.append([f"{rate:g}", name, str(len(some)), *cells, *beaten])
    return markdown(("rate", "text", "sentences", "no masks", "masks learned for it", "the client's masks",
                     "the right one is nearer, no masks", "the same, learned"), rows)  # fmt: skip


def of_changes(done: Records) -> str:
    """Return the table of changes, with the difference that masks make, paired by sentence."""
    rows = []
    for rate, some in ((rate, done["changes", rate]) for rate in RATES if done["changes", rate]):
        shares = [f"{statistics.mean([one[how] for one in some]):.1f}" for how in ("none", "learned")]
        fewer = interval([one["none"] - one["learned"] for one in some])
        best = [f"{sum(one[how] == 0 for one in some)} of {len(some)}" for how in ("none", "learned")]
        count = str(int(sum(one["changes"] for one in some)))
        rows.append([f"{rate:g}", str(len(some)), count, *shares, fewer, *best])
    return markdown(
        ("rate", "sentences", "changes", "nearer than the right text, %, no masks", "masks learned for each",
         "fewer by masks, paired, 95%", "no change is nearer, no masks", "the same, learned"), rows
    )  # fmt: skip


def of_searches(done: Records) -> str:
    """Return the table of searches."""
    rows = []
    for rate, some in ((rate, done["search", rate]) for rate in RATES if done["search", rate]):
        for how in ("with", "without"):
            mine = [one[how] for one in some]
            cells = [mean([one[key] for one in mine]) for key in ("found", "right")]
            nearer = f"{sum(one['right'] < one['found'] for one in mine)} of {len(mine)}"
            scores = [f"{statistics.mean([one[key] for one in mine]):.0f}" for key in ("words", "places")]
            masks = [mean([one[key] for one in mine]) if how == "with" else "" for key in ("dropped", "kept")]
            rows.append([f"{rate:g}", f"{how} masks", str(len(mine)), *cells, nearer, *scores, *masks])
    return markdown(
        ("rate", "search", "sentences", "distance of what it finds", "of the right text", "right one nearer",
         "words found, %", "places right, %", "mean mask where dropped", "where kept"), rows
    )  # fmt: skip


def main() -> None:
    """Measure what is missing and write the tables."""
    parser = options(__doc__)
    parser.add_argument("--write", type=Path, default=None)
    parser.add_argument("--out", type=Path, default=Path("out/benchmarks/masks"))
    parser.add_argument("--sentences", type=int, default=SENTENCES)
    parser.add_argument("--model", default="minilm")
    parser.add_argument("--parts", default=",".join(PARTS))
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    ready_process()
    given.out.mkdir(parents=True, exist_ok=True)
    wanted = given.parts.split(",")
    with compiling(given.compile):
        for part, number, rate in product(wanted, range(given.sentences), RATES):
            kept = given.out / f"{part}-{rate:g}-{number}.json"
            if not kept.exists():
                kept.write_text(json.dumps(PARTS[part](prepared(given.model, rate), number)))
            print(f"{part}, dropout {rate:g}, sentence {number}: done", flush=True)
            if given.write is not None and rate == RATES[-1]:
                given.write.write_text(f"{made()} {given.model}, CoLA, draw {DRAW}, embeddings frozen, labels and "
                                       f"lengths given.\n\n{tables(given.out, given.sentences)}\n")  # fmt: skip


def prepared(model: str, rate: float) -> Prepared:
    """Return the client and model of a rate."""
    known = {"knowledge": {"labels": True, "lengths": True}}
    client = PRACTICAL | {"dropout_rate": rate}
    case = Cell("cola", 1, SENTENCES, client, seed=DRAW, model=model, more=known).case()
    return prepare(parse_case(case), Path.cwd(), pick_device("auto"))


def tables(out: Path, sentences: int) -> str:
    """Return the tables of all parts that were measured, of sentences that both rates have."""
    done: dict[tuple[str, float], list[dict[str, Any]]] = {}
    for part in PARTS:
        names = [[out / f"{part}-{rate:g}-{number}.json" for rate in RATES] for number in range(sentences)]
        whole = [some for some in names if all(one.exists() for one in some)]
        for at, rate in enumerate(RATES):
            done[part, rate] = [json.loads(some[at].read_text()) for some in whole]
    shown = (("texts", of_texts), ("changes", of_changes), ("search", of_searches))
    return "\n\n".join(table(done) for part, table in shown if done[part, RATES[0]])


if __name__ == "__main__":
    main()
