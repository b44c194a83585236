"""What a defense is: a frozen dataclass that acts at one place of the client's work."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from gradaudit.defense_traits import Law, Trait
from gradaudit.errors import BadInputError
from gradaudit.models.base import Model, TextModel
from gradaudit.types import Batch


class Defense(ABC):
    """What all defenses share.

    Subclasses are frozen dataclasses; their fields are the defense's parameters and are recorded in the update.
    """

    kind: ClassVar[str] = "defense"
    name: ClassVar[str]
    acts_on: ClassVar[str]
    traits: ClassVar[frozenset[Trait]] = frozenset({"other"})
    """What an attacker who is told of it can reckon with; empty where an update shows it by what is absent."""
    law: ClassVar[Law | None] = None
    """How likely an update behind it is, where that is known."""
    never_longer: ClassVar[bool] = False
    """True when it makes no update longer than it was."""

    def bound(self, before: float | None, tensors: int) -> float | None:
        """Return the largest norm of an update behind the defense; None where there is none.

        Args:
            before: of what enters it.
            tensors: how many are sent.
        """
        return before if self.never_longer else None

    def noise(self, before: float | None, tensors: int, steps: int) -> Noise | None:
        """Return the noise that is added to what is sent, and what of it is limited; None for no noise.

        Args:
            before: largest norm of what enters the defense; None for no limit.
            tensors: how many are sent.
            steps: the client's local steps.
        """
        return None

    def deviation(self, sent: Tensor, examples: int | None) -> float | None:
        """Return the standard deviation of the noise in each entry of a tensor, as one who is told of it knows it.

        Args:
            sent: what the defense made of the tensor.
            examples: of the batch; None where they are not known.

        Returns:
            None where it adds none, or of no known size.
        """
        return None


@dataclass(frozen=True)
class Noise:
    """Gaussian noise as privacy accounting takes it.

    Args:
        multiplier: standard deviation, in the unit of `sensitivity`.
        sensitivity: by how much what is replaced changes a sum; None where nothing limits it.
        whose: what is replaced.
        steps: how often it is added.
        without: why no epsilon follows, where none does.
    """

    multiplier: float = 0.0
    sensitivity: float | None = None
    whose: str = "the whole update (one sentence has no more)"
    steps: int = 1
    without: str | None = None


def above_zero(defense: str, field: str, value: float) -> None:
    """Refuse a parameter that is not above 0 and finite.

    Raises:
        BadInputError: names defense, field and value.
    """
    if not 0 < value < math.inf:
        raise BadInputError(f"defense '{defense}': {field} must be above 0 and finite, got {value}")


class UpdateDefense(Defense):
    """A defense on the finished update, before it leaves the client.

    One that treats each tensor by itself writes `on_many`, for many updates at a time; any other writes `on_update`.
    """

    acts_on: ClassVar[str] = "update"
    deterministic: ClassVar[bool] = False
    """True when the same update always becomes the same."""
    gaussian: ClassVar[bool] = False
    """True when it ends in independent Gaussian noise of one size a tensor: see `before_noise`."""

    @property
    def by_tensor(self) -> bool:
        """Whether each tensor is treated by itself, so that `on_many` can be called."""
        return type(self).on_many is not UpdateDefense.on_many

    def on_update(self, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        """Return the defended tensors: same names, shapes and dtypes; the input is left as it was.

        Args:
            tensors: the update by parameter name.
            rng: the defense's own random stream (on the CPU).
        """
        return {name: self.on_many(value[None], rng)[0] for name, value in tensors.items()}

    def on_many(self, values: Tensor, rng: torch.Generator) -> Tensor:
        """Return one parameter's tensors [n, ...] of n updates, each defended as `on_update` would.

        Args:
            values: left as they were.
            rng: the defense's own random stream (on the CPU); independent draws for each update.

        Raises:
            NotImplementedError: the defense looks at the whole update.
        """
        raise NotImplementedError(f"defense '{self.name}' looks at the whole update")

    def before_noise(self, values: Tensor) -> tuple[Tensor, Tensor]:
        """Return what noise is added to, [n, ...], and its standard deviation for each update, [n].

        Raises:
            NotImplementedError: the defense does not end in Gaussian noise.
        """
        raise NotImplementedError(f"defense '{self.name}' does not end in Gaussian noise")

    def on_mean(self, mean: Mapping[str, Tensor], clients: int, rng: torch.Generator) -> dict[str, Tensor] | None:
        """Return a draw of the mean of what so many clients send, where the mean of their updates decides its law.

        Args:
            mean: of the clients' updates, before the defense.
            clients: each of which defends its own.
            rng: the defense's own random stream (on the CPU).

        Returns:
            None where it does not: each client's own update is needed then.
        """
        return None

    def on_each(self, several: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        """Return what several clients send, [clients, ...] like what they give."""
        if self.by_tensor:
            return {name: self.on_many(value, rng) for name, value in several.items()}
        count = len(next(iter(several.values())))
        sent = [self.on_update({name: value[n] for name, value in several.items()}, rng) for n in range(count)]
        return {name: torch.stack([one[name] for one in sent]) for name in several}

    def mean_of_each(self, several: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        """Return a draw of the mean of what several clients send, in tensors of its own; see `on_each`."""
        if not self.gaussian and self.by_tensor:
            return {name: self._mean_of_rows(value, rng) for name, value in several.items()}
        if not self.gaussian:
            return {name: mean_of(value) for name, value in self.on_each(several, rng).items()}
        out = {}
        for name, value in several.items():
            base, deviations = self.before_noise(value)
            # independent noises: variances add up
            size = float(deviations.square().sum().sqrt()) / len(value)
            noise = torch.randn(value.shape[1:], generator=rng, dtype=value.dtype).to(value.device)
            out[name] = mean_of(base).add_(noise, alpha=size)
        return out

    def _mean_of_rows(self, values: Tensor, rng: torch.Generator) -> Tensor:
        # one client's tensor at a time stays in the processor's cache, where the work of most defenses is reading
        total = torch.zeros_like(values[0])
        for one in values:
            total += self.on_many(one[None], rng)[0]
        return total.div_(len(values))


def mean_of(values: Tensor, weights: Tensor | None = None) -> Tensor:
    """Return the mean of tensors [n, ...] over the first axis, each times its own weight [n] where there are some.

    As one product: several times faster than a sum over the axis that is farthest apart in memory.
    """
    factors = torch.ones(len(values)).to(values) if weights is None else weights.to(values)
    return ((factors / len(values)) @ values.flatten(1)).view(values.shape[1:])


def by_update(values: Tensor, like: Tensor) -> Tensor:
    """Return one number an update, [n], in the shape that multiplies tensors [n, ...]."""
    return values.view(-1, *[1] * (like.dim() - 1))


class ModelDefense(Defense):
    """A defense on what is trained, and how: it changes no update, and says so before there is one."""

    acts_on: ClassVar[str] = "model"

    def frozen(self, model: Model) -> tuple[str, ...]:
        """Return the names of the parameters that are neither trained nor sent.

        Raises:
            BadInputError: a choice that the model does not have.
        """
        return ()

    def dropout(self) -> float | None:
        """Return the dropout rate in force at every place that drops out; None leaves it to the client."""
        return None


class RoleDefense(Defense):
    """A defense that treats matrices by their roles: some are not trained, others changed before they leave."""

    acts_on: ClassVar[str] = "model and update"

    @abstractmethod
    def frozen(self, model: TextModel) -> tuple[str, ...]:
        """Return the names of the parameters that are neither trained nor sent."""

    @abstractmethod
    def on_roles(self, model: TextModel, tensors: Mapping[str, Tensor], rng: torch.Generator) -> dict[str, Tensor]:
        """Return the defended tensors; as `UpdateDefense.on_update`, with the model that tells their roles."""


class BatchDefense(Defense):
    """A defense on the private batch, before anything is computed from it."""

    acts_on: ClassVar[str] = "batch"

    @abstractmethod
    def on_batch(self, model: TextModel, batch: Batch, rng: torch.Generator) -> Batch:
        """Return the batch that is trained on: as many sentences of the same lengths and labels.

        Args:
            model: the global model.
            batch: the private batch, which is left as it was.
            rng: the defense's own random stream (on the CPU).
        """


class ExampleDefense(Defense):
    """A defense on the examples' gradients, before they are summed: it makes the gradient of every local step."""

    acts_on: ClassVar[str] = "example gradients"

    @property
    @abstractmethod
    def sampled(self) -> bool:
        """Whether each example enters a local step by chance (Poisson sampling), and not in shuffled batches."""

    @abstractmethod
    def of_several(self, clients: int) -> ExampleDefense:
        """Return the defense whose gradient of all examples has the law of the mean of so many clients' gradients."""

    @abstractmethod
    def on_examples(
        self,
        chunks: Iterable[Mapping[str, Tensor]],
        parameters: Mapping[str, Tensor],
        expected: float,
        rng: torch.Generator,
    ) -> dict[str, Tensor]:
        """Return the step's defended gradient: names, shapes and dtypes of the parameters.

        Args:
            chunks: the examples' gradients by parameter name, [n, ...] each, some examples at a time; none where
                sampling chose no example.
            parameters: what is trained, by name.
            expected: examples a step in the mean, by which the sum is divided.
            rng: the defense's own random stream (on the CPU).
        """
