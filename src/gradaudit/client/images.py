"""A batch of images as a model trains on it."""

from collections.abc import Collection, Iterator, Mapping

import torch
from torch import Tensor

from gradaudit.client.example_gradients import BYTES_AT_ONCE, Mode
from gradaudit.client.examples import EXAMPLES, Apart, Examples, Side, smoothed
from gradaudit.errors import BadInputError
from gradaudit.models.images import ImageModel
from gradaudit.types import ImageBatch


class _Images(Examples):
    def __init__(self, model: ImageModel, batch: ImageBatch, padding: Side, smoothing: float) -> None:
        if not isinstance(batch, ImageBatch):
            raise BadInputError("a model of text trains on text, and a model of images on images")
        if len(batch) == 0 or batch.images.shape[1:] != model.shape:
            raise BadInputError(
                f"the batch is empty, or its images {tuple(batch.images.shape[1:])} are not of the model's shape "
                f"{model.shape}"
            )
        self.model = model
        self.images = batch.images.to(model.device)
        self.labels = smoothed(batch.labels.to(model.device), model.spec.labels, smoothing)

    def loss(self, rows: Tensor, params: Mapping[str, Tensor] | None) -> Tensor:
        return self.model.loss(self.images[rows], self.labels[rows], params)

    def apart(self, trained: Collection[str]) -> Apart:
        own = self.model.parameters()
        parameters = {n: p.detach().clone().requires_grad_() for n, p in own.items() if n in trained}
        fixed = {n: p.detach() for n, p in own.items() if n not in trained}
        at_once = max(1, BYTES_AT_ONCE // sum(p.numel() * p.element_size() for p in own.values()))

        @torch.no_grad()
        def chunks(rows: Tensor, mode: Mode) -> Iterator[dict[str, Tensor]]:
            for part, some in enumerate(torch.split(rows, at_once)):
                with mode(self.model, part):
                    found = self.model.example_gradients(self.images[some], self.labels[some], fixed | parameters)
                yield {name: found[name] for name in parameters}

        return Apart(parameters, chunks)


EXAMPLES.add("images", _Images)
