"""AEGIS' idea: send nothing of queries, keys and values, and blur the two other places that name words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradaudit.defenses.base import RoleDefense, above_zero
from gradaudit.models.base import TextModel
from gradaudit.registry import hyper, register


@register
@dataclass(frozen=True)
class Aegis(RoleDefense):
    """Freeze the attention's q, k and v, and put noise on the word rows' norms and on the feed-forward's first matrix.

    q, k and v are what exact attacks read; frozen, they are neither trained nor sent. The word embedding's gradient has
    a row for each word of the batch: every row, also those that are zero, is given a norm of its own, drawn around the
    norms that are there. The first feed-forward matrix of each block, whose row space holds the words just as well,
    gets Gaussian noise in units of its own root mean square.

    Raises:
        BadInputError: noise that is not above 0.
    """

    name: ClassVar[str] = "aegis"
    norm_noise: float = hyper(
        1.0, "standard deviation of the logarithm of a word row's norm", source="ours, after AEGIS (arXiv 2608.19534)"
    )
    matrix_noise: float = hyper(
        1.0, "noise on the first feed-forward matrix", unit="its root mean square", source="ours, as above"
    )

    def __post_init__(self) -> None:
        above_zero(self.name, "norm_noise", self.norm_noise)
        above_zero(self.name, "matrix_noise", self.matrix_noise)

    def frozen(self, model: TextModel) -> tuple[str, ...]:
        return _parameters(model, "q", "k", "v")

    def on_roles(self, model: TextModel, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        views = (view.parameter for layer in range(model.depth) for view in model.views(layer, "f"))
        noisy, words = set(views), set(model.group("word"))
        out = {}
        for name, value in tensors.items():
            if name in words:
                out[name] = self._rows(value, rng)
            elif name in noisy:
                unit = value.double().square().mean().sqrt().to(value)
                out[name] = value + self.matrix_noise * unit * torch.randn(value.shape, generator=rng).to(value)
            else:
                out[name] = value.clone()
        return out

    def _rows(self, value: Tensor, rng: torch.Generator) -> Tensor:
        norms = value.norm(dim=1, keepdim=True)
        there = norms > 0
        if not bool(there.any()):
            return value.clone()
        # a row that no word of the batch has gets a random direction, so that being zero tells nothing
        drawn = torch.randn(value.shape, generator=rng).to(value)
        directions = torch.nn.functional.normalize(torch.where(there, value, drawn), dim=1, eps=1e-30)
        sizes = (self.norm_noise * torch.randn((len(value), 1), generator=rng)).exp().to(value)
        out: Tensor = directions * sizes * norms[there].median()
        return out


def _parameters(model: TextModel, *roles: str) -> tuple[str, ...]:
    """Return all parameters of the modules that hold some roles: weights, biases and adapters."""
    found = (view.parameter for layer in range(model.depth) for role in roles for view in model.views(layer, role))
    modules = {name.partition(".lora_")[0].removesuffix(".weight") + "." for name in found}
    return tuple(name for name in model.parameters() if name.startswith(tuple(modules)))
