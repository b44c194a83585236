"""Gradient matching: distances between updates, the update a guess would cause, and its minimization.

Everything is batched over candidates: a guess is [N, B, T, d] and a distance returns [N], so that restarts,
permutations and beams are evaluated together.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import grad, vmap

from gradaudit.errors import NotSupportedError
from gradaudit.progress import track
from gradaudit.types import Observation


class Distance(ABC):
    """A distance between predicted and observed update tensors, with its derivative in closed form.

    The derivative lets `minimize` push the error back through the model without a graph over the (large) tensors.
    """

    @abstractmethod
    def __call__(self, predicted: Sequence[Tensor], observed: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        """Return the distance of each candidate and its derivative.

        Args:
            predicted: tensors of shape [N, ...], one a view.
            observed: tensors of shape [...], in the same order.

        Returns:
            [N] distances, and d distance / d predicted with the shapes of `predicted`.
        """


@dataclass(frozen=True)
class SquaredL2(Distance):
    """Sum over tensors of ||g - g*||_2^2 + l1 ||g - g*||_1 (DLG: l1 = 0; TAG: l1 = 0.01).

    Args:
        l1: weight of the absolute difference.
    """

    l1: float = 0.0

    def __call__(self, predicted: Sequence[Tensor], observed: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        total = torch.zeros(len(predicted[0]), device=predicted[0].device, dtype=predicted[0].dtype)
        slopes = []
        for p, o in zip(predicted, observed, strict=True):
            difference = p - o
            flat = difference.flatten(1)
            total = total + torch.linalg.vecdot(flat, flat)
            if self.l1:
                total = total + self.l1 * torch.linalg.vector_norm(flat, 1, dim=1)
                slopes.append(torch.sign(difference).mul_(self.l1).add_(difference, alpha=2))
            else:
                slopes.append(difference.mul_(2))
        return total, slopes


@dataclass(frozen=True)
class Cosine(Distance):
    """Mean over tensors of 1 - cos(g, g*) (LAMP, partial gradients).

    A tensor that is zero on either side counts 1 and has slope 0.
    """

    def __call__(self, predicted: Sequence[Tensor], observed: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
        total = torch.zeros(len(predicted[0]), device=predicted[0].device, dtype=predicted[0].dtype)
        slopes = []
        tiny = torch.finfo(total.dtype).tiny
        for p, o in zip(predicted, observed, strict=True):
            flat, fixed = p.flatten(1), o.flatten()
            norm = torch.linalg.vector_norm(flat, dim=1).clamp_min(tiny)
            against = torch.linalg.vector_norm(fixed).clamp_min(tiny)
            cosine = (flat / norm[:, None]) @ (fixed / against)
            total = total + (1 - cosine) / len(predicted)
            inward = (cosine / norm)[:, None] * (flat / norm[:, None]) - (fixed / against) / norm[:, None]
            silent = ((norm <= tiny) | (against <= tiny))[:, None]
            slopes.append((torch.where(silent, 0.0, inward) / len(predicted)).view_as(p))
        return total, slopes


class Prediction:
    """The update that a guess would cause, in the views that were seen, dropout off.

    A weight change is read as a gradient: with a known optimizer "sgd" as -delta / (learning rate x steps), which is
    exact for one step and first-order for several; otherwise only up to scale.

    Args:
        seen: the observation.
    """

    def __init__(self, seen: Observation) -> None:
        self.model = seen.model
        self.views = list(seen.views.values())
        wanted = {view.parameter for view in self.views}
        every = self.model.parameters()
        self._moving = {name: every[name].detach() for name in every if name in wanted}
        self._fixed = {name: every[name].detach() for name in every if name not in wanted}

    def __call__(self, embeddings: Tensor, mask: Tensor, labels: Tensor) -> list[Tensor]:
        """Return one [N, ...] tensor a view.

        Args:
            embeddings: [N, B, T, d] word vectors.
            mask: [B, T] bool.
            labels: [N, B, ...] labels or label distributions, as `TextModel.loss` takes them.
        """
        if len(embeddings) == 1:
            return self._views([g[None] for g in self._one(embeddings[0], mask, labels[0])])

        def loss(moving: dict[str, Tensor], embeddings: Tensor, labels: Tensor) -> Tensor:
            params = self._fixed | moving
            return self.model.loss(embeddings=embeddings, mask=mask, labels=labels, params=params)

        found = vmap(grad(loss), in_dims=(None, 0, 0))(self._moving, embeddings, labels)
        return self._views([found[name] for name in self._moving])

    def _one(self, embeddings: Tensor, mask: Tensor, labels: Tensor) -> list[Tensor]:
        keep_graph = torch.is_grad_enabled()
        with torch.enable_grad():
            moving = {name: value.requires_grad_() for name, value in self._moving.items()}
            params = self._fixed | moving
            loss = self.model.loss(embeddings=embeddings, mask=mask, labels=labels, params=params)
            found = torch.autograd.grad(loss, list(moving.values()), create_graph=keep_graph, materialize_grads=True)
        return list(found)

    def _views(self, found: list[Tensor]) -> list[Tensor]:
        by_name = dict(zip(self._moving, found, strict=True))
        out = []
        for view in self.views:
            whole = by_name[view.parameter]
            out.append(torch.stack([view(g) for g in whole]) if view.name != view.parameter else whole)
        return out


def as_gradient(seen: Observation) -> dict[str, Tensor]:
    """Return the observed tensors as gradients: a known SGD weight change is divided by -(learning rate x steps).

    Raises:
        NotSupportedError: a weight change of AdamW or of unknown training, whose scale is not a gradient's.
    """
    if seen.kind == "gradient":
        return dict(seen.tensors)
    how, size = seen.knowledge.training, seen.knowledge.batch_size
    if how is None or how.optimizer != "sgd" or size is None:
        raise NotSupportedError(
            "matching reads a weight change only when it knows the batch size and that the client used SGD; "
            "this one is of AdamW or of unknown training"
        )
    return {name: value / -(how.learning_rate * how.steps(size)) for name, value in seen.tensors.items()}


def word_gradient_hidden(seen: Observation) -> list[str]:
    """Return the views that matching on word vectors cannot predict: the word table's own gradient.

    A guess made of word vectors never looks anything up in the table, so its rows have no predicted gradient. The
    published harnesses leave them out as well. Where the table is tied to the output, it is left out whole.
    """
    word = set(seen.model.group("word"))
    return [name for name, view in seen.views.items() if view.parameter in word]


def without(seen: Observation, hidden: Sequence[str]) -> Observation:
    """Return the observation without some of its views.

    Raises:
        NotSupportedError: nothing is left.
    """
    views = {n: v for n, v in seen.views.items() if n not in hidden}
    if not views:
        raise NotSupportedError("matching has nothing to match: only word-embedding rows were shared")
    return Observation(
        model=seen.model,
        tensors={n: seen.tensors[n] for n in views},
        views=views,
        kind=seen.kind,
        knowledge=seen.knowledge,
        selection=seen.selection,
    )


@dataclass(frozen=True)
class Minimum:
    """Where a minimization ended.

    Args:
        embeddings: [N, B, T, d] word vectors.
        labels: [N, B, ...] labels or distributions in force there.
        distance: [N] distance there.
        evaluations: gradient evaluations spent, all candidates counted.
    """

    embeddings: Tensor
    labels: Tensor
    distance: Tensor
    evaluations: int


def minimize(
    prediction: Prediction,
    observed: Sequence[Tensor],
    distance: Distance,
    *,
    start: Tensor,
    mask: Tensor,
    fixed: Tensor,
    labels: Tensor,
    learn_labels: bool,
    steps: int,
    learning_rate: float,
    keep_best: bool,
    what: str,
) -> Minimum:
    """Minimize the distance over word vectors (and labels) with Adam, all candidates at once.

    Each step pushes the distance's closed-form slope back through the predicted update, so that no graph is kept
    over the tensors themselves.

    Args:
        prediction: predicts the update of a guess.
        observed: the observed tensors, in the prediction's order.
        distance: what to minimize.
        start: [N, B, T, d] word vectors to start from.
        mask: [B, T] bool.
        fixed: [B, T] bool, slots that stay as they start.
        labels: [N, B, ...] labels, or starting logits when they are learned.
        learn_labels: optimize the labels as softmax(logits) together with the vectors.
        steps: Adam steps.
        learning_rate: Adam's, constant.
        keep_best: return the best iterate instead of the last (a candidate each).
        what: name for the progress bar.
    """
    still = (fixed | ~mask)[None, :, :, None]
    free = start.detach().clone().requires_grad_()
    logits = labels.detach().clone().float().requires_grad_() if learn_labels else None
    variables = [free] if logits is None else [free, logits]
    optimizer = torch.optim.Adam(variables, lr=learning_rate)
    best = Minimum(start.detach(), labels, torch.full((len(start),), torch.inf, device=start.device), 0)

    def evaluate() -> tuple[Tensor, Tensor, Tensor, list[Tensor], list[Tensor]]:
        vectors = torch.where(still, start, free)
        targets = labels if logits is None else logits.softmax(-1)
        predicted = prediction(vectors, mask, targets)
        with torch.no_grad():
            value, slopes = distance([p.detach() for p in predicted], observed)
        return vectors.detach(), targets.detach(), value, predicted, slopes

    for _ in track(range(steps), what):
        vectors, targets, value, predicted, slopes = evaluate()
        best = _better(best, vectors, targets, value)
        # a view the loss does not reach (a pooler's, without a head) has no graph and moves nothing
        reached = [(p, s) for p, s in zip(predicted, slopes, strict=True) if p.requires_grad]
        found = torch.autograd.grad(
            [p for p, _ in reached], variables, [s for _, s in reached], allow_unused=True, materialize_grads=True
        )
        for variable, slope in zip(variables, found, strict=True):
            variable.grad = slope
        optimizer.step()
    with torch.no_grad():
        vectors, targets, value, _, _ = evaluate()
    best = _better(best, vectors, targets, value)
    spent = (steps + 1) * len(start)
    if keep_best:
        return Minimum(best.embeddings, best.labels, best.distance, spent)
    return Minimum(vectors, targets, value, spent)


def _better(best: Minimum, vectors: Tensor, targets: Tensor, value: Tensor) -> Minimum:
    wins = value < best.distance

    def pick(new: Tensor, old: Tensor) -> Tensor:
        return torch.where(wins.view(-1, *[1] * (new.dim() - 1)), new, old.to(new.dtype).expand_as(new))

    if not bool(wins.any()):
        return best
    return Minimum(
        pick(vectors, best.embeddings),
        targets if best.labels.shape != targets.shape else pick(targets, best.labels),
        torch.minimum(value, best.distance),
        0,
    )


@torch.no_grad()
def nearest_tokens(vectors: Tensor, table: Tensor, forbidden: Sequence[int] = ()) -> Tensor:
    """Return the ids of the tokens whose word vectors lie nearest by cosine.

    Args:
        vectors: [..., d].
        table: [V, d] word vectors.
        forbidden: ids never returned (special tokens).
    """
    unit = torch.nn.functional.normalize(table, dim=1)
    score = torch.nn.functional.normalize(vectors, dim=-1) @ unit.T
    if len(forbidden):
        score[..., list(forbidden)] = -torch.inf
    return score.argmax(-1)
