"""Discrete search: tokens of a batch exchanged one slot after the other, the best few guesses kept.

Source: Grab (Feng et al., 2024), section 4.3. The published code measures the whole batch's gradient for each
candidate; a batch's gradient is a sum over its sentences, so here only the changed sentence is computed anew, many at
once.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.matching.candidates import Candidates
from gradaudit.leakage.matching.layout import Layout
from gradaudit.leakage.matching.screening import Base
from gradaudit.models.base import SpecialTokens
from gradaudit.progress import step


@dataclass(frozen=True)
class Beam:
    """One guess.

    Args:
        ids: [B, T] token ids.
        loss: its distance.
    """

    ids: Tensor
    loss: float

    def key(self) -> bytes:
        """What tells two guesses apart."""
        return _bytes(self.ids)


def ended(ids: Tensor, frame: Layout, special: SpecialTokens) -> Tensor:
    """Return a guess of unknown lengths in its one form: words, the tokenizer's suffix, padding.

    A sentence ends at the first padding or suffix behind its first word, or where the frame does.

    Args:
        ids: [B, T] token ids.
        frame: the slots.
        special: the frame of a sentence.
    """
    out = ids.clone()
    suffix = torch.tensor(special.suffix, dtype=ids.dtype, device=ids.device)
    for row in range(len(ids)):
        slots = torch.where(frame.mask[row])[0]
        last = int(slots[-1]) + 1 - len(suffix)
        words = torch.where(frame.mask[row] & ~frame.fixed[row])[0]
        first = int(words[0]) + 1 if len(words) else last
        marks = torch.tensor([special.pad, *special.suffix], device=ids.device)
        stops = torch.where(torch.isin(ids[row, first:last], marks))[0]
        end = first + int(stops[0]) if len(stops) else max(first, last)
        out[row, end : end + len(suffix)] = suffix[: max(0, ids.shape[1] - end)]
        out[row, end + len(suffix) :] = special.pad
    return out


class BeamSearch:
    """Beam search over the tokens of a batch.

    Args:
        candidates: measures guesses.
        table: [V, d] word vectors.
        special: the model's special tokens; padding ends a sentence.
        open_ended: lengths are unknown, so that padding may be tried, and a word in the place of a sentence's end.
        anew: compute only the changed sentence of a candidate; False computes the whole batch (to compare speeds).
        moves: after each pass over a sentence, exchange and move its words too.
    """

    def __init__(
        self,
        candidates: Candidates,
        table: Tensor,
        special: SpecialTokens,
        open_ended: bool = False,
        anew: bool = True,
        moves: bool = False,
    ) -> None:
        self._of, self._table, self._special, self._anew = candidates, table, special, anew
        self._pad, self._open, self._moves = special.pad, open_ended, moves
        self._known: dict[bytes, Beam] = {}

    def run(self, starts: Sequence[Tensor], pools: Sequence[Sequence[int]], passes: int, width: int) -> Beam:
        """Return the best guess that changes of single tokens lead to.

        Args:
            starts: [B, T] token ids, of which the best `width` are the first beam.
            pools: tokens to try, for each sentence.
            passes: over all slots at most; a pass that changes no guess ends the search: the next would not
                either.
            width: guesses kept.
        """
        frame = self._of.frame
        first = {Beam(s, 0.0).key(): s for s in starts}
        beams = [Beam(s, v) for s, v in zip(first.values(), self._whole(list(first.values())), strict=True)]
        for beam in beams:
            self._known[beam.key()] = beam
        beams = sorted(beams, key=lambda b: b.loss)[:width]
        free = frame.mask & ~frame.fixed
        rounds = int(free.sum()) * passes
        done = 0
        for _ in range(passes):
            before = [b.key() for b in beams]
            for row in range(len(free)):
                bases = self._bases(beams, row)
                for slot in torch.where(free[row])[0].tolist():
                    beams = self._slot(beams, bases, row, slot, pools[row], width)
                    done += 1
                    step("grab: beam search", done, rounds)
                if self._moves:
                    beams = self._moved(beams, row, width)
            if [b.key() for b in beams] == before:
                break
        return beams[0]

    def met(self, count: int) -> list[Beam]:
        """Return the best guesses that were measured in full, best first."""
        return sorted(self._known.values(), key=lambda b: b.loss)[:count]

    def _slot(
        self, beams: list[Beam], bases: dict[bytes, Base] | None, row: int, slot: int, pool: Sequence[int], width: int
    ) -> list[Beam]:
        """Return the best guesses after one slot was tried with every token of the pool."""
        every: dict[bytes, Beam] = {b.key(): b for b in beams}
        new: dict[bytes, Tensor] = {}
        for beam in beams:
            for token in pool:
                ids = self._changed(beam.ids, row, slot, token)
                if ids is None:
                    continue
                key = Beam(ids, 0.0).key()
                if key in self._known:
                    every[key] = self._known[key]
                elif key not in every:
                    new[key] = ids
        for beam in self._best_of(new, bases, row, width):
            every[beam.key()] = beam
        return sorted(every.values(), key=lambda b: b.loss)[:width]

    def _best_of(self, new: dict[bytes, Tensor], bases: dict[bytes, Base] | None, row: int, width: int) -> list[Beam]:
        """Measure guesses that differ in one sentence, and return those that were measured in full."""
        found = []
        for (key, ids), value in zip(new.items(), self._measured(list(new.values()), bases, row, width), strict=True):
            if value < float("inf"):
                self._known[key] = Beam(ids, value)
                found.append(self._known[key])
        return found

    def _moved(self, beams: list[Beam], row: int, width: int) -> list[Beam]:
        """Return the guesses with the best one's words in a better order, as long as a move finds one."""
        frame = self._of.frame
        bases = self._bases(beams[:1], row)
        while True:
            best = beams[0]
            words = self._of.lengths_of(best.ids, self._pad)[row] & ~frame.fixed[row]
            words &= best.ids[row] != self._pad
            new = {}
            for order in moves(torch.where(words)[0].tolist()):
                ids = best.ids.clone()
                ids[row, words] = best.ids[row, order]
                key = Beam(ids, 0.0).key()
                if key not in self._known:
                    new[key] = ids
            every = {b.key(): b for b in [*beams, *self._best_of(new, bases, row, width)]}
            beams = sorted(every.values(), key=lambda b: b.loss)[:width]
            if beams[0].loss >= best.loss:
                return beams

    def _changed(self, ids: Tensor, row: int, slot: int, token: int) -> Tensor | None:
        """Return a guess with another token in one slot; None where that is no other guess."""
        here = int(ids[row, slot])
        if token == here:
            return None
        out = ids.clone()
        out[row, slot] = token
        if not self._open:
            return out
        special, before = self._special, int(ids[row, slot - 1]) if slot else -1
        if token == special.pad and slot == int(torch.where(~self._of.frame.fixed[row])[0][0]):
            return None  # a sentence without a word
        if here in special.ids:
            if slot and before in special.ids and not bool(self._of.frame.fixed[row, slot - 1]):
                return None  # behind the end
            if token == special.pad:
                return None
            # a word in the place of the end: the sentence is longer by one
            out[row, slot + 1 :] = torch.where(self._of.frame.mask[row, slot + 1 :], special.pad, out[row, slot + 1 :])
        out = torch.where(
            torch.arange(len(ids), device=ids.device)[:, None] == row, ended(out, self._of.frame, special), ids
        )
        return None if torch.equal(out, ids) else out

    def _measured(self, ids: list[Tensor], bases: dict[bytes, Base] | None, row: int, width: int) -> list[float]:
        """Return distances, infinite for all but the best; only `row` is computed where the others' part is known."""
        if not ids:
            return []
        if bases is None:
            return self._whole(ids, 2 * width)
        groups: dict[bytes, list[int]] = {}
        for n, one in enumerate(ids):
            groups.setdefault(_others(one, row), []).append(n)
        order = [n for members in groups.values() for n in members]
        # guesses that share the sentence and differ in the others take one pass through the model
        keys = [_bytes(one[row]) for one in ids]
        first: dict[bytes, Tensor] = {}
        for n in order:
            first.setdefault(keys[n], ids[n])
        place = {key: at for at, key in enumerate(first)}
        beside = [
            (bases[others], torch.tensor([place[keys[n]] for n in members], device=self._table.device))
            for others, members in groups.items()
        ]
        some = torch.stack(list(first.values()))
        mask = self._of.lengths_of(some, self._pad)[:, row : row + 1]
        longest = int(mask.sum(-1).max())  # the batch's padding behind this sentence is no part of it
        mask, some = mask[..., :longest], some[..., :longest]
        found = self._of.measure(self._table[some[:, row : row + 1]], mask, row, beside, 2 * width)
        values = dict(zip(order, found.tolist(), strict=True))
        return [values[n] for n in range(len(ids))]

    def _whole(self, ids: list[Tensor], keep: int = 0) -> list[float]:
        every = torch.stack(ids)
        return self._of.measure(self._table[every], self._of.lengths_of(every, self._pad), keep=keep).tolist()

    def _bases(self, beams: list[Beam], row: int) -> dict[bytes, Base] | None:
        """Return what the sentences other than `row` add in each guess; None where all is computed anew."""
        size = len(self._of.frame.ids)
        of = self._of
        if size == 1 or not self._anew or len(of.masks) > 1 or not of.objective.additive:
            return None
        if of.objective.model.spec.task != "classification":
            return None
        rest = torch.tensor([r for r in range(size) if r != row], device=self._table.device)
        whole = self._of.masks[0]
        masks = None if whole is None else whole.only(rest)
        found: dict[bytes, Base] = {}
        for beam in beams:
            others = _others(beam.ids, row)
            if others not in found:
                mask = self._of.lengths_of(beam.ids, self._pad)[rest]
                vectors, labels = self._table[beam.ids[rest]], self._of.labels[rest]
                found[others] = self._of.objective.base(vectors, mask, labels, masks, size)
        return found


def moves(slots: Sequence[int]) -> list[list[int]]:
    """Return all orders of slots that one move makes: two exchanged, one put elsewhere, the end put first."""
    found: dict[tuple[int, ...], None] = {}
    for a in range(len(slots)):
        for b in range(len(slots)):
            other = list(slots)
            other.insert(b, other.pop(a))
            found[tuple(other)] = None
            if a < b:
                other = list(slots)
                other[a], other[b] = other[b], other[a]
                found[tuple(other)] = None
        found[(*slots[a:], *slots[:a])] = None
    found.pop(tuple(slots), None)
    return [list(order) for order in found]


def _others(ids: Tensor, row: int) -> bytes:
    return _bytes(torch.cat([ids[:row], ids[row + 1 :]]))


def _bytes(ids: Tensor) -> bytes:
    return ids.cpu().numpy().tobytes()
