"""The client, replayed on public text: what a learned attack is trained on. No private batch is in here."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from gradaudit.client.simulation import SIMULATIONS, ReplayedClient
from gradaudit.defenses.base import BatchDefense, ExampleDefense, RoleDefense, UpdateDefense
from gradaudit.learned.public import Part
from gradaudit.models.many_gradients import gradients_of_batches, tapped_parameters
from gradaudit.models.transformers import TransformersModel
from gradaudit.streams import draw_seed, stream
from gradaudit.types import Batch

AT_ONCE = 16
"""Updates computed together: more no longer fit a core's cache (LTI's transformer, CPU)."""
_ENTRIES_AT_ONCE = 1 << 28
"""Entries of the largest parameter that are held together at most."""


@dataclass(frozen=True)
class ClientSimulation(ReplayedClient):
    """Simulated updates of a client, many in one pass wherever factors make them.

    One gradient of the whole batch with dropout off is made in one pass for many batches, whatever acts on the text or
    on the update after it. Local steps, dropout, several clients, left padding and defenses of examples' gradients are
    replayed by the client itself, one batch after the other.
    """

    @property
    def model(self) -> TransformersModel:
        """The client's model, of text."""
        assert isinstance(self.client.model, TransformersModel)
        return self.client.model

    @property
    def random(self) -> bool:
        behind = self._defenses()
        last = behind[-1] if behind else None
        quiet = [d for d in behind if not (isinstance(d, UpdateDefense) and d.deterministic)]
        only_noise = last is not None and quiet == [last] and isinstance(last, UpdateDefense) and last.gaussian
        # where a whole update is looked at, its noise is drawn with it, and not left to come
        drawn = bool(quiet) and not (only_noise and self.at_once and self._by_tensor())
        batch = any(isinstance(d, (BatchDefense, ExampleDefense)) for d in self.client.defenses)
        shuffled = self.client.training.optimizer != "none" and self.client.training.minibatch is not None
        return drawn or batch or shuffled or self.client.dropout_in_force() > 0

    @cached_property
    def at_once(self) -> bool:
        """Whether many updates come out of one pass."""
        client = self.client
        guarded = any(isinstance(d, ExampleDefense) for d in client.defenses)
        plain = client.training.one_gradient and client.clients == 1 and client.padding == "right"
        if guarded or not plain or client.dropout_in_force() > 0:
            return False
        return set(client.trained()) <= tapped_parameters(self.model)

    def __call__(
        self, ids: Tensor, mask: Tensor, labels: Tensor | None, rng: torch.Generator
    ) -> Iterator[tuple[slice, Iterator[Part]]]:
        seed = draw_seed(rng)
        largest = max(p.numel() for p in self.client.model.parameters().values())
        some = max(1, min(AT_ONCE, _ENTRIES_AT_ONCE // largest)) if self.at_once else 1
        for start in range(0, len(ids), some):
            rows = slice(start, min(start + some, len(ids)))
            chosen = None if labels is None else labels[rows]
            own = stream(seed, "simulated", start)
            act = self._together if self.at_once else self._alone
            yield rows, act(ids[rows], mask[rows], chosen, own)

    def _alone(self, ids: Tensor, mask: Tensor, labels: Tensor | None, rng: torch.Generator) -> Iterator[Part]:
        with torch.enable_grad():  # learned attacks check what they learned without gradients of their own
            update = self.client.update(_batch(ids[0], mask[0], None if labels is None else labels[0]), rng).tensors
        for name, view in self.views.items():
            yield Part(name, view(update[view.parameter])[None])

    def _together(self, ids: Tensor, mask: Tensor, labels: Tensor | None, rng: torch.Generator) -> Iterator[Part]:
        client, device = self.client, self.client.model.device
        seed = draw_seed(rng)
        for place, defense in enumerate(client.defenses):
            if isinstance(defense, BatchDefense):
                ids, mask = self._replaced(defense, ids, mask, labels, stream(seed, "text", place))
        trained = client.trained()
        here = None if labels is None else labels.to(device)
        made = gradients_of_batches(self.model, ids.to(device), mask.to(device), here, trained)
        behind = self._defenses()
        rngs = [stream(seed, "defense", place) for place in range(len(behind))]
        wanted = {view.parameter for view in self.views.values()}
        if self._by_tensor():
            for name, value in made:
                if name in wanted:
                    yield from self._seen(name, *self._defended(value, rngs))
            return
        tensors = dict(made)
        for defense, own in zip(behind, rngs, strict=True):
            tensors = self._whole(defense, tensors, len(ids), own)
        for name, value in tensors.items():
            yield from self._seen(name, value, None)

    def _replaced(
        self, defense: BatchDefense, ids: Tensor, mask: Tensor, labels: Tensor | None, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        new = [
            defense.on_batch(self.model, Batch(i.cpu(), m.cpu(), None if labels is None else labels[n].cpu(), ()), rng)
            for n, (i, m) in enumerate(zip(ids, mask, strict=True))
        ]
        return torch.stack([b.ids for b in new]), torch.stack([b.mask for b in new])

    def _defenses(self) -> list[UpdateDefense | RoleDefense]:
        return [d for d in self.client.defenses if isinstance(d, (UpdateDefense, RoleDefense))]

    def _by_tensor(self) -> bool:
        return all(isinstance(d, UpdateDefense) and d.by_tensor for d in self._defenses())

    def _defended(self, value: Tensor, rngs: list[torch.Generator]) -> tuple[Tensor, Tensor | None]:
        """Return a parameter's tensors [n, ...] behind all defenses, and what Gaussian noise is still to come."""
        behind = [d for d in self._defenses() if isinstance(d, UpdateDefense)]
        for number, (defense, own) in enumerate(zip(behind, rngs, strict=True), 1):
            if defense.gaussian and number == len(behind):
                return defense.before_noise(value)
            value = defense.on_many(value, own)
        return value, None

    def _whole(
        self, defense: UpdateDefense | RoleDefense, tensors: Mapping[str, Tensor], count: int, rng: torch.Generator
    ) -> dict[str, Tensor]:
        if isinstance(defense, UpdateDefense) and defense.by_tensor:
            return {name: defense.on_many(value, rng) for name, value in tensors.items()}
        each = []
        for n in range(count):
            one = {name: value[n] for name, value in tensors.items()}
            if isinstance(defense, UpdateDefense):
                each.append(defense.on_update(one, rng))
            else:
                each.append(defense.on_roles(self.model, one, rng))
        return {name: torch.stack([one[name] for one in each]) for name in each[0]}

    def _seen(self, parameter: str, value: Tensor, noise: Tensor | None) -> Iterator[Part]:
        for name, view in self.views.items():
            if view.parameter == parameter:
                whole = view.name == view.parameter
                yield Part(name, value if whole else torch.vmap(view)(value), noise)

    def try_out(self, public: Any, rows: Tensor, size: int, rng: torch.Generator) -> None:
        texts = public.take(rows)
        shape = (-1, size, texts.ids.shape[1])
        classes = None if texts.labels is None else texts.labels.view(-1, size)
        for _, parts in self(texts.ids.view(shape), texts.mask.view(shape), classes, rng):
            for _ in parts:
                pass


def _batch(ids: Tensor, mask: Tensor, labels: Tensor | None) -> Batch:
    """Return public text as the client takes it."""
    longest = int(mask.sum(1).max())
    return Batch(ids[:, :longest].cpu(), mask[:, :longest].cpu(), None if labels is None else labels.cpu(), ())


SIMULATIONS.add("text", ClientSimulation)
