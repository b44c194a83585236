"""Matching a weight change of several local steps on images: the guess is trained on as the client did, differentiably.

As `replay` for text. Read as one gradient, such a change is fitted by the true images only to first order in learning
rate times steps.
"""

from typing import Any

from torch import Tensor
from torch.func import grad, vmap

from gradaudit.leakage.images.matching import ImageMatch, ImageObjective
from gradaudit.leakage.observed import sgd_steps
from gradaudit.models.images import ImageModel
from gradaudit.models.local_steps import Parameters, by_rule, in_order, local_steps
from gradaudit.types import LocalTraining, Observation


def image_objective(seen: Observation[ImageModel], match: ImageMatch, replayed: int) -> ImageObjective:
    """Return what matching minimizes: local SGD steps replayed where they are known and few, one gradient otherwise.

    Args:
        seen: the observation.
        match: the distance.
        replayed: steps replayed at most; memory and time grow with each.
    """
    how, steps = seen.knowledge.training, sgd_steps(seen)
    if seen.kind == "delta" and how is not None and steps is not None and 1 < steps <= replayed:
        return ImageReplay(seen, match, how, steps)
    return ImageObjective(seen, match)


class ImageReplay(ImageObjective):
    """How far the weight change that guessed images cause in all of the client's steps lies from the observed one.

    Minibatches are taken in the order of the guess: the client's is not known. What the selection leaves out is taken
    to be trained as well, unless everything was selected.

    Args:
        seen: the observation, a weight change.
        match: the distance.
        training: by SGD, as the client's.
        steps: local steps that it takes.
    """

    def __init__(self, seen: Observation[ImageModel], match: ImageMatch, training: LocalTraining, steps: int) -> None:
        super().__init__(seen, match)
        self._training, self.passes = training, steps
        every = self._model.parameters()
        shared = {view.parameter for view in seen.views.values()}
        trained = shared if seen.selection == "all" else set(every)
        self._start = {name: p.detach() for name, p in every.items() if name in trained}
        self._fixed = {name: p.detach() for name, p in every.items() if name not in trained}

    def __call__(self, images: Tensor, labels: Tensor) -> Tensor:
        change = vmap(self._change)(images, labels)
        return self._match(change, self._observed)

    def details(self) -> dict[str, Any]:
        return {"replayed_steps": self.passes}

    def notes(self) -> tuple[str, ...]:
        if self._training.minibatch is not None and self._training.minibatch < (self._size or 1):
            return ("the client's minibatches were replayed in the guess's order: theirs is not known",)
        return ()

    def _change(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        """Return the weight change of all trained parameters, divided by -(learning rate x steps)."""

        def slopes(params: Parameters, rows: Tensor, step: int) -> Parameters:
            def loss(own: Parameters) -> Tensor:
                return self._model.loss(images[rows], labels[rows], self._fixed | own)

            found: Parameters = grad(loss)(params)
            return found

        batches = in_order(self._training, len(images), self._model.device)
        local = local_steps(self._start, batches, slopes, by_rule(self._training, self.passes))
        scale = self._training.learning_rate * self.passes
        return {name: (self._start[name] - p) / scale for name, p in local.items()}
