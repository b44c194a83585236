"""Whether all that was shared agrees with sentences that were read from a part of it: an honest client's does."""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from gradaudit.models.base import TextModel
from gradaudit.models.many_gradients import gradients_of_batches, tapped_parameters
from gradaudit.models.views import ROLES, View
from gradaudit.types import Observation

_APART = 0.02
"""Share of a matrix that sentences which made all of it may leave: honest ones leave 1e-5."""
_OUTSIDE = 0.1
"""Share of what sentences send that may lie outside a matrix which others are in too."""
_WEAK = 1e-5
"""Directions weaker than this share of the strongest are rounding."""
_MORE = 1.5
"""A matrix has at most as many directions as there are tokens; those of block 0 may be fewer, of equal rows."""


def apart(
    seen: Observation, sentences: Sequence[tuple[int, ...]], weights: Sequence[tuple[float, ...]], whole: bool
) -> list[str]:
    """Return the shared matrices that do not hold what sentences send, each up to a positive scale.

    Args:
        seen: one gradient, dropout off.
        sentences: token ids.
        weights: by label, how much of each one's own gradient was in it.
        whole: the sentences are all of the batch; else each matrix may hold more, and only roles are looked at.
    """
    if not whole:
        roles = dict(_roles(seen))
        own = _own(seen, sentences, weights, roles)
        return [view.name for view, found in roles.items() if view in own and not _holds(found, own[view])]
    said = []
    for view, sent in _own(seen, sentences, weights, seen.views.values()).items():
        got = seen.tensors[view.name].detach().double()
        along = (got * sent).sum() / (got.norm() * sent.norm()).clamp_min(1e-300)
        if bool(got.any()) and float(along) < (1 - _APART**2) ** 0.5:
            said.append(view.name)
    return said


def overfull(seen: Observation, sentences: Sequence[tuple[int, ...]], rank: int) -> list[str]:
    """Return the shared tensors that no batch of so many tokens with these sentences sends, whatever was dropped.

    Args:
        seen: one gradient.
        sentences: token ids, of some of the batch.
        rank: of block 0.
    """
    said = [view.name for view, found in _roles(seen) if len(_directions(found)[1]) > _MORE * rank]
    tokens = sorted({token for sentence in sentences for token in sentence})
    for name in seen.model.group("word"):
        rows = seen.tensors.get(name)
        if rows is not None and bool(rows.any()) and not bool(rows[tokens].any(1).all()):
            said.append(name)
    return said


def doubted(certificates: Sequence[str], against: Sequence[str], notes: list[str]) -> list[str]:
    """Return certificates without proofs where other shared tensors speak against the sentences, and note it.

    Args:
        certificates: of each sentence.
        against: names of those tensors.
        notes: to which it is added.
    """
    if not against or "proven" not in certificates:
        return list(certificates)
    more = f" and {len(against) - 1} others" if len(against) > 1 else ""
    notes.append(f"nothing is proven: {against[0]}{more} cannot be of an honest update with these sentences")
    return ["likely" if one == "proven" else one for one in certificates]


def _own(
    seen: Observation,
    sentences: Sequence[tuple[int, ...]],
    weights: Sequence[tuple[float, ...]],
    views: Iterable[View],
) -> dict[View, Tensor]:
    """Return what sentences send, by the matrices that are wanted."""
    model: TextModel = seen.model
    longest = max(map(len, sentences))
    ids = torch.tensor([[*s, *[0] * (longest - len(s))] for s in sentences], device=model.device)
    lengths = torch.tensor([len(s) for s in sentences], device=model.device)
    mask = torch.arange(longest, device=model.device) < lengths[:, None]
    targets = torch.tensor(weights, device=model.device) * len(sentences)  # the loss is their mean
    wanted = {view.parameter for view in views} & tapped_parameters(model)
    found = dict(gradients_of_batches(model, ids[None], mask[None], targets[None], wanted))
    own = {view: view(found[view.parameter][0]).double() for view in views if view.parameter in found}
    return {view: sent for view, sent in own.items() if sent.dim() > 1}


def _roles(seen: Observation) -> Iterator[tuple[View, Tensor]]:
    """Yield the matrices of roles that were shared and are not zero."""
    for layer in range(seen.model.depth):
        for role in ROLES:
            views = seen.model.views(layer, role)
            shared = [v for v in views if v.name in seen.tensors or v.parameter in seen.tensors]
            for view, tensor in zip(shared, seen.role(layer, role), strict=True):
                if bool(tensor.any()):
                    yield view, tensor.detach().double()


def _directions(matrix: Tensor) -> tuple[bool, Tensor]:
    """Return whether they are of the columns, and the directions of the shorter side that are not rounding, [n, d].

    Of the rows where the sides are alike: in block 0 sentences share a first row, and its columns are their sum.
    """
    columns = matrix.shape[0] < matrix.shape[1]
    gram = matrix @ matrix.T if columns else matrix.T @ matrix
    values, vectors = torch.linalg.eigh(gram)
    return columns, vectors[:, values > _WEAK**2 * values[-1]].T


def _holds(matrix: Tensor, own: Tensor) -> bool:
    columns, directions = _directions(matrix)
    if len(directions) == min(matrix.shape):
        return False  # noise: the proof says that there are fewer tokens than that
    side = own.T if columns else own
    outside = side - (side @ directions.T) @ directions
    return float(outside.norm()) <= _OUTSIDE * float(own.norm())
