"""How one local step was made, as its weight change itself shows: for an attacker who was not told."""

import torch
from torch import Tensor

from gradaudit.leakage.uneven.entries import grid
from gradaudit.types import LocalTraining, Observation

UNTOLD = (
    "how the weights were changed was not told (optimizer, rate, sentences): a server that knows reads far more; see "
    "capture(..., training=...)"
)
"""Where no step that is read off explains what was sent."""
_SAMPLED = 2_000_000
"""Entries that are looked at, as many of each matrix."""
_FEWEST = 100
"""Entries that must have moved."""
_EVEN = 0.9
"""Share of the largest change that the middle one has behind one step of Adam, whose changes are all of one size: 0.98
and more there (MiniLM), below 0.2 behind SGD."""
_NEAR_TOP = (0.05, 0.01, 3e-3, 1e-3, 1e-3, 1e-3)
"""Entries that fall short of the whole rate by less than this share tell the decay, turn by turn: what eps takes off
them goes with no weight. Wider at first, since a decay that is not known yet moves them out of the window."""
_SURE = 4.0
"""A decay of fewer standard deviations is none, and one that is rounder within as many is taken."""
_HALF = 2.0**-25
"""Half the distance of the float32 numbers just below 1: one minus rate times decay is rounded to them."""
_FINE = 5e-6
"""Share of the rate to which the entries must be known that tell it; rounder rates as near are taken. The largest
gradients of one block leave 2e-6 (MiniLM), and most weights' grid is twenty times as coarse."""


def step_shown(seen: Observation) -> LocalTraining | None:
    """Return the one step of an optimizer that a weight change looks like; None where too little moved.

    Adam's first step moves nearly all entries alike: by the rate, but for what eps takes off and decay adds, which goes
    with the weight. Any other change is taken for one of SGD at a rate of 1, since a scale changes nothing that is
    read. Where the guess is wrong, no low rank explains the entries.

    Args:
        seen: the observation, of a weight change.
    """
    moved, before = _moved(seen)
    if len(moved) < _FEWEST:
        return None
    sizes = moved.abs()
    even = float(sizes.kthvalue(len(sizes) // 2 + 1).values)
    if even <= _EVEN * float(sizes.kthvalue(int(0.99 * len(sizes))).values):
        return LocalTraining("sgd", 1.0)
    clear = sizes > even / 2  # rows that were not trained on moved by their decay alone
    size, along = sizes[clear], -moved[clear].sign() * before[clear].double()
    error = grid(before[clear]) / even
    decay, unsure, top = 0.0, 0.0, even
    for window in _NEAR_TOP:
        rest = size - decay * along
        known = error < _FINE
        top = float(rest[known].max()) if bool(known.any()) else float(rest.quantile(0.999))
        near = (rest > (1 - window) * top) & (rest < (1 + window) * top)
        x, y = along[near], size[near] - size[near].mean()
        x = x - x.mean()
        spread = float(x.square().sum())
        if spread == 0 or int(near.sum()) < _FEWEST:
            break
        decay = float((x * y).sum()) / spread
        unsure = (float((y - decay * x).square().mean()) / spread) ** 0.5
    rate, within = _roundest(top, _FINE * top), _SURE * unsure + _HALF
    shrunk = 0.0 if decay < within else _roundest(decay / rate, within / rate)
    return LocalTraining("adamw", rate, weight_decay=shrunk)


def shown(how: LocalTraining) -> str:
    """Return a note of the step that explains every entry."""
    decay = f" and a weight decay of about {how.weight_decay:g}" if how.weight_decay else ""
    step = f"AdamW at {how.learning_rate:g}{decay}" if how.optimizer == "adamw" else "SGD"
    return f"how the weights were changed was not told; it is one step of {step}, which explains every entry"


def _moved(seen: Observation) -> tuple[Tensor, Tensor]:
    """Return the changes of entries that changed, and the weights before, [n] each, of matrices alone."""
    parameters = seen.model.parameters()
    changes, weights = [], []
    matrices = {name: sent for name, sent in seen.tensors.items() if sent.dim() == 2}
    for name, sent in matrices.items():
        view = seen.views[name]
        change, before = (t.detach().flatten() for t in (sent, view(parameters[view.parameter])))
        most = min(len(change), _SAMPLED // len(matrices))
        some = torch.linspace(0, len(change) - 1, most, dtype=torch.double, device=change.device).long()
        there = change[some] != 0
        changes.append(change[some][there].double())
        weights.append(before[some][there])
    return (torch.cat(changes), torch.cat(weights)) if changes else (torch.zeros(0), torch.zeros(0))


def _roundest(value: float, within: float) -> float:
    """Return the number of fewest digits that is so near."""
    near = (float(f"{value:.{digits}g}") for digits in range(1, 9))
    return next((one for one in near if abs(one - value) <= within), value)
