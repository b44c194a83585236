"""Rows that were missed, looked for sentence by sentence, and where what came back to others leaves room for them.

The former (`sentence_spaces`) finds most, and the latter what many sentences share, like a first token.

Of r rows let X_f [f, d] be decoded and X_m [q, d] not, D_f and D_m their signals, and N [d, q] the directions of the
row space that are orthogonal to X_f. The gradient G = D_f^T X_f + D_m^T X_m tells G N = D_m^T (X_m N): which directions
the missing rows' signals have. Let P be the left inverse of G N. Then

    P G = (X_m N)^-1 X_m + (P D_f^T) X_f,

the missing rows themselves, up to what the other rows' signals have in the same few directions, which is little. So a
missing row x = X_f^T c + N t has c near (P G X_f^+)^T t: of its r coordinates only q are free, and the others lean.
That is a quadratic term in the linear program, which then mostly decodes what it did not. Where it still does not,
a few coordinates that it gives up first are forbidden, at random: one in two of them was dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gradaudit.leakage.decoding.dropout_masks import HALF
from gradaudit.leakage.decoding.rows import MaskedInputs, Row, Search, fresh_rows, nearest
from gradaudit.leakage.decoding.sentence_spaces import Open, SentenceSpace, apart, costs, look_by_sentence
from gradaudit.leakage.decoding.sentences import DecodedRows, Linked, Signals
from gradaudit.leakage.rowspace.subspace import Span, stack
from gradaudit.progress import step

_TRIES = ((0, 8, 4), (8, 16, 2), (16, 24, 1))
"""Programs a round for the nearest tokens of a position, from one rank to another: of those missed the farthest ranked
18th in the whole space (MiniLM, b/d of 0.62). In a smaller one every word of the sentences that are open is near at
every position, and missed ones ranked 31st and later: after a round that found nothing as many more are tried."""
_COPIES, _FIRSTS = 4, 200
"""Programs a round for one more copy of a token that was found, and of the first one, which every sentence has."""
_WHOLE, _BESIDE, _LAST = ((4.0,), (12.0, 1.0, 0.0)), ((0.0,), (4.0, 12.0, 1.0)), 0.4
"""Weights of the leaning in the first program, turn by turn, for one half of the programs and the other: a row whose
signal is weak leans least. In the small space beside proven sentences programs need no help, and half of them get none.
And its weight in the second program, at most."""
_FORBIDDEN, _AMONG, _PER = 5, 30, 12
"""So many coordinates, drawn from so many that are given up first, are forbidden in the second program; in a narrow
model fewer, drawn from a twelfth of the width."""
_SMALL = 0.3
"""Coordinates below this share of the middle one are not forbidden: their bits hardly matter."""
_STEPS, _ROUNDS, _TIES = 48, 2, 1e-3
"""Of 235 rows that 80 steps without over-relaxation find, round by round, these find 232 (MiniLM, b/d of 0.7)."""
_IDLE = 6
"""So many rounds in a row that find no missing row end the search."""
_WORTH = 0.1
"""Sentence by sentence rows are looked for again where that found more than this share of those missing."""
_BEHIND = 3
"""Positions behind the last decoded row that are looked at."""
_NEAR = 1e-3
"""A row this near the smaller space is looked at in the whole one: the former is known to about 1e-5."""


@dataclass(frozen=True)
class Leaning:
    """Where rows lie that were not decoded: x = t free + c known, with c near t shared.

    Args:
        free: [q, d].
        known: [f, d] decoded rows as they enter.
        shared: [q, f].
        spread: [f] how far from it c is, up to a common factor.
        size: mean square of a row's coordinates.
    """

    free: Tensor
    known: Tensor
    shared: Tensor
    spread: Tensor
    size: float

    @classmethod
    def of(cls, basis: Tensor, rows: Tensor, gradient: Tensor) -> Leaning:
        """Return what a gradient says.

        Args:
            basis: [d, r] orthonormal, of the row space.
            rows: [f, d] decoded rows as they enter.
            gradient: [out, d] of matrices that share this input.
        """
        beside = basis @ torch.linalg.svd(rows @ basis, full_matrices=True).Vh[len(rows) :].T
        signals, hidden = gradient @ torch.linalg.pinv(rows), gradient @ beside
        shared = torch.linalg.pinv(hidden) @ signals
        own = (signals - hidden @ shared).norm(dim=0)
        return cls(beside.T, rows, shared, own / own.mean(), float(rows.square().mean()))

    def beyond(self, certified: Sequence[int], foreign: Tensor) -> Leaning:
        """Return what is left where c is known along some rows.

        Args:
            certified: these rows.
            foreign: [n, q], c = t foreign^T along them.
        """
        others = [i for i in range(len(self.known)) if i not in set(certified)]
        free = self.free + foreign.T @ self.known[list(certified)]
        return Leaning(free, self.known[others], self.shared[:, others], self.spread[others], self.size)

    def space(self) -> Tensor:
        """Return an orthonormal basis [d, q + f] of where they lie."""
        basis: Tensor = torch.linalg.qr(torch.cat([self.free, self.known]).T).Q
        return basis

    def cost(self, inputs: MaskedInputs) -> Tensor:
        """Return [n, n], what it costs a masked row, by its coordinates in a basis, to lie elsewhere than they lean.

        Args:
            inputs: with n directions in its basis.
        """
        read = torch.linalg.pinv(torch.cat([self.free, self.known]).T)
        free, known = read.split([len(self.free), len(self.known)])
        by = apart(inputs, (known - self.shared.T @ free) / self.spread[:, None])
        cost: Tensor = by.T @ by * self.size  # programs take rows at unit size a coordinate
        return cost


def look_again(
    inputs: MaskedInputs,
    whole: MaskedInputs,
    how: Search,
    found: Sequence[Row],
    cost: Tensor,
    turn: int,
    idle: int,
    rng: torch.Generator,
) -> list[Row]:
    """Return further rows that a round of programs finds at the nearest tokens of every position.

    Args:
        inputs: the masked inputs, in the space where missing rows lie.
        whole: the same in the whole row space.
        how: how far to look.
        found: rows that are known, those of proven sentences included.
        cost: of leaning elsewhere than missing rows do, [n, n] in the inputs' basis.
        turn: number of the round.
        idle: rounds before it that found nothing.
        rng: draws objectives and coordinates.
    """
    owner, clean, forbidden = [], [], []
    kinds = _kinds(inputs, whole, how, found, idle)
    for kind, (rows, tries) in kinds.items():
        x = rows[0].clean if rows else inputs.clean(kind[0], torch.tensor([kind[1]], device=cost.device))[0]
        owner += [kind] * tries
        clean.append(x.expand(tries, -1))
        never = torch.zeros(tries, len(x), dtype=torch.bool, device=cost.device)
        # copies that are not known keep each other from being found: one in ten has dropped any one coordinate
        half = tries if kind[0] == 0 else tries // 2
        known = torch.stack([row.kept for row in rows]) if rows else never[:1]
        never[:half] = inputs.forbid(x, known, half, rng)
        forbidden.append(never)
    if not owner:
        return []
    every, never = torch.cat(clean), torch.cat(forbidden)
    start = torch.zeros_like(never)
    drawn = torch.randperm(len(every), generator=rng).to(every.device)
    for half, weights in enumerate(_WHOLE if inputs is whole else _BESIDE):
        some = drawn[half::2]
        start[some] = _decimated(inputs, every[some], never[some], cost, weights[turn % len(weights)], rng)
    kept, inside = inputs.accepted(every, start, how.rate)
    at = torch.where(inside)[0]
    # a mask that the smaller space lets pass may end, in the whole one, at a copy that is known
    kept, inside = whole.accepted(every[at], kept[at], how.rate)
    same = {kind: rows for kind, (rows, _) in kinds.items()}
    which = torch.where(inside)[0].tolist()
    passed = [(owner[int(at[n])], kept[n], every[at[n]]) for n in which]
    more = fresh_rows(whole, how, same, passed, len(found))
    step("decode: rows", len(found) + len(more), whole.span.rank)
    return more


def _kinds(
    inputs: MaskedInputs, whole: MaskedInputs, how: Search, found: Sequence[Row], idle: int
) -> dict[tuple[int, int], tuple[list[Row], int]]:
    """Return which tokens are tried at which positions, the copies of each that are known, and how often."""
    prefix = inputs.model.special.prefix[:1]
    kinds: dict[tuple[int, int], tuple[list[Row], int]] = {(0, token): ([], _FIRSTS) for token in prefix}
    for row in found:
        kinds.setdefault((row.position, row.token), ([], _COPIES))[0].append(row)
    for position in range(1 if prefix else 0, min(how.max_length, inputs.model.max_length)):
        for space in (inputs, whole):
            near = space.near(position, nearest(space, how)).tolist()
            for start, end, tries in _TRIES:
                for token in near[start:end]:
                    kinds.setdefault((position, token), ([], tries))
            if idle and space is not whole:
                for token in near[end : end + space.span.rank]:
                    kinds.setdefault((position, token), ([], 1))
    return {kind: tried for kind, tried in kinds.items() if how.size is None or len(tried[0]) < how.size}


def _decimated(
    inputs: MaskedInputs, rows: Tensor, never: Tensor, cost: Tensor, weight: float, rng: torch.Generator
) -> Tensor:
    """Return the masks [n, d] of programs, some of the coordinates given up first forbidden in a second one."""
    one = torch.eye(len(cost), dtype=cost.dtype, device=cost.device)
    first, second = (torch.linalg.inv(one + by * cost) for by in (weight, min(weight, _LAST)))
    relaxed = inputs.relaxed(rows, forbidden=never, leaning=first, rng=rng, steps=_STEPS, rounds=_ROUNDS)
    small = rows.abs() < _SMALL * rows.abs().median(1, keepdim=True).values
    ties = torch.rand(relaxed.shape, generator=rng).to(relaxed) * _TIES
    among = min(_AMONG, max(1, rows.shape[1] // _PER))
    order = torch.where(small | never, 2.0, relaxed + ties).topk(among, largest=False).indices
    drawn = torch.rand(order.shape, generator=rng).topk(among * _FORBIDDEN // _AMONG).indices.to(order.device)
    never = never.scatter(1, order.gather(1, drawn), value=True)
    again = inputs.relaxed(rows, forbidden=never, leaning=second, rng=rng, steps=_STEPS, rounds=_ROUNDS)
    return again > HALF


def completing(
    rows: DecodedRows, signals: Signals, how: Search, rng: torch.Generator
) -> Iterator[tuple[DecodedRows, Linked]]:
    """Yield rows and the sentences they make, again and again with rows that were missing, as they are found.

    Args:
        rows: to begin with.
        signals: theirs.
        how: how far to look.
        rng: for further tries.
    """
    linked, certain = rows.link(signals), True
    yield rows, linked
    turns: Counter[bool] = Counter()
    by_sentence, idle = True, 0
    while (left := rows.inputs.span.rank - len(rows.found)) > 0 and idle < _IDLE:
        if not by_sentence and not certain:  # so that what ends the loop is certified, too
            linked, certain = rows.link(signals, _proven(linked)), True
            yield rows, linked
        look = _by_sentence if by_sentence else _by_leaning
        more = look(rows, signals, linked, how, turns[by_sentence], idle // 2, rng)
        turns[by_sentence] += 1
        by_sentence, idle = not by_sentence or len(more) > _WORTH * left, 0 if more else idle + 1
        if more:
            rows = DecodedRows(rows.seen, rows.inputs, [*rows.found, *more])
            again = rows.signals()
            assert again is not None
            signals = again
            # most of the time goes into certificates, and only what leans on proven sentences needs them
            certain = len(more) == left
            linked = rows.link(signals, _proven(linked), certain)
            yield rows, linked


def _proven(linked: Linked) -> list[list[int]]:
    return [group for group, sure in zip(linked.groups, linked.certificates, strict=True) if sure == "proven"]


def _by_leaning(
    rows: DecodedRows, signals: Signals, linked: Linked, how: Search, turn: int, idle: int, rng: torch.Generator
) -> list[Row]:
    """Return further rows, decoded in the space that the proven sentences leave for them."""
    proven = [n for n, sure in enumerate(linked.certificates) if sure == "proven"]
    certified = [i for n in proven for i in linked.groups[n]]
    whole, inputs = rows.inputs.span, rows.inputs
    stacked, _ = stack(rows.seen, whole.layer)
    assert stacked is not None
    lies = Leaning.of(whole.basis, rows.rows(), stacked)
    if certified:
        lies = lies.beyond(certified, torch.cat([linked.foreign[n] for n in proven]))
        basis = lies.space()
        smaller = Span(basis, whole.values, basis.shape[1], whole.confidence, whole.layer, whole.roles)
        inputs = MaskedInputs(rows.model, smaller, _NEAR, least=inputs.least, words=inputs.words)
    last = max((row.position for row in rows.found), default=0)
    how = replace(how, max_length=min(how.max_length, last + 1 + _BEHIND))
    return look_again(inputs, rows.inputs, how, rows.found, lies.cost(inputs), turn, idle, rng)


def _by_sentence(
    rows: DecodedRows, signals: Signals, linked: Linked, how: Search, turn: int, idle: int, rng: torch.Generator
) -> list[Row]:
    """Return further rows, decoded in the space that the other sentences leave for each."""
    scales = [part.norm() for part in signals.hidden]
    toward, hidden = (
        torch.stack([part / scale for part, scale in zip(parts, scales, strict=True)], 1)
        for parts in ((signals.toward_queries, signals.toward_keys), signals.hidden)
    )
    certain = [(group, sure) for group, sure in zip(linked.groups, linked.certificates, strict=True) if group]
    spaces = [_space(rows, signals, toward, hidden, members) for members, _ in certain]
    size = float(toward.flatten(1).square().sum(1).median()) * float(rows.rows().square().mean())
    paid = costs(rows.inputs, spaces, size, turn)
    sentences = []
    for (members, sure), cost in zip(certain, paid, strict=True):
        if sure != "proven":
            taken = frozenset(rows.found[i].position for i in members)
            sentences.append(Open(taken, _closed(rows, members), cost))
    return look_by_sentence(rows.inputs, how, rows.found, sentences, idle, rng)


def _closed(rows: DecodedRows, members: Sequence[int]) -> bool:
    """Say whether a sentence's last special token is among its rows."""
    return any(rows.found[i].token in rows.model.special.suffix for i in members)


def _space(
    rows: DecodedRows, signals: Signals, toward: Tensor, hidden: Tensor, members: Sequence[int]
) -> SentenceSpace:
    """Return where the row space holds a sentence."""
    model, special = rows.model, rows.model.special
    of = torch.tensor(members, dtype=torch.long, device=toward.device)
    taken = {rows.found[i].position for i in members}
    last, ends = max(taken), bool(special.suffix) and not _closed(rows, members)
    # its first and last tokens are known to be there: without their masks
    frame = [(0, special.prefix[0])] if special.prefix and 0 not in taken else []
    frame += [(last + 1, special.suffix[0])] if ends and last + 1 < model.max_length else []
    keys, queries = [signals.keys[of]], [signals.queries[of]]
    for at, token in frame:
        row = model.first_inputs(at, torch.tensor([token], device=of.device)).to(toward.dtype)
        keys.append(model.project(0, "k", row))
        queries.append(model.project(0, "q", row))
    directions = torch.cat([signals.duals[:, of], signals.beside], 1)
    received = torch.cat([toward[of], hidden])
    return SentenceSpace.of(received, directions, torch.cat(keys), torch.cat(queries), last + 1 + ends)
