"""Decoding rows that dropout has masked: a code word with erasures, found again by linear programming.

Token (t, p) enters block 0 as a known row x with some coordinates set to zero: m * x, m in {0, 1}^d. For a token of
the batch m * x lies in the row space R [d, r] of the gradient: d - r linear equations for a mask that is mostly 1. The
largest mask, max sum |x_j| m_j over 0 <= m <= 1 with m * x in R, is a linear program in the style of decoding by linear
programming (Candes and Tao, 2005), and the box makes it stronger than robust regression: a mask that is all zeros and
ones is its only solution while d - r exceeds what the dropped coordinates cost (docs/exact-decoding.md has the curve).
Operator splitting (ADMM; Boyd et al., 2011) solves it for hundreds of candidates at once with two thin products a
step. Flipping coordinates while that brings the masked row nearer to the span makes the mask exact; what is left then
is rounding, so the test for membership is as sharp as without dropout.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gradaudit.leakage.rowspace.subspace import Span
from gradaudit.types import Observation

BEHIND = (
    "dropout is on, and not where words and positions come in (attention dropout alone): words are placed, and no "
    "deeper block can check them"
)
HALF = 0.5
"""A coordinate of which the linear program keeps more is taken for kept."""
_SMALLEST = 1e-2
"""Coordinates below this share of a typical one are not forbidden: a copy would hardly notice."""
_PUSH = 0.05
"""Step of the objective against the projections; 0.01 to 0.2 decode alike (measured at b/d of 0.52 and 0.76)."""
_RELAXATION = 1.8
"""Over-relaxation of the splitting (Eckstein and Bertsekas, 1992): 84 steps decode what 140 do without it (257 and 255
of 370 tokens, MPNet, b/d of 0.65, 272 and 272 of 300 at 0.53; MiniLM, 0.64 and 0.61, 165 and 164 of 197, 153 and 153 of
178; in development, by hand)."""
_SOFTENING = 0.3
"""Reweighting 1 / (distance to the nearer of 0 and 1 + 0.3); 0.1 decodes alike."""
_CHUNK = 1024
"""Candidates solved together: bounds memory."""
_WHOLE, _KEPT = 1e-3, 1e-3
"""A first row this near the span without a mask was not masked: dropout leaves at least a tenth of it outside. And the
chance that it is kept whole, below which a whole one says that nothing is dropped there."""


def unmasked(seen: Observation, first: Span, rate: float | None = None) -> bool:
    """Say whether nothing is dropped on the way into block 0: some first token lies in the span as it is.

    Of keys alone, which hold differences, some second token's difference to the first.

    Args:
        seen: the observation.
        first: block 0's span.
        rate: of dropout somewhere in the model, which may have kept a whole row by chance; None: it is off, or unknown.
    """
    if rate and (seen.knowledge.batch_size or 1) * (1 - rate) ** seen.model.width > _KEPT:
        return False
    prefix = seen.model.special.prefix[:1]
    ids = torch.tensor(prefix, device=first.basis.device) if prefix else None
    rows = seen.model.first_inputs(0, ids)
    if first.roles == ("k",) and prefix:
        rows = seen.model.first_inputs(1, None) - rows
    return float(first.residual(rows).min()) < _WHOLE


@torch.no_grad()
def relaxed_masks(
    basis: Tensor,
    rows: Tensor,
    *,
    forbidden: Tensor | None = None,
    rng: torch.Generator | None = None,
    steps: int = 36,
    rounds: int = 4,
    leaning: Tensor | None = None,
    least: float = 0.0,
) -> Tensor:
    """Return [n, d] in 0 to 1, what the linear program keeps of each coordinate.

    Args:
        basis: [d, r] orthonormal.
        rows: [n, d] clean rows x.
        forbidden: [n, d] bool, coordinates that must be dropped; none when None.
        rng: draws random weights for the objective, for another try where the plain one failed.
        steps: splitting steps of the first round (more change nothing: the rounds finish).
        rounds: further rounds of a third of the steps, reweighted so that coordinates near 0 or 1 are drawn there
            (decodes 151 of 153 in place of 147 at b/d = 0.52).
        leaning: [r, r] symmetric positive definite: in place of lying anywhere in the span, a masked row with
            coordinates c in the basis pays c^T (leaning^-1 - 1) c / 2.
        least: a row of which the first round keeps a smaller share gets no further rounds.
    """
    wide = basis.shape[1] * 2 > len(basis)
    right = basis if leaning is None else basis @ leaning
    # float32: only the side of 1/2 on which a coordinate falls is read, and `refine_masks` measures in float64
    through = [(right @ basis.T).float()] if wide else [right.float(), basis.float().T]
    parts = []
    for start in range(0, len(rows), _CHUNK):
        some = slice(start, start + _CHUNK)
        without = None if forbidden is None else forbidden[some]
        parts.append(_solve(through, rows[some], without, rng, steps, rounds, least))
    return torch.cat(parts) if parts else torch.zeros_like(rows, dtype=torch.float32)


def _solve(
    through: Sequence[Tensor],
    rows: Tensor,
    forbidden: Tensor | None,
    rng: torch.Generator | None,
    steps: int,
    rounds: int,
    least: float,
) -> Tensor:
    x = torch.nn.functional.normalize(rows, dim=1).float() * rows.shape[1] ** 0.5
    low, high = x.clamp_max(0), x.clamp_min(0)
    if forbidden is not None:
        low, high = low.masked_fill(forbidden, 0.0), high.masked_fill(forbidden, 0.0)
    base = _PUSH * x.sign()
    if rng is not None:
        base = base * 2 * torch.rand(x.shape, generator=rng).to(x)
    inside, boxed, dual = _split(through, base, (low, high), x, torch.zeros_like(x), steps)
    kept: Tensor = boxed / x
    at = torch.where((kept > HALF).double().mean(1) >= least)[0]
    x, low, high, base, inside, boxed, dual = (t[at] for t in (x, low, high, base, inside, boxed, dual))
    for _ in range(rounds if len(at) else 0):
        mask = (inside / x).clamp(0, 1)
        weight = 1 / (1 - mask + _SOFTENING) - 1 / (mask + _SOFTENING)
        push = base * weight / weight.abs().mean(1, keepdim=True).clamp_min(1e-12)
        inside, boxed, dual = _split(through, push, (low, high), boxed, dual, steps // 3)
    kept[at] = boxed / x
    return kept


def _split(
    through: Sequence[Tensor], push: Tensor, box: tuple[Tensor, Tensor], boxed: Tensor, dual: Tensor, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the masked rows in the span, those in the box, and what is between them, after further splitting steps."""
    inside = boxed
    for _ in range(steps):
        inside = boxed - dual
        for one in through:
            inside = inside @ one
        dual = dual.add(inside, alpha=_RELAXATION).add_(boxed, alpha=1 - _RELAXATION)
        boxed = torch.clamp(dual + push, *box)
        dual -= boxed
    return inside, boxed, dual


@torch.no_grad()
def refine_masks(outside: Tensor, rows: Tensor, kept: Tensor, flips: int = 80) -> tuple[Tensor, Tensor]:
    """Correct a nearly right mask coordinate by coordinate until the masked row lies in the span.

    The masked row's part outside the span is linear in the mask, so what flipping one coordinate does to its squared
    norm has a closed form; the best flip is taken while one helps. At the right mask nothing is left but rounding.

    Args:
        outside: [d, d] projector onto the span's complement, float64.
        rows: [n, d] clean inputs.
        kept: [n, d] bool, masks to start from.
        flips: most flips a row.

    Returns:
        The masks, and [n] the norm of what lies outside the span, relative to the masked row's.
    """
    kept = kept.clone()
    left = torch.where(kept, rows, torch.zeros_like(rows)) @ outside
    leverage = outside.diagonal()
    every = torch.arange(len(rows), device=rows.device)
    for _ in range(flips):
        move = torch.where(kept, -rows, rows)
        change = 2 * move * left + move.square() * leverage
        best = change.argmin(1)
        helps = change[every, best] < -1e-14 * rows.square().sum(1)
        if not bool(helps.any()):
            break
        at, which = every[helps], best[helps]
        left[at] += move[at, which][:, None] * outside[which]
        kept[at, which] ^= True
    masked = torch.where(kept, rows, torch.zeros_like(rows))
    left = masked @ outside  # anew: the running sum has gathered rounding
    return kept, left.norm(dim=1) / masked.norm(dim=1).clamp_min(1e-300)


def coordinates_to_forbid(row: Tensor, known: Tensor, tries: int, rng: torch.Generator) -> Tensor:
    """Return [tries, d] bool, one coordinate a try at which a copy not known yet may be zero and no known one is.

    Copies of one (token, position) have masks of their own. With a coordinate forbidden that every known copy keeps,
    no known copy, nor any mixture of them, solves the program any more; one that has dropped it still does. That is
    one try in ten at rate 0.1 for each copy left.

    Args:
        row: [d] clean row.
        known: [k, d] bool, masks of the copies found so far.
        tries: how many.
        rng: chooses.
    """
    kept_by = known.sum(0) * (row.abs() > _SMALLEST * row.square().mean().sqrt())
    most = torch.where(kept_by == kept_by.max())[0]
    order = torch.randperm(len(most), generator=rng).repeat(-(-tries // len(most)))[:tries]
    picked = most[order.to(most.device)]
    return torch.nn.functional.one_hot(picked, len(row)).bool()
