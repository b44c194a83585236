"""A sentence mended in the span of block 1: tokens exchanged, one position at a time, until all of its rows lie there.

In block 1 a row depends on the whole sentence. So a token that is tried is judged twice: by its own row among the
sentence's other tokens, one pass for all that are tried, and the best of them by the rows of the whole sentence.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gradaudit.leakage.decoding.pairs import Pairs
from gradaudit.leakage.one_matrix.signal import Signal
from gradaudit.leakage.one_matrix.word_rows import rows_among
from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.models.base import TextModel

_FITS, _FITS_ABOUT, _ABOUT = 5e-4, 3.0, (5e-3, 0.25)
"""A sentence whose rows in block 1 lie this near the span, in their root mean square, fits it: right ones are at 5e-6,
and one wrong word puts a row above 5e-2. In a span that is not known exactly, so many expected distances (MiniLM,
AdamW: right ones at 1.0 to 2.3, wrong ones mostly from 4.8, one wrong word of 28 at 2.6), no nearer than a fit comes to
known entries, and no farther than wrong ones may lie (behind noise of 30% of an entry's size: right ones to 0.17, wrong
ones from 0.4)."""
_WORST = 8
"""Positions at which exchanges are tried first, those with the worst rows."""
_OPTIONS, _TURNS = 8, 24
"""Tokens tried a position, those whose own rows come nearest, and exchanges of a proposal."""
_GAIN = 1e-3
"""Fall of the mean square distance for which a token is exchanged."""
_ROWS = 8192
"""Token rows of candidate sentences evaluated together: bounds memory."""


@torch.no_grad()
def misfit(model: TextModel, span: Span, sentences: Sequence[tuple[int, ...]]) -> tuple[Tensor, Tensor]:
    """Return the distance of each sentence's rows from a deeper block's span, and its mean square, of which 1 fits.

    Args:
        model: the model.
        span: of block 1 or a deeper one.
        sentences: token ids, of any lengths.

    Returns:
        [n, T] by token, 1 after a sentence's end, and [n].
    """
    device = span.basis.device
    lengths = torch.tensor([len(s) for s in sentences], device=device)
    out = torch.ones((len(sentences), int(lengths.max())), device=device)
    for length in sorted({len(s) for s in sentences}):
        for some in torch.split(torch.where(lengths == length)[0], max(1, _ROWS // length)):
            ids = torch.tensor([sentences[i] for i in some.tolist()], device=device)
            rows = model.attention_inputs(span.layer, ids)
            fits = (_FITS_ABOUT * span.expected(rows)).clamp(*(_ABOUT if span.lost is not None else (_FITS, _FITS)))
            out[some, :length] = (span.residual(rows) / fits).to(out)
    inside = torch.arange(out.shape[1], device=device)[None] < lengths[:, None]
    return out, (out.square() * inside).sum(1) / lengths


def descend(model: TextModel, second: Span, near: Pairs, sentence: tuple[int, ...]) -> tuple[tuple[int, ...], Tensor]:
    """Mend a sentence by exchanging tokens, one position at a time, for others of the batch, while that helps.

    At each position those are tried whose own rows fit best among the sentence's other tokens, one pass for all.

    Args:
        model: the model.
        second: block 1's span.
        near: words at positions, those of the batch and no matter how little each sends.
        sentence: where to start.

    Returns:
        The sentence and its residuals in block 1's span, [T].
    """
    ending = model.special.suffix[-1:]
    residuals = misfit(model, second, [sentence])[0][0]
    for _ in range(_TURNS):
        if float(residuals.square().mean()) < 1:
            break
        far = own_distances(model, second, near, sentence)
        worst = [p for p in residuals.argsort(descending=True).tolist() if p > 0]
        better = None
        # wrong tokens have the worst rows: the others are tried only where exchanging these does not help
        for part in (worst[:_WORST], worst[_WORST:]):
            tried = []
            for position in part:
                at = torch.where(near.positions == position)[0]
                fits = far[at]
                if ending and position == len(sentence) - 1:  # it would go on: its end stands behind
                    fits = own_distances(model, second, near.pick(at), (*sentence, *ending))
                tokens = near.tokens[at[fits.argsort()[:_OPTIONS]]].tolist()
                tried += exchanged(sentence, position, tokens, ending)
            tried = [one for one in dict.fromkeys(tried) if len(one) <= model.max_length]
            if not tried:
                continue
            scores, values = misfit(model, second, tried)
            short = torch.tensor([len(one) < len(sentence) for one in tried], device=values.device)
            # of a sentence cut short few rows are left to be wrong: that says nothing unless all of them fit
            values[short & (values >= 1)] = torch.inf
            best = int(values.argmin())
            if float(values[best]) < float(residuals.square().mean()) - _GAIN:
                better = tried[best], scores[best, : len(tried[best])]
                break
        if better is None:
            break
        sentence, residuals = better
    return sentence, residuals


def exchanged(
    sentence: tuple[int, ...], position: int, tokens: Sequence[int], ending: Sequence[int]
) -> list[tuple[int, ...]]:
    """Return a sentence with each of other tokens at a position; one that ends sentences ends it there.

    In the place of the end a token makes the sentence longer by one.

    Args:
        sentence: token ids.
        position: in it.
        tokens: to put there.
        ending: the token that ends every sentence, if there is one.
    """
    found: list[tuple[int, ...]] = []
    for token in tokens:
        if token == sentence[position]:
            continue
        if token in ending:
            found.append((*sentence[:position], token))
        elif position < len(sentence) - 1 or not ending:
            found.append((*sentence[:position], token, *sentence[position + 1 :]))
        else:
            found.append((*sentence[:position], token, *ending))
    return found


def own_distances(model: TextModel, second: Span, pairs: Pairs, sentence: tuple[int, ...]) -> Tensor:
    """Return how far from a deeper block's span each pair's own row lies, put alone into a sentence, [n].

    Args:
        model: the model.
        second: the span.
        pairs: tokens at positions; 1 for those behind the sentence's end.
        sentence: token ids.
    """
    far = torch.ones(len(pairs), device=pairs.positions.device)
    inside = pairs.positions < len(sentence)
    places = torch.unique(pairs.positions[inside])
    there = [torch.where(pairs.positions == place)[0] for place in places]
    if not there:
        return far
    words = pad_sequence([pairs.tokens[at] for at in there], batch_first=True)
    signal = Signal(second.layer, "q", second.basis[None], differences=False)  # q, k and v read the same
    rows = rows_among(model, signal, torch.tensor(sentence, device=far.device), places, words)
    for at, some in zip(there, rows, strict=True):
        far[at] = second.residual(some[: len(at)]).to(far)
    return far
