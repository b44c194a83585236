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
from gradaudit.models.local_steps import Parameters, by_rule, in_groups, in_order, local_steps
from gradaudit.types import Observation


def objective_of(seen: Observation, distance: Distance, replayed: int) -> Objective:
    """Return what matching minimizes: local steps replayed where they are known and few, one gradient otherwise.

    With dropout on, or where that is not known, several steps of plain SGD are read as one gradient too: every step has
    masks of its own. Those of other optimizers are no gradient, and are replayed as if it were off.

    Args:
        seen: the observation.
        distance: what to measure.
        replayed: steps replayed at most; memory and time grow with each.
    """
    how, steps = seen.knowledge.training, seen.knowledge.steps
    if seen.kind == "delta" and how is not None and steps is not None and seen.knowledge.batch_size is not None:
        as_one = steps == 1 or seen.knowledge.dropout != 0.0
        if 0 < steps <= replayed and not (how.descends and as_one):
            return Replay(seen, distance)
    return Objective(seen, distance)


class Replay(Objective):
    """How far the weight change that a guess causes in all of the client's local steps lies from the observed one.

    Minibatches are taken in the order of the guess: the client's is not known. What the selection leaves out is taken
    to be trained as well, unless everything was selected; the word table, which a guess of vectors looks nothing up in,
    stays as it is.

    Args:
        seen: the observation; its knowledge must hold batch size and training.
        distance: what to measure, in units of a gradient: the change as a share of all steps' rates.

    Raises:
        NotSupportedError: nothing is left to match, or no known training.
    """

    additive: ClassVar[bool] = False
    replays: ClassVar[bool] = True

    def __init__(self, seen: Observation, distance: Distance) -> None:
        super().__init__(seen, distance)
        how = seen.knowledge.training
        assert how is not None  # `as_gradient` refuses what is not known
        self._training, self.passes = how, how.steps(self._size)
        self._masked = seen.knowledge.dropout != 0.0
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
        said = []
        if self._training.minibatch is not None and self._training.minibatch < self._size:
            said.append("the client's minibatches were replayed in the guess's order: theirs is not known")
        if self._masked:
            said.append("dropout was on, or may have been, and was replayed as off")
        return said

    def _change(self, vectors: Tensor, mask: Tensor, labels: Tensor, learning: bool) -> dict[str, Tensor]:
        """Return the weight change of all trained parameters, divided by -(mean rate x steps)."""
        every, count = self.model.parameters(), self._training.steps(len(vectors))
        fixed = {name: p.detach() for name, p in every.items() if name not in set(self._trained)}
        start = {name: every[name].detach() for name in self._trained}
        local = {name: p.clone().requires_grad_() for name, p in start.items()}

        def slopes(params: Parameters, some: tuple[Tensor, ...], step: int) -> dict[str, Tensor]:
            own = params if learning else {name: p.detach().requires_grad_() for name, p in params.items()}
            loss = torch.zeros((), device=vectors.device, dtype=vectors.dtype)
            for rows in some:
                one = self.model.loss(
                    embeddings=vectors[rows], mask=mask[rows], labels=labels[rows], params=fixed | own
                )
                loss = loss + one / self._training.accumulate
            found = torch.autograd.grad(
                loss, list(own.values()), create_graph=learning, allow_unused=True, materialize_grads=True
            )
            return dict(zip(own, found, strict=True))

        with torch.enable_grad():
            batches = in_groups(in_order(self._training, len(vectors)), self._training.accumulate)
            local = local_steps(local, batches, slopes, by_rule(self._training, count))
        if not learning:
            local = {name: p.detach() for name, p in local.items()}
        scale = self._training.mean_rate(count) * count
        return {name: (start[name] - p) / scale for name, p in local.items()}
