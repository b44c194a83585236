"""A private batch as the model that trains on it takes it: the one place of the client that tells text from images."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor

from gradaudit.client.example_gradients import BYTES_AT_ONCE, ExampleGradients, Mode
from gradaudit.client.many_gradients import gradients_of_batches, tapped_parameters
from gradaudit.errors import BadInputError
from gradaudit.models.base import Model
from gradaudit.models.images import ImageModel
from gradaudit.models.transformers import TransformersModel
from gradaudit.types import Batch, ImageBatch, Private


class Apart(ABC):
    """The parameters that are trained, and each example's own gradient by them."""

    parameters: dict[str, Tensor]

    @abstractmethod
    def chunks(self, rows: Tensor, mode: Mode) -> Iterator[dict[str, Tensor]]:
        """Yield some examples' gradients [n, ...] by parameter name, as many at a time as memory is given.

        Args:
            rows: which of the batch.
            mode: what each part of them is computed in.
        """


class Examples(ABC):
    """One batch beside its model."""

    @abstractmethod
    def loss(self, rows: Tensor, params: Mapping[str, Tensor] | None) -> Tensor:
        """Return the mean loss of some examples, with parameters in place of the model's own."""

    @abstractmethod
    def apart(self, trained: Collection[str]) -> Apart:
        """Return the means to compute each example's own gradient, on a copy of the parameters."""

    def apart_once(self, trained: Collection[str]) -> Apart:
        """Return the means to compute it at the model's own weights, where no local step moves them."""
        return self.apart(trained)


def examples_of(model: Model, batch: Private, padding: Literal["right", "left"]) -> Examples:
    """Return a batch beside its model.

    Raises:
        BadInputError: an empty batch, or one of another kind or shape than the model takes.
    """
    if isinstance(model, TransformersModel) and isinstance(batch, Batch):
        if len(batch) == 0 or not bool(batch.mask.any(1).all()):
            raise BadInputError("the batch is empty, or one of its sentences has no token; a client needs text")
        return _Text(model, batch, padding)
    if isinstance(model, ImageModel) and isinstance(batch, ImageBatch):
        if len(batch) == 0 or batch.images.shape[1:] != model.shape:
            raise BadInputError(
                f"the batch is empty, or its images {tuple(batch.images.shape[1:])} are not of the model's shape "
                f"{model.shape}"
            )
        return _Images(model, batch)
    raise BadInputError("a model of text trains on text, and a model of images on images")


class _Text(Examples):
    def __init__(self, model: TransformersModel, batch: Batch, padding: Literal["right", "left"]) -> None:
        self._model, self._batch, self._padding = model, batch, padding

    def loss(self, rows: Tensor, params: Mapping[str, Tensor] | None) -> Tensor:
        ids, mask, labels = self.inputs(rows)
        return self._model.loss(ids=ids, mask=mask, labels=labels, params=params)

    def apart(self, trained: Collection[str]) -> Apart:
        return _TextApart(self, ExampleGradients.of(self._model, trained))

    def apart_once(self, trained: Collection[str]) -> Apart:
        if set(trained) <= tapped_parameters(self._model):
            return _TextByFactors(self, self._model, trained)
        return self.apart(trained)

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, mask and labels, no longer than the longest of them."""
        batch, device = self._batch, self._model.device
        ids, mask = batch.ids[rows].to(device), batch.mask[rows].to(device)
        longest = int(mask.sum(1).max())
        ids, mask = ids[:, :longest], mask[:, :longest]
        if self._padding == "left":
            order = mask.int().argsort(dim=1, stable=True)  # what is no token first, the tokens in their order
            ids, mask = ids.gather(1, order), mask.gather(1, order)
        return ids, mask, ids if batch.labels is None else batch.labels[rows].to(device)


class _TextApart(Apart):
    def __init__(self, text: _Text, gradients: ExampleGradients) -> None:
        self._text, self._gradients = text, gradients
        self.parameters = gradients.parameters

    def chunks(self, rows: Tensor, mode: Mode) -> Iterator[dict[str, Tensor]]:
        return self._gradients.chunks(*self._text.inputs(rows), mode)


class _TextByFactors(Apart):
    """Gradients made from what each layer read and the slopes of what it wrote: half the cost of Opacus' hooks."""

    def __init__(self, text: _Text, model: TransformersModel, trained: Collection[str]) -> None:
        self._text, self._model = text, model
        self.parameters = {name: p for name, p in model.parameters().items() if name in set(trained)}
        one = sum(p.numel() * p.element_size() for p in self.parameters.values())
        self._at_once = max(1, BYTES_AT_ONCE // one)

    def chunks(self, rows: Tensor, mode: Mode) -> Iterator[dict[str, Tensor]]:
        ids, mask, labels = (value[:, None] for value in self._text.inputs(rows))
        for part, start in enumerate(range(0, len(ids), self._at_once)):
            some = slice(start, start + self._at_once)
            chosen = labels[some] if self._model.spec.task == "classification" else None
            with mode(self._model, part):
                found = dict(gradients_of_batches(self._model, ids[some], mask[some], chosen, self.parameters, True))
            yield found


class _Images(Examples):
    def __init__(self, model: ImageModel, batch: ImageBatch) -> None:
        self.model = model
        self.images, self.labels = batch.images.to(model.device), batch.labels.to(model.device)

    def loss(self, rows: Tensor, params: Mapping[str, Tensor] | None) -> Tensor:
        return self.model.loss(self.images[rows], self.labels[rows], params)

    def apart(self, trained: Collection[str]) -> Apart:
        return _ImagesApart(self, trained)


class _ImagesApart(Apart):
    def __init__(self, batch: _Images, trained: Collection[str]) -> None:
        self._batch = batch
        own = batch.model.parameters()
        self.parameters = {n: p.detach().clone().requires_grad_() for n, p in own.items() if n in trained}
        self._fixed = {n: p.detach() for n, p in own.items() if n not in trained}
        one = sum(p.numel() * p.element_size() for p in own.values())
        self._at_once = max(1, BYTES_AT_ONCE // one)

    @torch.no_grad()
    def chunks(self, rows: Tensor, mode: Mode) -> Iterator[dict[str, Tensor]]:
        batch = self._batch
        for part, some in enumerate(torch.split(rows, self._at_once)):
            with mode(batch.model, part):
                found = batch.model.example_gradients(
                    batch.images[some], batch.labels[some], self._fixed | self.parameters
                )
            yield {name: found[name] for name in self.parameters}
