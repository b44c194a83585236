"""Words of a guess exchanged one by one: proposed by slope, judged by the likeness itself, until nothing helps."""

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from gradaudit.leakage.matching.similarity import Likeness
from gradaudit.progress import answering, step

_TOGETHER = 1e-6
"""A likeness this near to 1 cannot grow."""
_KICKED = 3
"""Words exchanged at random where no single exchange helps."""
_NEAR = 16
"""Words of a slot, by slope, that a random exchange takes from."""


@dataclass(frozen=True)
class Guess:
    """Words and labels, and how like their update is to the one that was seen.

    Args:
        ids: [B, T].
        labels: [B]; None where next words are predicted.
        likeness: -1 to 1.
    """

    ids: Tensor
    labels: Tensor | None
    likeness: float


@dataclass(frozen=True)
class Exchanges:
    """How words are exchanged.

    Args:
        free: [B, T] bool, slots that may change.
        words: [V] bool, words that may be put in.
        classes: labels that may be put in, 0 where they are known.
        proposals: exchanges that are judged a round.
        evaluations: gradients computed at most.
    """

    free: Tensor
    words: Tensor
    classes: int
    proposals: int
    evaluations: int


def exchange_words(like: Likeness, start: Guess, how: Exchanges, rng: torch.Generator, what: str) -> Guess:
    """Return the likest guess found.

    The steepest proposals of all slots are judged and what helps is kept. Where none helps, slots are looked through
    one by one, since the words of some slots move the update little; where that does not help either, a few words are
    exchanged at random and the search goes on from there.

    Args:
        like: the likeness.
        start: where to start.
        how: what may be exchanged, and how often.
        rng: draws the order of slots and the random exchanges.
        what: name for the progress bar.

    Raises:
        StoppedError: Ctrl-C, with the likeliest guess until then.
    """
    best = now = start
    around = torch.empty(0)  # slopes of the likest guess, for the kicks that start from it
    with answering(lambda _: best):
        while like.spent < how.evaluations and best.likeness < 1 - _TOGETHER:
            step(what, min(like.spent, how.evaluations), how.evaluations)
            slopes = like.slopes(now.ids, now.labels)
            slopes = slopes.masked_fill(~(how.free[..., None] & how.words), -torch.inf)
            around = slopes if now is best else around
            better = _steepest(like, now, slopes, how)
            if better is now:
                better = _slot_by_slot(like, now, slopes, how, rng)
            now = better if better is not now else _kicked(like, best, around, how, rng)
            best = now if now.likeness > best.likeness else best
    step(what, how.evaluations, how.evaluations)
    return best


def _steepest(like: Likeness, now: Guess, slopes: Tensor, how: Exchanges) -> Guess:
    """Return a guess with the best of the steepest exchanges, and with others that still help beside it."""
    count = min(how.proposals, int(how.free.sum()) * int(how.words.sum()))
    found = [_with(like, now, *divmod(at, slopes.shape[-1])) for at in slopes.flatten().topk(count).indices.tolist()]
    if now.labels is not None:
        for row, label in product(range(len(now.labels)), range(how.classes)):
            other = now.labels.clone()
            other[row] = label
            found.append(Guess(now.ids, other, like(now.ids, other)))
    best = now
    for one in sorted(found, key=lambda one: -one.likeness):
        if one.likeness <= now.likeness:
            break
        if best is now:
            best = one
            continue
        labels = best.labels
        if labels is not None and one.labels is not None and now.labels is not None:
            labels = torch.where(one.labels != now.labels, one.labels, labels)
        ids = torch.where(one.ids != now.ids, one.ids, best.ids)
        both = Guess(ids, labels, like(ids, labels))
        best = both if both.likeness > best.likeness else best
    return best


def _slot_by_slot(like: Likeness, now: Guess, slopes: Tensor, how: Exchanges, rng: torch.Generator) -> Guess:
    """Return a guess with the best word of the first slot, in random order, where one helps; else the same guess."""
    slots = how.free.flatten().nonzero().flatten().cpu()
    count = min(how.proposals, int(how.words.sum()))
    for slot in slots[torch.randperm(len(slots), generator=rng)].tolist():
        if like.spent >= how.evaluations:
            break
        near = slopes.flatten(0, 1)[slot].topk(count).indices.tolist()
        best = max((_with(like, now, slot, word) for word in near), key=lambda one: one.likeness)
        if best.likeness > now.likeness:
            return best
    return now


def _with(like: Likeness, now: Guess, slot: int, word: int) -> Guess:
    """Return a guess with another word in a slot of [B * T]."""
    ids = now.ids.clone()
    ids.view(-1)[slot] = word
    return Guess(ids, now.labels, like(ids, now.labels))


def _kicked(like: Likeness, best: Guess, slopes: Tensor, how: Exchanges, rng: torch.Generator) -> Guess:
    """Return the best guess with some words exchanged at random for others that their slots' slopes speak for."""
    slots = how.free.flatten().nonzero().flatten().cpu()
    ids = best.ids.clone()
    for slot in slots[torch.randperm(len(slots), generator=rng)[:_KICKED]].tolist():
        near = slopes.flatten(0, 1)[slot].topk(min(_NEAR, int(how.words.sum()))).indices
        ids.view(-1)[slot] = near[int(torch.randint(len(near), (), generator=rng))]
    return Guess(ids, best.labels, like(ids, best.labels))
