"""The client, replayed on public images: what a learned attack on images is trained on."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradaudit.client.simulation import SIMULATIONS, ReplayedClient
from gradaudit.defenses.base import UpdateDefense
from gradaudit.models.images import ImageModel
from gradaudit.streams import draw_seed, stream
from gradaudit.types import ImageBatch

_NUMBERS_AT_ONCE = 1 << 26
"""Entries of all updates that are held together at most."""


@dataclass(frozen=True)
class ImageSimulation(ReplayedClient):
    """Simulated updates of a client that trains on images, many in one pass where nothing forbids it.

    One gradient behind defenses of the update is made in one pass for many batches; local steps, several clients and
    defenses of examples' gradients are replayed by the client itself, one batch after the other.
    """

    @property
    def model(self) -> ImageModel:
        """The client's model."""
        assert isinstance(self.client.model, ImageModel)
        return self.client.model

    @property
    def at_once(self) -> bool:
        """Whether many updates come out of one pass."""
        client = self.client
        alone = not client.training.one_gradient or client.clients > 1
        return not alone and all(isinstance(d, UpdateDefense) for d in client.defenses)

    @property
    def random(self) -> bool:
        """True when the same images give another update the next time."""
        drawn = any(not (isinstance(d, UpdateDefense) and d.deterministic) for d in self.client.defenses)
        return drawn or (not self.at_once and self.client.training.minibatch is not None)

    def __call__(self, images: Tensor, labels: Tensor, rng: torch.Generator) -> Tensor:
        """Return updates [n, numbers], the seen tensors one after the other.

        Args:
            images: [n, B, C, H, W] public images, B an update.
            labels: [n, B].
            rng: of defenses and minibatches; another one gives fresh noise.
        """
        seed = draw_seed(rng)
        size = sum(p.numel() for p in self.model.parameters().values())
        some = max(1, _NUMBERS_AT_ONCE // size) if self.at_once else 1
        made = [
            self._made(images[start : start + some], labels[start : start + some], stream(seed, "simulated", start))
            for start in range(0, len(images), some)
        ]
        return torch.cat(made)

    @torch.no_grad()
    def _made(self, images: Tensor, labels: Tensor, rng: torch.Generator) -> Tensor:
        if not self.at_once:
            with torch.enable_grad():
                update = self.client.update(ImageBatch(images[0].cpu(), labels[0].cpu()), rng).tensors
            tensors = {name: value[None] for name, value in update.items()}
        else:
            trained = set(self.client.trained())
            tensors = {n: t for n, t in self.model.gradients(images, labels).items() if n in trained}
            seed = draw_seed(rng)
            for place, defense in enumerate(self.client.defenses):
                assert isinstance(defense, UpdateDefense)
                tensors = defense.on_each(tensors, stream(seed, "defense", place))
        seen = [torch.vmap(view)(tensors[view.parameter]).flatten(1) for view in self.views.values()]
        return torch.cat(seen, 1)

    def try_out(self, public: Any, rows: Tensor, size: int, rng: torch.Generator) -> None:
        images, labels = public.images[rows], public.labels[rows]
        self(images.view(-1, size, *images.shape[1:]), labels.view(-1, size), rng)


SIMULATIONS.add("images", ImageSimulation)
