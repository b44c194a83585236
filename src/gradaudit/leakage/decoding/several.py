"""Several sentences from a noisy or compressed gradient: words placed and linked, then taken out one by one.

What each word brought and each position received (`pairs`) places the words of a batch in spite of the noise, and the
attention signals link them (`linking`), both less surely than on a clean gradient. No span is left to mend a sentence
in or to prove it: the likeness of its own gradient to what is left of the one sent decides, and what it explains of
that is taken off before the next sentence is looked for.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradaudit.leakage.decoding.assembly import Placed, linked_by, propose
from gradaudit.leakage.decoding.order import AT_ONCE, Ordered, classes_of, judged, mended
from gradaudit.leakage.decoding.pairs import Pairs, placed_signals
from gradaudit.leakage.rowspace.deflation import Matrices, sentence_gradient
from gradaudit.models.base import TextModel
from gradaudit.progress import step

_SPARE = 1.25
"""So many pairs are linked for each word and special token: words may occur more than once."""
_BEYOND = 4
"""Positions looked at beyond those that as long sentences as the words allow would fill."""
_RIDGE = 1e-2
"""Of linking: a hundred times that on clean signals."""
_JUDGED = 96
"""Proposals whose gradients are computed, those of the strongest pairs first."""


@torch.no_grad()
def place_words(
    model: TextModel, stacked: Tensor, roles: Sequence[str], words: Sequence[int], size: int
) -> Placed | None:
    """Return words at positions and who attends to whom; None where words and positions are too many for the width.

    Args:
        model: an encoder, dropout off.
        stacked: [out, d] block 0's gradients that share an input.
        roles: what is stacked, in order; q and k are linked.
        words: token ids of the batch, special ones left out.
        size: sentences.
    """
    special = model.special
    # the last position is not known: sentences rarely are twice as long as their mean
    longest = min(model.max_length, 2 * -(-len(words) // size) + _BEYOND, stacked.shape[1] - len(words) - 4)
    positions, tokens, rows = [], [], []
    for position in range(longest):
        if position < len(special.prefix):
            here = torch.tensor(special.prefix[position : position + 1], device=stacked.device)
        else:
            here = torch.tensor([*words, *special.suffix[-1:]], device=stacked.device)
        positions.append(torch.full_like(here, position))
        tokens.append(here)
        rows.append(model.first_inputs(position, here).double())
    if not rows:
        return None
    pairs = Pairs(torch.cat(positions), torch.cat(tokens), torch.cat(rows))
    signals = placed_signals(model, stacked, pairs)
    if signals is None:
        return None
    strength = signals.norm(dim=1)
    order = strength.argsort(descending=True)[: int(_SPARE * (len(words) + 2 * size))]
    pairs, strength, signals = pairs.pick(order), strength[order], signals[order]
    sizes = dict.fromkeys(roles, signals.shape[1] // len(roles))
    support = linked_by(model, pairs, signals, sizes, _RIDGE)
    return Placed(pairs, strength, support, len(pairs))


def take_off(model: TextModel, found: Ordered, left: Matrices) -> Matrices:
    """Return what a sentence's own gradient, scaled to fit best tensor by tensor, leaves."""
    own = sentence_gradient(model, found.tokens, found.label, left)
    return {k: g - ((g * own[k]).sum() / own[k].square().sum().clamp_min(1e-300)) * own[k] for k, g in left.items()}


def unmix(
    model: TextModel,
    placed: Placed,
    sent: Matrices,
    words: Sequence[int],
    size: int,
    evaluations: int,
    rng: torch.Generator,
) -> list[Ordered]:
    """Return the sentences of a batch, the one first whose gradient is most like the one sent.

    Args:
        model: an encoder that classifies.
        placed: from `place_words`.
        sent: the gradients compared, by (block, role).
        words: token ids of the batch.
        size: sentences.
        evaluations: gradients computed at most to mend a sentence, all together.
        rng: draws the order in which changes are tried.
    """
    proposals = propose(model, placed, lengths=3)
    ends = (len(model.special.prefix), len(model.special.suffix))
    left, found = sent, list[Ordered]()
    while len(found) < size and proposals:
        step(f"decode: {len(found)} of {size} sentences", len(found), size)
        options = [p[ends[0] : len(p) - ends[1]] for p in proposals[:_JUDGED]]
        options = [option for option in options if option]
        parts = [options[at : at + AT_ONCE] for at in range(0, len(options), AT_ONCE)]
        starts = [one for part in parts for y in classes_of(model) for one in judged(model, part, y, left)]
        if not starts:
            break
        start = max(starts, key=lambda s: s.likeness)
        best = mended(model, start, words, left, evaluations // size, rng)
        found.append(best)
        left = take_off(model, best, left)
        # a word goes with its sentence, unless it stands in others too
        used = set(best.inner)
        proposals = [p for p in proposals if 2 * len(used & set(p)) <= len(p)]
    return found
