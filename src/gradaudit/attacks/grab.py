"""Grab: continuous matching with learned dropout masks, and beam search over tokens, in rounds."""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from gradaudit.attacks.base import Attack
from gradaudit.defense_traits import Trait, all_traits
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.leakage import options
from gradaudit.leakage.matching.beams import Beam, BeamSearch, ended
from gradaudit.leakage.matching.candidates import Candidates, permutations, reordered
from gradaudit.leakage.matching.counters import TEXT_COUNTERED, countered
from gradaudit.leakage.matching.descent import Descent, Schedule, minimize
from gradaudit.leakage.matching.distances import L2, Distance
from gradaudit.leakage.matching.layout import Layout
from gradaudit.leakage.matching.masks import Masks
from gradaudit.leakage.matching.refit import Refit
from gradaudit.leakage.matching.replay import objective_of
from gradaudit.leakage.matching.start import first_labels, frame_of, gaussian
from gradaudit.leakage.observed import CANDIDATE, STEP, nearest_tokens
from gradaudit.leakage.rowspace.ranking import rank_words
from gradaudit.leakage.rowspace.subspace import stack
from gradaudit.progress import answering
from gradaudit.registry import hyper, register
from gradaudit.types import Observation, Reconstruction
from gradaudit.workspace import keep, kept

_POOLS = ("recovered", "spans")


@register
@dataclass(frozen=True)
class Grab(Attack):
    """Match the update by unsquared L2 + 0.01 L1, learn dropout masks beside the words, order tokens by beam search.

    Where the paper and its code differ, the paper is the default. Differences of ours: candidates are ranked on a share
    of each matrix first (`screen`), and only the changed sentence of one is computed anew; a beam pass that changes
    nothing ends the search (the next would not either); the selection of candidates has no similarity term (the code's,
    undocumented); the word table's own gradient is never matched; padding is in the pool where lengths are unknown.

    Raises:
        BadInputError: a setting that makes no sense.
    """

    name: ClassVar[str] = "grab"
    source: ClassVar[str] = "Grab (Feng et al., ACM CCS 2024), sections 4 and 5"
    needs: ClassVar[tuple[str, ...]] = ("batch_size",)
    tasks: ClassVar[tuple[str, ...]] = ("classification",)
    handles: ClassVar[frozenset[Trait]] = TEXT_COUNTERED - {"signs"} | {"zero mean"}
    countered: ClassVar[frozenset[Trait]] = TEXT_COUNTERED
    models_dropout: ClassVar[bool] = True
    rounds: int = hyper(5, "rounds of continuous and discrete search", source="section 5.1")
    steps: int = hyper(2000, "AdamW steps a round", source="section 5.1")
    learning_rate: float = hyper(0.01, "AdamW's learning rate", source="section 5.1")
    decay: float = hyper(0.89, "factor on the learning rate every 50 steps", source="section 5.1")
    weight_decay: float = hyper(0.01, "AdamW's, also on masks", source="the published code")
    l1: float = hyper(0.01, "weight of the L1 term", source="equation 2")
    learn_masks: bool = hyper(True, "learn dropout masks where dropout is on (Grab*)", source="section 4.2")
    starts: int = hyper(2000, "Gaussian starts, of which the best is taken", source="section 5.1")
    permutations: int = hyper(2000, "orders tried at each selection", source="section 5.1")
    passes: int = hyper(5, "passes of the beam search", source="section 5.1")
    beam_width: int = hyper(4, "guesses kept", source="section 5.1")
    pool: str = hyper(
        "recovered",
        "tokens tried: 'recovered' by the continuous rounds, or also those of block 0's 'spans'",
        source="4.3",
    )
    large: bool = hyper(False, "linear decay of the learning rate and clipping, for large models", source="Table 4")
    clip: float = hyper(0.5, "largest norm of the word vectors' gradient, with large", source="Table 4")
    counter: bool = hyper(
        True, "normalize, or match on the support, against defenses it was told of", source="5.4, 5.5"
    )
    restart_masks: bool = hyper(
        False, "draw masks anew each round, so that they cannot stay bent to a wrong text", source="ours"
    )
    score_masks: int = hyper(
        0,
        "score texts under so many fresh masks; 0 scores them under those learned, which may be bent to a wrong text",
        source="ours",
        later=True,
    )
    moves: bool = hyper(
        False, "beam search exchanges and moves words too, not tokens alone", source="ours, after LAMP's", later=True
    )
    refit: int = hyper(
        0,
        "judge so many texts of each round under masks learned for each alone; 0 takes distances as they are",
        source="ours",
        later=True,
    )
    refit_steps: int = hyper(60, "Adam steps for the masks of one text", source="ours", later=True)
    keep_best: bool = hyper(False, "best iterate instead of the last", source="the published code takes the last")
    replayed_steps: int = options.replayed_steps()
    screen: int = hyper(8, "rank candidates on every so many-th row of a matrix first; 1 for none", source="ours")
    anew: bool = hyper(True, "compute only the changed sentence of a candidate; False to compare speeds", source="ours")
    candidates: int = hyper(0, "candidates computed together; 0 takes what fits", source="ours")
    assumed_length: int = hyper(16, "sentence length when nothing tells it", unit="tokens", source="ours")

    def __post_init__(self) -> None:
        self._at_least(1, "rounds", "starts", "passes", "beam_width", "screen", "assumed_length")
        self._at_least(0, "steps", "permutations", "candidates", "score_masks", "replayed_steps", "refit")
        self._at_least(1, "refit_steps")
        if self.pool not in _POOLS:
            raise BadInputError(f"attack 'grab': pool must be one of {', '.join(_POOLS)}, got '{self.pool}'")

    def run(self, seen: Observation, rng: torch.Generator) -> Reconstruction:
        work = _Run(self, seen, rng)
        with answering(lambda _: work.so_far):
            return work.result()

    def gradient_evaluations(self, batch_size: int, tokens: int) -> int:
        whole = batch_size if self.score_masks > 1 else 1  # no sentence is computed alone then
        beams = self.beam_width * tokens * tokens // max(1, batch_size) * whole * max(1, self.score_masks)
        orders = (2 * self.permutations * self.rounds + self.starts) * batch_size  # each of the whole batch
        orders *= max(1, self.score_masks)
        steps = self.rounds * (self.steps + self.refit * self.refit_steps)
        return int(STEP * steps + CANDIDATE * (self.rounds * 2 * beams + orders))

    def distance(self, seen: Observation) -> Distance:
        """Return what is measured, with the counters to the defenses that were told.

        Raises:
            NotSupportedError: a defense that matching by differences has no counter to.
        """
        inner: Distance = L2(self.l1)
        if not self.counter:
            return inner
        if "signs" in all_traits(seen.knowledge.defenses):
            raise NotSupportedError("attack 'grab' has no counter to sign compression; use 'decode'")
        return countered(inner, seen, self.name)


class _Run:
    """One batch's attack: the state that goes from round to round."""

    def __init__(self, how: Grab, seen: Observation, rng: torch.Generator) -> None:
        self.how, self.seen, self.rng = how, seen, rng
        self.model, self.table = seen.model, seen.model.word_vectors()
        self.objective = objective_of(seen, how.distance(seen), how.replayed_steps)
        self.frame: Layout = frame_of(seen, how.assumed_length)
        self.labels = first_labels(seen, self.frame)
        dropout = seen.knowledge.dropout != 0.0 and not self.objective.replays  # every replayed step has its own masks
        self.masks = Masks(len(self.frame.ids), rng) if dropout and how.learn_masks else None
        size = len(self.frame.ids)
        self.fresh = [Masks(size, rng, learn=False) for _ in range(how.score_masks)] if self.masks is not None else []
        scored = tuple(self.fresh) or (self.masks,)
        screen = how.screen if self.objective.additive else 1  # replayed steps cannot be estimated
        self.of = Candidates(self.objective, self.frame, self.labels.values, scored, screen, how.candidates)
        self.open = seen.knowledge.lengths is None
        self.refit: Refit | None = None
        if how.refit and dropout:
            judge = Candidates(self.objective, self.frame, self.labels.values)
            self.refit = Refit(judge, self.table, self.model.special.pad, how.refit_steps)
        self.spent = 0
        self.so_far: Reconstruction | None = None
        """What the last round that ended gave, or the first continuous search."""

    def result(self) -> Reconstruction:
        how, size = self.how, len(self.frame.ids)
        pools: list[dict[int, None]] = [dict.fromkeys(self._words()) for _ in range(size)]
        if self.open:
            for pool in pools:
                pool[self.model.special.pad] = None
        last: Beam | None = None
        continuous: Beam | None = None
        state = kept()
        begun = int(state["round"]) if state else 0
        if state:
            last, pools = self._taken_up(state)
        for rounds in range(begun + 1, how.rounds + 1):
            if rounds > 1 and how.restart_masks and self.masks is not None:
                self.masks.restart()
            slots = self._slots(last)
            continuous = self._continuous(self._start(last, slots), slots)
            if last is None:
                self.so_far = self._told(continuous, rounds)
            for row, pool in enumerate(pools):
                pool |= dict.fromkeys(continuous.ids[row, ~slots.still[row]].tolist())
            orders = self._orders(continuous.ids, slots)
            first = [continuous.ids, *([last.ids] if last is not None else []), *orders]
            search = BeamSearch(self.of, self.table, self.model.special, self.open, how.anew, how.moves)
            found = search.run(first, [list(p) for p in pools], how.passes, how.beam_width)
            if self.refit is not None:
                self.refit.labels(self.of.labels)
                before = [last.ids] if last is not None else []
                found = self.refit.best([continuous.ids, *before, *(b.ids for b in search.met(how.refit))])
            same = last is not None and torch.equal(found.ids, last.ids)
            last = found
            self.so_far = self._told(last, rounds)
            if same or rounds == how.rounds:
                break
            self._keep(rounds, last, pools)
        notes = (f"taken up again after round {begun}: the seconds are of the rest",) if begun else ()
        if state is not None and not state:
            notes = ("what a stopped run had kept was damaged: begun anew",)
        assert last is not None
        assert continuous is not None
        best = continuous if self.refit is None and continuous.loss < last.loss else last
        told = self._told(best, rounds)
        return replace(told, notes=(*notes, *told.notes))

    def _keep(self, rounds: int, last: Beam, pools: list[dict[int, None]]) -> None:
        """Keep what the next round starts from."""
        state = {
            "round": torch.tensor(rounds),
            "ids": last.ids,
            "loss": torch.tensor(last.loss, dtype=torch.float64),
            "labels": self.of.labels,
            "spent": torch.tensor([self.spent, self.of.evaluations]),
            "rng": self.rng.get_state(),
        }
        state |= {f"pool.{row}": torch.tensor(list(pool), dtype=torch.long) for row, pool in enumerate(pools)}
        state |= self.masks.values() if self.masks is not None else {}
        for n, masks in enumerate(self.fresh):
            state |= masks.values(f"fresh{n}")
        state |= self.refit.state() if self.refit is not None else {}
        keep(state)

    def _taken_up(self, state: dict[str, Tensor]) -> tuple[Beam, list[dict[int, None]]]:
        """Take a run up again after its last finished round."""
        device = self.table.device
        self.of.labels = state["labels"].to(device)
        self.spent, self.of.evaluations = (int(n) for n in state["spent"])
        self.rng.set_state(state["rng"])
        if self.masks is not None:
            self.masks.put_back(state, device)
        for n, masks in enumerate(self.fresh):
            masks.put_back(state, device, f"fresh{n}")
        if self.refit is not None:
            self.refit.labels(self.of.labels)
            self.refit.put_back(state)
        pools = [dict.fromkeys(state[f"pool.{row}"].tolist()) for row in range(len(self.frame.ids))]
        return Beam(state["ids"].to(device), float(state["loss"])), pools

    def _slots(self, last: Beam | None) -> Layout:
        """Return the slots of the next continuous search: where lengths are unknown, as long as the last guess."""
        if not self.open:
            return self.frame
        special = self.model.special
        if last is None:
            word = next(i for i in range(self.model.vocabulary_size) if i not in special.ids)
            free = self.frame.mask & ~self.frame.fixed
            ids = ended(torch.where(free, word, self.frame.ids), self.frame, special)
        else:
            ids = last.ids
        mask = self.of.lengths_of(ids, special.pad)
        known = torch.isin(ids, torch.tensor(sorted(special.ids), device=ids.device))
        return Layout(ids, mask, (self.frame.fixed | known) & mask)

    def _start(self, last: Beam | None, slots: Layout) -> Tensor:
        """Return [1, B, T, d] word vectors: the best of Gaussian starts, or of orders of the last round's tokens."""
        how, still = self.how, slots.still
        if last is None:
            norm = float(self.table.norm(dim=1).mean())
            drawn = gaussian(slots, self.table, norm, how.starts, self.rng)
            chosen = drawn[int(self._best(drawn, 1, slots)[0])]
        else:
            chosen = self.table[last.ids]
        if how.permutations:
            order = permutations(still, how.permutations, self.rng)
            some = torch.cat([chosen[None], reordered(chosen, order)])
            chosen = some[int(self._best(some, 1, slots)[0])]
        return chosen[None]

    def _best(self, vectors: Tensor, keep: int, slots: Layout) -> Tensor:
        """Return the indices of the best guesses that fill these slots."""
        return self.of.best(vectors, keep, slots.mask.expand(len(vectors), *slots.mask.shape))[0]

    def _continuous(self, start: Tensor, slots: Layout) -> Beam:
        """Return the tokens nearest to where the continuous search ends."""
        how = self.how
        schedule = Schedule(
            how.steps,
            how.learning_rate,
            decay=1.0 if how.large else how.decay,
            linear_to=how.steps if how.large else 0,
            weight_decay=how.weight_decay,
            clip=how.clip if how.large else 0.0,
        )
        learn = "clamp" if self.labels.learned else None
        still = slots.still
        descent = Descent(start, still, self.of.labels[None], learn, schedule, self.masks)

        def loss(vectors: Tensor, labels: Tensor) -> Tensor:
            return self.objective(vectors, slots.mask, labels, self.masks)

        point = minimize(descent, loss, how.steps, keep_best=how.keep_best, what="grab: matching")
        self.spent += 3 * point.evaluations
        if self.labels.learned:
            self.of.labels = point.labels[0]
        ids = nearest_tokens(point.embeddings[0], self.table, sorted(self.model.special.ids))
        ids = torch.where(still, slots.ids, ids)
        return Beam(ids, float(self.of.measure(self.table[ids][None], slots.mask[None])[0]))

    def _orders(self, ids: Tensor, slots: Layout) -> list[Tensor]:
        """Return the best orders of a guess's tokens, as many as the beam is wide."""
        if not self.how.permutations:
            return []
        order = permutations(slots.still, self.how.permutations, self.rng)
        some = torch.unique(reordered(ids, order), dim=0)
        return list(some[self._best(self.table[some], self.how.beam_width, slots)])

    def _words(self) -> list[int]:
        """Return tokens that block 0's gradients speak for, where the pool is to have them."""
        if self.how.pool != "spans":
            return []
        stacked, _ = stack(self.seen, 0)
        if stacked is None:
            raise NotSupportedError("attack 'grab' with pool 'spans' needs query, key or value gradients of block 0")
        most = min(32 * len(self.frame.ids), self.model.width - 1)
        return [word.token for word in rank_words(self.model, stacked, most, 0.05)]

    def _told(self, best: Beam, rounds: int) -> Reconstruction:
        mask = self.of.lengths_of(best.ids, self.model.special.pad)
        sequences = tuple(tuple(row[keep].tolist()) for row, keep in zip(best.ids, mask, strict=True))
        evaluations = self.spent + self.of.evaluations + (self.refit.spent if self.refit is not None else 0)
        more = {"rounds": rounds}
        if self.masks is not None:
            more["mask_sites"] = len(self.masks.variables())
        return self.objective.told(sequences, self.of.labels, self.labels.how, best.loss, evaluations, **more)
