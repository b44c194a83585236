"""LAMP: cosine matching with discrete edits between the steps, and a language model's opinion where one is at hand."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gradaudit.attacks.base import Attack
from gradaudit.defense_traits import Trait
from gradaudit.errors import BadInputError
from gradaudit.leakage import options
from gradaudit.leakage.matching.candidates import Candidates, permutations, reordered
from gradaudit.leakage.matching.counters import TEXT_COUNTERED, countered
from gradaudit.leakage.matching.descent import Descent, Point, Schedule, better
from gradaudit.leakage.matching.distances import Cosine, Distance, SquaredL2
from gradaudit.leakage.matching.replay import objective_of
from gradaudit.leakage.matching.start import first_labels, frame_of, gaussian
from gradaudit.leakage.observed import CANDIDATE, STEP, nearest_tokens
from gradaudit.models.base import Model, TextModel
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import RANDOM, load_model
from gradaudit.progress import answering, step
from gradaudit.registry import hyper, register
from gradaudit.types import Observation, Reconstruction

_TOGETHER = 32
"""Texts that a language model reads at once: 16 tokens each over 50,000 words are 0.1 GB of logits."""
_DISTANCES = {"cos": (1.0, 0.2), "l2+l1": (25.0, 60.0)}
"""Weights of the regularizer and of the language model, by distance (LAMP, section 5)."""


@register
@dataclass(frozen=True)
class Lamp(Attack):
    """Match the update by cosine (or L2 + L1) and try edits of the word order between the steps.

    The language model that judges edits in the paper (a GPT-2 of theirs) is not to be had: `prior` takes any causal
    model, which reads the guess as text, and by default there is none. Differences of ours: edits are ranked on a share
    of each matrix first (`screen`), and tensors that are zero but for rounding do not count (`silent`).

    Raises:
        BadInputError: a setting that makes no sense.
    """

    name: ClassVar[str] = "lamp"
    source: ClassVar[str] = "LAMP (Balunovic et al., NeurIPS 2022), sections 4 and 5, appendix A"
    needs: ClassVar[tuple[str, ...]] = ("batch_size",)
    handles: ClassVar[frozenset[Trait]] = TEXT_COUNTERED | {"zero mean"}
    countered: ClassVar[frozenset[Trait]] = TEXT_COUNTERED
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    distance: str = hyper("cos", "'cos' or 'l2+l1'", source="section 5")
    starts: int = hyper(500, "Gaussian starts, of which the best is taken", source="appendix A")
    permutations: int = hyper(500, "orders of it tried", source="appendix A")
    steps: int = hyper(2000, "Adam steps", source="section 5; 5000 for large models")
    learning_rate: float = hyper(0.01, "Adam's learning rate", source="section 5")
    decay: float = hyper(0.89, "factor on the learning rate every 50 steps", source="section 5")
    edits: int = hyper(200, "edits tried a sentence each time", source="section 5")
    every: int = hyper(75, "steps between edits; 200 for large models", source="section 5")
    large: bool = hyper(False, "AdamW, linear decay over twice the steps and clipping at 0.5", source="appendix A")
    norm: float = hyper(
        1.4,
        "norm of a start's word vectors, and of the mean that the regularizer asks for; 0 takes the word table's mean",
        source="appendix A, for BERT-base",
        later=True,
    )
    silent: float = hyper(
        1e-6,
        "with cos, a tensor smaller than this share of the largest of its size counts as zero: key biases, whose "
        "gradient is rounding; 0 counts them, as the published code does",
        source="ours",
    )
    prior: str = hyper("", "causal language model that judges edits; empty for none", source="section 4.2")
    prior_weight: float = hyper(-1.0, "its weight; below 0 takes the paper's (0.2 for cos, 60 for l2+l1)")
    counter: bool = options.counter()
    replayed_steps: int = options.replayed_steps()
    screen: int = hyper(8, "rank candidates on every so many-th row of a matrix first; 1 for none", source="ours")
    candidates: int = hyper(0, "candidates computed together; 0 takes what fits", source="ours")
    assumed_length: int = hyper(16, "sentence length when nothing tells it", unit="tokens", source="ours")

    def __post_init__(self) -> None:
        if self.distance not in _DISTANCES:
            raise BadInputError(f"attack 'lamp': distance must be 'cos' or 'l2+l1', got '{self.distance}'")
        if self.prior.startswith(RANDOM):
            raise BadInputError(
                f"attack 'lamp': prior '{self.prior}' has random weights and knows no language; name a trained causal "
                "model, such as 'smollm2'"
            )
        self._at_least(1, "starts", "every", "screen", "assumed_length")
        self._at_least(0, "steps", "permutations", "edits", "candidates", "replayed_steps")
        self._at_least(0, "norm", "silent")

    def load(self, device: torch.device) -> None:
        if self.prior:
            _prior(self.prior, device)

    def handled(self, model: Model | None) -> frozenset[Trait]:
        found = super().handled(model)
        # 1 - cosine does not see by what the whole was scaled
        return found | {"scaled", "one example clipped"} if self.distance == "cos" else found

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        measured: Distance = Cosine(self.silent) if self.distance == "cos" else SquaredL2(0.01)
        if self.counter:
            measured = countered(measured, seen, self.name)
        objective = objective_of(seen, measured, self.replayed_steps)
        frame = frame_of(seen, self.assumed_length)
        labels = first_labels(seen, frame)
        table, still = seen.model.word_vectors(), frame.still
        screen = self.screen if objective.additive else 1  # replayed steps cannot be estimated
        of = Candidates(objective, frame, labels.values, (None,), screen, self.candidates)
        norm = self.norm or float(table.norm(dim=1).mean())
        prior = _prior(self.prior, table.device) if self.prior else None
        start = self._start(of, table, norm, rng)
        learned = "softmax" if labels.learned else None
        first = torch.randn(labels.values.shape, generator=rng).to(table) if labels.learned else labels.values
        schedule = Schedule(
            self.steps,
            self.learning_rate,
            decay=1.0 if self.large else self.decay,
            linear_to=2 * self.steps if self.large else 0,
            weight_decay=0.01 if self.large else 0.0,
            clip=0.5 if self.large else 0.0,
        )
        descent = Descent(start, still, first[None], learned, schedule)
        weight = _DISTANCES[self.distance][0]

        def loss(vectors: Tensor, targets: Tensor) -> Tensor:
            away = vectors.norm(dim=-1).mean((-1, -2)) - norm
            total: Tensor = objective(vectors, frame.mask, targets) + weight * away.square()
            return total

        def told(best: Point, steps: int) -> Reconstruction:
            ids = nearest_tokens(best.embeddings[0], table, sorted(seen.model.special.ids))
            ids = torch.where(still, frame.ids, ids)
            evaluations = 3 * (steps + 1) + of.evaluations
            return objective.told(frame.sequences(ids), best.labels[0], labels.how, float(best.loss[0]), evaluations)

        best: Point | None = None
        done = 0
        with answering(lambda _: best and told(best, done)):
            for done in range(self.steps):
                best = better(best, descent.step(loss))
                step("lamp: matching", done + 1, self.steps)
                if self.edits and done >= self.steps // 10 and (done + 1) % self.every == 0:
                    of.labels = descent.labels[0].detach()
                    descent.put(self._edited(of, descent.vectors[0], prior, rng)[None])
        with torch.no_grad():
            end = loss(descent.vectors, descent.labels)
        return told(better(best, Point(descent.vectors, descent.labels.detach(), end, 1)), self.steps)

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        edits = self.edits * batch_size * (self.steps // self.every)
        return int(STEP * self.steps + CANDIDATE * (edits + self.starts + self.permutations))

    def _start(self, of: Candidates, table: Tensor, norm: float, rng: torch.Generator) -> Tensor:
        drawn = gaussian(of.frame, table, norm, self.starts, rng)
        chosen = drawn[int(of.best(drawn, 1)[0][0])]
        if self.permutations:
            some = torch.cat([chosen[None], reordered(chosen, permutations(of.frame.still, self.permutations, rng))])
            chosen = some[int(of.best(some, 1)[0][0])]
        return chosen[None]

    def _edited(self, of: Candidates, vectors: Tensor, prior: TextModel | None, rng: torch.Generator) -> Tensor:
        """Return the word vectors after the best edit of each sentence, if one is better than none."""
        model, still = of.objective.model, of.frame.still
        for row in range(len(vectors)):
            free = torch.where(~still[row])[0].tolist()
            if len(free) < 2:
                continue
            orders = torch.arange(vectors.shape[1]).expand(self.edits + 1, *vectors.shape[:2]).clone()
            for n in range(1, self.edits + 1):
                orders[n, row, free] = torch.tensor(edit(free, rng))
            some = reordered(vectors, orders.to(vectors.device))
            if prior is None:
                kept, values = of.best(some, 1)
                unchanged = of.measure(some[:1])[0]
                vectors = some[int(kept[0])] if float(values[0]) < float(unchanged) else vectors
                continue
            weight = self.prior_weight if self.prior_weight >= 0 else _DISTANCES[self.distance][1]
            ids = nearest_tokens(some[:, row], model.word_vectors(), sorted(model.special.ids))
            ids = torch.where(still[row], of.frame.ids[row], ids)  # special tokens are no words of the text
            texts = [model.decode(one[of.frame.mask[row]].tolist()) for one in ids]
            scores = of.measure(some) + weight * surprises(prior, texts).to(some)
            vectors = some[int(scores.argmin())]
        return vectors


def edit(free: list[int], rng: torch.Generator) -> list[int]:
    """Return the slots in another order: two exchanged, one moved, a stretch moved, or the end put first.

    Args:
        free: slots in their order; at least two.
        rng: draws kind and places.

    Source: LAMP, section 4.3.
    """

    def draw(below: int) -> int:
        return int(torch.randint(below, (1,), generator=rng))

    slots, kind = list(free), draw(4)
    if kind == 0:
        a, b = draw(len(slots)), draw(len(slots))
        slots[a], slots[b] = slots[b], slots[a]
    elif kind == 1:
        slots.insert(draw(len(slots)), slots.pop(draw(len(slots))))
    elif kind == 2:
        a, b = sorted((draw(len(slots)), draw(len(slots))))
        part, rest = slots[a : b + 1], slots[:a] + slots[b + 1 :]
        at = draw(len(rest) + 1)
        slots = rest[:at] + part + rest[at:]
    else:
        at = draw(len(slots))
        slots = slots[at:] + slots[:at]
    return slots


@torch.no_grad()
@lru_cache(maxsize=1)  # every batch asks for it
def _prior(name: str, device: torch.device) -> TextModel:
    return load_model(ModelSpec(name, "causal-lm"), device)


def surprises(prior: TextModel, texts: Sequence[str]) -> Tensor:
    """Return a language model's mean negative log-likelihood of the tokens of each text, [n]; 0 for one token or none.

    Args:
        prior: a causal language model.
        texts: any; equal ones are read once.
    """
    rows = {text: torch.tensor(prior.encode(text)[0], dtype=torch.long) for text in texts}
    read = [(text, ids) for text, ids in rows.items() if len(ids)]
    known: dict[str, Tensor] = {}
    for begin in range(0, len(read), _TOGETHER):
        some = read[begin : begin + _TOGETHER]
        ids = pad_sequence([row for _, row in some], batch_first=True)
        mask = pad_sequence([torch.ones_like(row) for _, row in some], batch_first=True)
        ids, mask = ids.to(prior.device), mask.to(prior.device)
        losses = prior.sentence_losses(prior.logits(ids=ids, mask=mask), mask, ids)
        known |= zip((text for text, _ in some), losses, strict=True)
    return torch.stack([known.get(text, torch.zeros(()).to(prior.device)) for text in texts])
