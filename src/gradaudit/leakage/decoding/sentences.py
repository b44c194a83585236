"""Sentences from decoded rows, dropout on: linked, certified, and what is still missing found with their help.

Let f of the r rows be decoded, X_f, and X_m the q missing ones. With N [d, q] the directions of the row space that are
orthogonal to X_f, dW N = D_m^T (X_m N) spans the missing rows' signals, and the signals that X_f alone gives are off by
a part of them: D_f + C^T D_m, where X_m = C X_f + (X_m N) N^T. A sentence whose rows were all decoded still has to
explain its own signals up to that, which `linking.unexplained` solves for. What it finds, c = C^T (X_m N)^-T, says how
much of the missing rows lies along each row of that sentence:

    (X_m N)^-1 X_m = c^T X_f + N^T.

So with every certified sentence the missing rows are known to lie in a smaller space: q directions and the rows that
are not certified yet. There they decode where they did not in the whole row space.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gradaudit.leakage.decoding.assembly import linked_by
from gradaudit.leakage.decoding.linking import (
    conditions,
    group,
    joint_support,
    settled,
    unexplained,
    unexplained_queries,
)
from gradaudit.leakage.decoding.pairs import Pairs
from gradaudit.leakage.decoding.rows import MaskedInputs, Row
from gradaudit.types import Observation

CLOSED = 1e-3
"""A sentence whose attention signals its own tokens explain up to this is closed: right ones are at 1e-5."""
_NOISY, _MOST_NOISY = 2.0, 0.2
"""Signals known up to an error are explained when at most so many times what the error leaves is left (right ones: 1.0
to 1.1), and that is small enough for a stranger, who leaves a third, to show."""
_SPARE = 4
"""So many conditions for each unknown that stands for missing rows, or the sentence is not proven."""
_SCREENED, _SCREENS = 2.0, 10.0
"""A sentence is held first against so few heads that conditions are twice the unknowns: what leaves ten times as much
there as what closes it is not closed by all of them."""
_REWEIGHTED = 8
"""Steps of linking: of 260 rows of a batch of 518 six and twenty put 99% together rightly (MPNet), four nearly so."""
_TOLD = 0.25
"""Of a head's directions so many are not of a sentence's own keys, or these alone say nothing."""
_CHANGES = 64
"""Sentences tried a group that a wrong or a missing member keeps from being proven."""
_ROUND, _DEVIATIONS = (0.1, 0.05, 0.01), 3.0
"""Dropout rates are multiples of these, the first sooner than the last, within so many standard deviations."""


def certificate(
    complete: bool, left: float, length: int, head_width: int, spare: float = float("inf"), closed: float = CLOSED
) -> str:
    """Return how sure a linked sentence is: "proven", "likely" or "guess".

    Args:
        complete: it runs from the first special token to the last without a hole.
        left: share of its attention signals that its own tokens leave unexplained.
        length: its tokens; in a set of more than eight times a head's width one stranger could go unseen.
        head_width: width of an attention head.
        spare: conditions on its signals for each unknown that stands for rows not decoded.
        closed: below so much they are explained.
    """
    if not complete:
        return "guess"
    return "proven" if left < closed and length <= 8 * head_width and spare >= _SPARE else "likely"


def likely_rate(shown: float, bits: int) -> float:
    """Return the round dropout rate that masks may well have had, or what they show.

    Queries and keys have biases, so that they must be known at their scale: a rate half a percent off leaves more of
    short sentences than what closes them.

    Args:
        shown: share of their bits that masks dropped.
        bits: how many.
    """
    within = _DEVIATIONS * math.sqrt(max(shown * (1 - shown), 0.0) / bits)
    near = (round(shown / step) * step for step in _ROUND)
    return next((rate for rate in near if abs(rate - shown) <= within), shown)


@dataclass(frozen=True)
class Linked:
    """Rows put together to sentences.

    Args:
        groups: the rows of each sentence, in order.
        certificates: how sure each is.
        foreign: [n, q] a sentence: how its signals were contaminated by the q missing rows.
    """

    groups: list[list[int]]
    certificates: list[str]
    foreign: list[Tensor]


@dataclass(frozen=True)
class Signals:
    """What comes back to the queries and keys of the decoded rows.

    Args:
        toward_queries: [f, H, h].
        toward_keys: [f, H, h].
        queries: [f, H, h].
        keys: [f, H, h].
        hidden: [q, H, h] at queries and keys: directions that the missing rows' signals span.
        duals: [d, f] directions of the row space orthogonal to all decoded rows but one.
        beside: [d, q] directions of the row space orthogonal to the decoded rows.
    """

    toward_queries: Tensor
    toward_keys: Tensor
    queries: Tensor
    keys: Tensor
    hidden: tuple[Tensor, Tensor]
    duals: Tensor
    beside: Tensor

    def left(self, members: Tensor, heads: int | None = None) -> tuple[Tensor, Tensor]:
        """Return [n] what a set of rows leaves unexplained, and [n, q] its contamination; by the first heads or all."""
        at_q, at_k = self.toward_queries[:, :heads], self.toward_keys[:, :heads]
        q, k = self.queries[:, :heads], self.keys[:, :heads]
        hidden = (self.hidden[0][:, :heads], self.hidden[1][:, :heads]) if len(self.hidden[0]) else None
        return unexplained(at_q, at_k, q, k, members, hidden)

    def affinity(self, rows: Tensor, positions: Tensor) -> Tensor:
        """Return [n, n], how much some rows, at these positions, take part in explaining each other."""
        toward_q, toward_k = self.toward_queries, self.toward_keys
        if len(self.hidden[0]):
            # what the missing rows leak lies in q known directions: without these the signals are nearly clean
            both = torch.cat([toward_q, toward_k], 1).flatten(1)
            known = torch.linalg.qr(torch.cat(self.hidden, 1).flatten(1).T).Q
            both = (both - (both @ known) @ known.T).view(len(both), 2, *toward_q.shape[1:])
            toward_q, toward_k = both.unbind(1)
        # float32: what is compared differs by far more, and most of the time of a large batch is spent here
        toward_q, toward_k, keys, queries = (t[rows].float() for t in (toward_q, toward_k, self.keys, self.queries))
        by_query = joint_support(toward_q, keys, positions, _REWEIGHTED)
        by_key = joint_support(toward_k, queries, positions, _REWEIGHTED)
        return by_query + by_query.T + by_key + by_key.T


class DecodedRows:
    """Decoded rows on their way to sentences.

    Args:
        seen: the observation.
        inputs: what dropout masks, and the span.
        found: the rows.
        blurred: the observation with a draw of the gradient's error added, and with it taken off; empty where the
            gradient is known exactly.
    """

    def __init__(
        self, seen: Observation, inputs: MaskedInputs, found: list[Row], blurred: Sequence[Observation] = ()
    ) -> None:
        self.seen, self.inputs, self.found = seen, inputs, found
        made = (DecodedRows(one, inputs, found).signals() for one in blurred)
        self._blurred = [one for one in made if one is not None]
        self.model, self.size = seen.model, seen.knowledge.batch_size

    def rate(self) -> float:
        """Return the dropout rate that the masks show."""
        return 1.0 - float(torch.stack([row.kept for row in self.found]).double().mean())

    def rows(self) -> Tensor:
        """Return what enters q, k and v, [f, d] float64, at the rate that is known or that the masks show."""
        known = self.seen.knowledge.dropout
        clean, kept = torch.stack([row.clean for row in self.found]), torch.stack([row.kept for row in self.found])
        return self.inputs.inputs(clean, kept, likely_rate(self.rate(), kept.numel()) if known is None else known)

    def signals(self) -> Signals | None:
        """Return the signals of all rows, or None when the gradients of block 0's queries or keys were not seen."""
        gradients = [self.seen.role(0, role) for role in "qk"]
        if not all(gradients):
            return None
        rows = self.rows()
        q, k = self.model.project(0, "q", rows), self.model.project(0, "k", rows)
        basis = self.inputs.span.basis
        # the orthonormal directions of the span that the rows leave
        beside = basis @ torch.linalg.svd(rows @ basis, full_matrices=True).Vh[len(rows) :].T
        duals = torch.linalg.pinv(rows)
        towards, hidden = [], []
        for (gradient, *_), like in zip(gradients, (q, k), strict=True):
            towards.append((gradient.double() @ duals).T.reshape(like.shape))
            hidden.append((gradient.double() @ beside).T.reshape(-1, *like.shape[1:]))
        return Signals(towards[0], towards[1], q, k, (hidden[0], hidden[1]), duals, beside)

    def link(self, seen: Signals, held: Sequence[list[int]] = (), certify: bool = True) -> Linked:
        """Return the sentences and how sure each is.

        Args:
            seen: from `signals`.
            held: sentences that were proven before, and are not put together anew.
            certify: False where it is enough to know which rows belong together: all others are guesses.
        """
        positions = [row.position for row in self.found]
        size = self.size or max(positions.count(p) for p in set(positions))
        fixed = {i for g in held for i in g}
        loose = [i for i in range(len(positions)) if i not in fixed]
        index = torch.tensor(loose, dtype=torch.long, device=seen.queries.device)
        affinity = seen.affinity(index, torch.tensor(positions, device=index.device)[index]) if loose else None
        at = {row: n for n, row in enumerate(loose)}

        def grouped(rows: list[int], count: int) -> list[list[int]]:
            if affinity is None or not rows:
                return []
            some = torch.tensor([at[i] for i in rows], device=affinity.device)
            return self._grouped(rows, affinity[some][:, some], count)

        groups = [*held, *grouped(loose, size - len(held))]
        if not certify:
            sure = ["proven"] * len(held) + ["guess"] * (len(groups) - len(held))
            return Linked(groups, sure, [seen.queries.new_zeros(len(g), len(seen.hidden[0])) for g in groups])
        certified = [self.certified(seen, members) for members in groups]
        while (mended := self._mended(seen, groups, certified)) is not None:
            members, now = mended
            groups = [g for n, g in enumerate(groups) if certified[n][0] == "proven"] + [members]
            certified = [c for c in certified if c[0] == "proven"] + [now]
            taken = {i for g in groups for i in g}
            # the others are grouped anew, without the proven ones in their way
            groups += grouped([i for i in loose if i not in taken], size - len(groups))
            certified += [self.certified(seen, g) for g in groups[len(certified) :]]
        return Linked(groups, [sure for sure, _ in certified], [foreign for _, foreign in certified])

    def _grouped(self, rows: list[int], near: Tensor, count: int) -> list[list[int]]:
        """Return rows by sentence, the nearest [n, n] together."""
        stands = [self.found[i].position for i in rows]
        ends = [self.found[i].token in self.model.special.suffix for i in rows]
        count = max(1, count)
        return [[rows[i] for i in g] for g in settled(group(near, stands, count), near, stands, ends, count)]

    def _mended(
        self, seen: Signals, groups: list[list[int]], certified: list[tuple[str, Tensor]]
    ) -> tuple[list[int], tuple[str, Tensor]] | None:
        """Return a sentence that one change of an unproven group proves, and how sure it is, or None."""
        proven = {i for n, (sure, _) in enumerate(certified) if sure == "proven" for i in groups[n]}
        for at, members in enumerate(groups):
            for changed in self._changes(members, proven) if certified[at][0] != "proven" else ():
                now = self.certified(seen, changed)
                if now[0] == "proven":
                    return changed, now
        return None

    def certified(self, seen: Signals, members: list[int]) -> tuple[str, Tensor]:
        """Return how sure a sentence is, and its contamination [n, q].

        Args:
            seen: from `signals`.
            members: its rows, in order.
        """
        _, heads, width = seen.queries.shape
        complete = self.complete([self.found[i].token for i in members], [self.found[i].position for i in members])
        if not complete:  # nothing that its signals say would change it
            return "guess", seen.queries.new_zeros((len(members), len(seen.hidden[0])))
        of = torch.tensor(members, device=seen.queries.device)
        unknown = len(members) * len(seen.hidden[0])
        spare = conditions(len(members), heads, width) / max(unknown, 1e-9)
        few = math.ceil(_SCREENED * unknown / conditions(len(members), 1, width))
        if spare < _SPARE or (unknown and not self._blurred and few < heads):
            none = seen.queries.new_zeros((len(members), len(seen.hidden[0])))
            if spare < _SPARE or float(seen.left(of, few)[0].max()) > _SCREENS * CLOSED:
                return "likely", none
        left, foreign = seen.left(of)
        closed = CLOSED
        if self._blurred:
            # a second draw of the error leaves as much again, where the first is all that was left; added and taken
            # off, what the two have in common by chance falls out
            twice = torch.stack([blurred.left(of)[0].square() for blurred in self._blurred])
            noise = float((twice.mean(0) - left.square()).mean().clamp_min(0).sqrt())
            closed = max(CLOSED, min(_NOISY * noise, _MOST_NOISY))
            left = left.square().mean(0, keepdim=True).sqrt()
        return certificate(complete, float(left.max()), len(members), width, spare, closed), foreign

    def _changes(self, members: list[int], proven: set[int]) -> list[list[int]]:
        """Return the complete sentences that one row of no proven sentence makes of a group, put in or exchanged."""
        found = self.found
        changes = []
        for row in range(len(found)):
            if row in proven or row in members:
                continue
            others = [i for i in members if found[i].position != found[row].position]
            now = sorted([*others, row], key=lambda i: found[i].position)
            if self.complete([found[i].token for i in now], [found[i].position for i in now]):
                changes.append(now)
        return changes[:_CHANGES]

    def texts(self, groups: list[list[int]]) -> list[tuple[int, ...]]:
        """Return the token ids of each group, framed by the tokenizer's own first and last tokens."""
        return [self._framed([self.found[i].token for i in members]) for members in groups]

    def unchecked(self) -> tuple[list[tuple[int, ...]], list[str]]:
        """Return sentences without the signals of both queries and keys: a lone one in order, several unproven.

        These are linked by what the one of the two explains of the other, or by how alike the signals of values are,
        and are likely where their keys make what came back to their queries.
        """
        positions = [row.position for row in self.found]
        size = self.size or max(Counter(positions).values())
        if size == 1:
            rows = sorted(range(len(positions)), key=lambda i: positions[i])
            whole = len(rows) == self.inputs.span.rank
            sure = whole and self.complete([self.found[i].token for i in rows], sorted(positions))
            return self.texts([rows]), ["likely" if sure else "guess"]
        there = {role: seen[0] for role in "qkv" if (seen := self.seen.role(0, role)) and bool(seen[0].any())}
        made = self.rows()
        duals = torch.linalg.pinv(made)
        signals = torch.cat([(gradient.double() @ duals).T for gradient in there.values()], 1)
        tokens = torch.tensor([row.token for row in self.found], device=made.device)
        pairs = Pairs(torch.tensor(positions, device=made.device), tokens, made)
        near = linked_by(self.model, pairs, signals, {role: len(gradient) for role, gradient in there.items()})
        groups = self._grouped(list(range(len(positions))), near, size)
        if "q" not in there:
            return self.texts(groups), ["guess"] * len(groups)
        keys = self.model.project(0, "k", made)
        toward = signals[:, : len(there["q"])].reshape(keys.shape)
        return self.texts(groups), ["likely" if self._closed(toward, keys, g) else "guess" for g in groups]

    def _closed(self, toward_queries: Tensor, keys: Tensor, members: list[int]) -> bool:
        """Say whether a whole sentence's keys make what came back to its queries, which a stranger's do not."""
        found = [self.found[i] for i in members]
        told = keys.shape[2] - len(members) + 1 >= _TOLD * keys.shape[2]
        whole = self.complete([row.token for row in found], [row.position for row in found])
        of = torch.tensor(members, device=keys.device)
        return whole and told and float(unexplained_queries(toward_queries, keys, of).max()) < CLOSED

    def complete(self, ids: list[int], positions: list[int]) -> bool:
        """Say whether tokens run from the first special one to the last without a hole."""
        special = self.model.special
        prefix, suffix = list(special.prefix), list(special.suffix)
        inner = ids[len(prefix) : len(ids) - len(suffix)]
        return (
            positions == list(range(len(ids)))
            and ids[: len(prefix)] == prefix
            and ids[len(ids) - len(suffix) :] == suffix
            and not any(i in special.ids for i in inner)
        )

    def _framed(self, ids: list[int]) -> tuple[int, ...]:
        """Put the tokenizer's own first and last tokens where they were not decoded: they are known to be there."""
        special = self.model.special
        inner = [i for i in ids if i not in (*special.prefix, *special.suffix)]
        return (*special.prefix, *inner, *special.suffix)


def unchecked_for(seen: Observation, what: str) -> str:
    """Return what keeps sentences from being checked.

    Args:
        seen: the observation.
        what: was sent, in words.
    """
    missing = " and ".join(f"0:{role}" for role in "qk" if not any(bool(t.any()) for t in seen.role(0, role)))
    return f"the {what} of {missing} were not seen: sentences are put together by the others', and none is proven"
