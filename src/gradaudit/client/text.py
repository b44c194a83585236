"""A batch of text as a model trains on it."""

from collections.abc import Collection, Iterator, Mapping

from torch import Tensor

from gradaudit.client.example_gradients import BYTES_AT_ONCE, ExampleGradients, Mode
from gradaudit.client.examples import EXAMPLES, Apart, Examples, Side, smoothed
from gradaudit.errors import BadInputError
from gradaudit.models.many_gradients import gradients_of_batches, tapped_parameters
from gradaudit.models.transformers import TransformersModel
from gradaudit.types import Batch


class _Text(Examples):
    def __init__(self, model: TransformersModel, batch: Batch, padding: Side, smoothing: float) -> None:
        if not isinstance(batch, Batch):
            raise BadInputError("a model of text trains on text, and a model of images on images")
        if len(batch) == 0 or not bool(batch.mask.any(1).all()):
            raise BadInputError("the batch is empty, or one of its sentences has no token; a client needs text")
        if smoothing and batch.labels is None:
            raise BadInputError("label_smoothing is of classes; next words have none: leave it away")
        self._model, self._batch, self._padding, self._smoothing = model, batch, padding, smoothing

    def loss(self, rows: Tensor, params: Mapping[str, Tensor] | None) -> Tensor:
        ids, mask, labels = self.inputs(rows)
        return self._model.loss(ids=ids, mask=mask, labels=labels, params=params)

    def apart(self, trained: Collection[str]) -> Apart:
        gradients = ExampleGradients.of(self._model, trained)
        return Apart(gradients.parameters, lambda rows, mode: gradients.chunks(*self.inputs(rows), mode))

    def apart_once(self, trained: Collection[str]) -> Apart:
        if not set(trained) <= tapped_parameters(self._model):
            return self.apart(trained)
        parameters = {name: p for name, p in self._model.parameters().items() if name in set(trained)}
        at_once = max(1, BYTES_AT_ONCE // sum(p.numel() * p.element_size() for p in parameters.values()))

        def chunks(rows: Tensor, mode: Mode) -> Iterator[dict[str, Tensor]]:
            # from what each layer read and the slopes of what it wrote: half the cost of Opacus' hooks
            ids, mask, labels = (value[:, None] for value in self.inputs(rows))
            for part, start in enumerate(range(0, len(ids), at_once)):
                some = slice(start, start + at_once)
                chosen = labels[some] if self._model.spec.task == "classification" else None
                with mode(self._model, part):
                    found = dict(gradients_of_batches(self._model, ids[some], mask[some], chosen, parameters, True))
                yield found

        return Apart(parameters, chunks)

    def inputs(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return token ids, mask and labels, no longer than the longest of them."""
        batch, device = self._batch, self._model.device
        ids, mask = batch.ids[rows].to(device), batch.mask[rows].to(device)
        longest = int(mask.sum(1).max())
        ids, mask = ids[:, :longest], mask[:, :longest]
        if self._padding == "left":
            order = mask.int().argsort(dim=1, stable=True)  # what is no token first, the tokens in their order
            ids, mask = ids.gather(1, order), mask.gather(1, order)
        if batch.labels is None:
            return ids, mask, ids
        return ids, mask, smoothed(batch.labels[rows].to(device), self._model.spec.labels, self._smoothing)


EXAMPLES.add("text", _Text)
