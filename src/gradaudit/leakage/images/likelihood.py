"""How badly images explain an update: the defenses that the attacker was told of, as a law of what is sent."""

from typing import Any

import torch
from torch import Tensor

from gradaudit.defense_traits import deviation_told, law_of
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.observed import as_gradient, sgd_steps
from gradaudit.models.images import ImageModel
from gradaudit.types import Observation

LAWS = "under one defense of noise, signs or pruning, or none, of a gradient or the weight change of one SGD step"
"""What has a law, for messages."""


def has_law(seen: Observation[ImageModel]) -> bool:
    """Say whether what was sent has a law here: of several local steps the truth itself would not explain it."""
    told = seen.knowledge.defenses or ()
    return len(told) <= 1 and all(law_of(d) for d in told) and (seen.kind == "gradient" or sgd_steps(seen) == 1)


class ImageEvidence:
    """Minus the log likelihood of an update, given images.

    Noise: Gaussian, of the size that was told. Signs, and the largest coordinates: an update either has these signs, or
    these largest coordinates, or has not; so that one can go downhill, each coordinate's violation is counted in units
    of a slack that is given. What was not sent is no larger than the smallest number that was.

    Args:
        seen: the observation.

    Raises:
        NotSupportedError: what was sent has no law here.
    """

    def __init__(self, seen: Observation[ImageModel]) -> None:
        if not has_law(seen):
            raise NotSupportedError(f"images have no likelihood here but {LAWS}")
        self._model, self._observed = seen.model, as_gradient(seen)
        self._told: dict[str, Any] = next((dict(d) for d in seen.knowledge.defenses or ()), {})
        how = seen.knowledge.training
        # noise was added to what was sent, and is told in its units
        self._rate = how.learning_rate if seen.kind == "delta" and how is not None else 1.0
        sent = torch.cat([v[v != 0] for v in self._observed.values()])
        self.unit = float(sent.square().mean().sqrt()) if len(sent) else 1.0
        """Root mean square of the numbers that were sent: what a slack is told in."""
        found = {name: v[v != 0].abs() for name, v in self._observed.items()}
        self._least = {name: float(v.min()) if len(v) else torch.inf for name, v in found.items()}
        if self._told.get("whole"):
            self._least = dict.fromkeys(self._least, min(self._least.values()))

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
        how = law_of(self._told)
        if how == "signs":
            # by the root mean square of what is predicted, as a constant: signs tell no scale
            typical = made.detach().flatten(1).square().mean(1).sqrt().clamp_min(1e-12)
            wrong = torch.relu(-made * observed.sign())
            return (wrong / (slack * typical.view(-1, *[1] * (made.dim() - 1)))).flatten(1).sum(1)
        off, size = made - observed, slack * self.unit
        if how == "gaussian":
            size = (deviation_told([self._told], observed * self._rate) or 0.0) / self._rate
        elif how == "largest":
            off = torch.where(observed != 0, off, torch.relu(made.abs() - self._least[name]))
        elif how == "support":
            off = torch.where(observed != 0, off, 0.0)
        return (off / max(size, 1e-12)).square().flatten(1).sum(1) / 2
