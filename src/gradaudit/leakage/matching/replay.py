"""Matching a weight change of several local steps: the guess is trained on as the client did, differentiably.

Read as one gradient, such a change is fitted by the true batch only to first order in learning rate times steps.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from gradaudit.errors import NotSupportedError
from gradaudit.leakage.matching.compiled import asked
from gradaudit.leakage.matching.distances import Distance
from gradaudit.leakage.matching.factored import of_whole
from gradaudit.leakage.matching.masks import Masks
from gradaudit.leakage.matching.objective import Objective
from gradaudit.leakage.observed import sgd_steps
from gradaudit.models.local_steps import Parameters, by_descent, in_order, local_steps
from gradaudit.types import Observation


def objective_of(seen: Observation, distance: Distance, replayed: int) -> Objective:
    """Return what matching minimizes: local SGD steps replayed where they are known and few, one gradient otherwise.

    With dropout on, or where that is not known, a weight change is read as one gradient too: every step has masks of
    its own.

    Args:
        seen: the observation.
        distance: what to measure.
        replayed: steps replayed at most; memory and time grow with each.
    """
    if seen.kind == "delta" and seen.knowledge.dropout == 0.0 and 1 < (sgd_steps(seen) or 0) <= replayed:
        return Replay(seen, distance)
    return Objective(seen, distance)


class Replay(Objective):
    """How far the weight change that a guess causes in all of the client's local steps lies from the observed one.

    Minibatches are taken in the order of the guess: the client's is not known. What the selection leaves out is taken
    to be trained as well, unless everything was selected; the word table, which a guess of vectors looks nothing up in,
    stays as it is.

    Args:
        seen: the observation; its knowledge must hold batch size and training by SGD.
        distance: what to measure, in units of a gradient.

    Raises:
        NotSupportedError: nothing is left to match, or no known training by SGD.
    """

    additive: ClassVar[bool] = False

    def __init__(self, seen: Observation, distance: Distance) -> None:
        super().__init__(seen, distance)
        how = seen.knowledge.training
        if how is None or not how.descends:
            raise NotSupportedError("only known local steps of SGD can be replayed")
        self._training, self.passes = how, how.steps(self._size)
        every = self.model.parameters()
        shared = {view.parameter for view in seen.views.values()}
        trained = shared if seen.selection == "all" else set(every)
        self._trained = sorted(trained - set(self.model.group("word")))
        self._whole = {name: self._target(self._observed[name].reshape(1, -1)) for name in self._matched}

    def __call__(self, embeddings: Tensor, mask: Tensor, labels: Tensor, masks: Masks | None = None) -> Tensor:
        if masks is not None:
            raise NotSupportedError("local steps are replayed without dropout")
        learning = torch.is_grad_enabled()
        found = []
        for n, vectors in enumerate(embeddings):
            change = self._change(vectors, mask if mask.dim() == 2 else mask[n], labels[n], learning)
            total = torch.zeros(1, device=vectors.device, dtype=vectors.dtype)
            for name, target in self._whole.items():
                view = self._views[name]
                total = total + of_whole(view(change[view.parameter]).reshape(1, 1, -1), target, self.distance)
            found.append(total * self.distance.share(len(self._whole)))
        return torch.cat(found)

    def details(self) -> dict[str, Any]:
        told = {"compiled": "replayed steps are not compiled"} if asked() else {}
        return super().details() | told | {"replayed_steps": self.passes}

    def notes(self) -> list[str]:
        if self._training.minibatch is not None and self._training.minibatch < self._size:
            return ["the client's minibatches were replayed in the guess's order: theirs is not known"]
        return []

    def _change(self, vectors: Tensor, mask: Tensor, labels: Tensor, learning: bool) -> dict[str, Tensor]:
        """Return the weight change of all trained parameters, divided by -(learning rate x steps)."""
        every, rate = self.model.parameters(), self._training.learning_rate
        fixed = {name: p.detach() for name, p in every.items() if name not in set(self._trained)}
        start = {name: every[name].detach() for name in self._trained}
        local = {name: p.clone().requires_grad_() for name, p in start.items()}

        def slopes(params: Parameters, rows: Tensor, step: int) -> dict[str, Tensor]:
            own = params if learning else {name: p.detach().requires_grad_() for name, p in params.items()}
            loss = self.model.loss(embeddings=vectors[rows], mask=mask[rows], labels=labels[rows], params=fixed | own)
            found = torch.autograd.grad(
                loss, list(own.values()), create_graph=learning, allow_unused=True, materialize_grads=True
            )
            return dict(zip(own, found, strict=True))

        with torch.enable_grad():
            local = local_steps(local, in_order(self._training, len(vectors)), slopes, by_descent(rate))
        if not learning:
            local = {name: p.detach() for name, p in local.items()}
        scale = rate * self._training.steps(len(vectors))
        return {name: (start[name] - p) / scale for name, p in local.items()}
