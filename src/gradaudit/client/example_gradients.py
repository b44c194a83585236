"""Each example's own gradient, many in one backward pass (Opacus' hooks)."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradaudit.errors import BadInputError
from gradaudit.models.base import Model
from gradaudit.models.transformers import TransformersModel

BYTES_AT_ONCE = 2**30
"""Gradients that are held together; a constant, because dropout's masks are drawn anew for each part of a batch."""

Mode = Callable[[Model, int], AbstractContextManager[None]]
"""What the n-th part of a batch is computed in: training mode, with dropout's own random stream or with none."""


class ExampleGradients:
    """A copy of a model whose backward passes give a gradient an example.

    Args:
        model: the model; it is left as it is.
        trained: names of the parameters that are trained.

    Raises:
        BadInputError: the extra `dp` is not installed.
    """

    _kept: ClassVar[WeakKeyDictionary[TransformersModel, ExampleGradients]] = WeakKeyDictionary()

    @classmethod
    def of(cls, model: TransformersModel, trained: Collection[str]) -> ExampleGradients:
        """Return the copy of a model as its weights are now; the last copy is used again, which saves making one."""
        found = cls._kept.get(model)
        if found is None or list(found.parameters) != [n for n in model.parameters() if n in set(trained)]:
            found = cls._kept[model] = cls(model, trained)
            return found
        with torch.no_grad():
            mine = found._model.parameters()
            for name, p in model.parameters().items():
                mine[name].copy_(p)
        return found

    def __init__(self, model: TransformersModel, trained: Collection[str]) -> None:
        try:
            from opacus import GradSampleModule
        except ImportError:
            raise BadInputError("gradients an example need Opacus: pip install 'gradaudit[dp]'") from None
        self._model = copy.deepcopy(model)
        self.parameters: dict[str, Any] = {}
        for name, p in self._model.parameters().items():
            p.requires_grad_(name in trained)
            if name in trained:
                self.parameters[name] = p
        for part in self._model.module.modules():
            # Opacus refuses parts with buffers for BatchNorm's sake; here they are constants, as Gemma's scale of words
            for name in list(part._buffers) if any(True for _ in part.parameters(recurse=False)) else ():
                setattr(part, name, part._buffers.pop(name).clone())
        self._module: Any = GradSampleModule(self._model.program, loss_reduction="sum", strict=False)
        one = sum(p.numel() * p.element_size() for p in self.parameters.values())
        self._at_once = max(1, BYTES_AT_ONCE // one)

    def chunks(self, ids: Tensor, mask: Tensor, labels: Tensor, mode: Mode) -> Iterator[dict[str, Tensor]]:
        """Yield the examples' gradients [n, ...] by parameter name, as many examples at a time as memory is given.

        Args:
            ids: [B, T] token ids; B may be 0, which yields nothing.
            mask: [B, T], True where a token is real.
            labels: [B] classes, or the [B, T] tokens.
            mode: what each part of the batch is computed in.
        """
        for part, start in enumerate(range(0, len(ids), self._at_once)):
            rows = slice(start, start + self._at_once)
            with mode(self._model, part), self._model.family.apart(), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # torch's on backward hooks of inputs without gradients
                logits = self._module(ids[rows], None, mask[rows])
                torch.autograd.backward(self._model.sentence_losses(logits, mask[rows], labels[rows]).sum())
            yield {name: self._taken(p, len(logits)) for name, p in self.parameters.items()}
            self._module.zero_grad(set_to_none=True)

    def _taken(self, p: Any, count: int) -> Tensor:
        found = p.grad_sample
        # a parameter that the loss does not reach
        return torch.zeros((count, *p.shape), dtype=p.dtype, device=p.device) if found is None else found.detach()
