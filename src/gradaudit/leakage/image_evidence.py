"""How badly images explain an update: the defenses that the attacker was told of, as a law of what is sent."""

from __future__ import annotations

import torch
from torch import Tensor

from gradaudit.leakage.image_matching import PRUNING
from gradaudit.leakage.matching import as_gradient
from gradaudit.models.images import ImageModel
from gradaudit.types import Observation

EXPLAINED = ("gaussian", "sign", *PRUNING)
"""Defenses that have a law here, one at a time."""


class ImageEvidence:
    """Minus the log likelihood of an update, given images.

    Noise: Gaussian, of the size that was told. Signs, and the largest coordinates: an update either has these signs, or
    these largest coordinates, or has not; so that one can go downhill, each coordinate's violation is counted in units
    of a slack that is given. What was not sent is no larger than the smallest number that was.

    Args:
        seen: the observation.
    """

    def __init__(self, seen: Observation[ImageModel]) -> None:
        self._model, self._observed = seen.model, as_gradient(seen)
        told = [dict(d) for d in seen.knowledge.defenses or ()]
        self.explained = len(told) <= 1 and all(d["name"] in EXPLAINED for d in told)
        """False where a defense has no law here."""
        self._told = told[0] if told else {"name": "none"}
        sent = torch.cat([v[v != 0] for v in self._observed.values()])
        self.unit = float(sent.square().mean().sqrt()) if len(sent) else 1.0
        """Root mean square of the numbers that were sent: what a slack is told in."""
        self._least = self._smallest()

    def _smallest(self) -> dict[str, float]:
        found = {name: v[v != 0].abs() for name, v in self._observed.items()}
        least = {name: float(v.min()) if len(v) else torch.inf for name, v in found.items()}
        if self._told.get("whole"):
            least = dict.fromkeys(least, min(least.values()))
        return least

    def __call__(self, images: Tensor, labels: Tensor, slack: float) -> Tensor:
        """Return [N] for N guesses.

        Args:
            images: [N, B, C, H, W].
            labels: [N, B].
            slack: in multiples of `unit`; noise has its own size.
        """
        made = self._model.gradients(images, labels)
        return torch.stack([self._of(name, made[name], v, slack) for name, v in self._observed.items()]).sum(0)

    def _of(self, name: str, made: Tensor, observed: Tensor, slack: float) -> Tensor:
        how = self._told["name"]
        if how == "sign":
            wrong = torch.relu(-made * observed)
            return (wrong / (slack * self._typical(made))).flatten(1).sum(1)
        off, size = made - observed, slack * self.unit
        if how == "gaussian":
            relative = bool(self._told.get("relative"))
            size = float(self._told["sigma"]) * (float(observed.square().mean().sqrt()) if relative else 1.0)
        elif how == "topk":
            off = torch.where(observed != 0, off, torch.relu(made.abs() - self._least[name]))
        elif how == "random-pruning":
            off = torch.where(observed != 0, off, 0.0)
        return (off / max(size, 1e-12)).square().flatten(1).sum(1) / 2

    @staticmethod
    def _typical(made: Tensor) -> Tensor:
        """Return the root mean square [N, 1, ...] of predicted tensors, as a constant: signs tell no scale."""
        flat = made.detach().flatten(1).square().mean(1).sqrt().clamp_min(1e-12)
        return flat.view(-1, *[1] * (made.dim() - 1))
