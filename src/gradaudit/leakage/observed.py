"""What was seen, as matching and decoding take it: gradient units, whose rows are hidden, which tokens are nearest."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gradaudit.defense_traits import all_traits
from gradaudit.errors import NotSupportedError
from gradaudit.models.base import Model
from gradaudit.types import Observation

STEP, CANDIDATE = 1.5, 0.25
"""What a step of the continuous search and a candidate of the discrete one cost, in gradients of a client (MiniLM)."""


def sgd_steps(seen: Observation[Any]) -> int | None:
    """Return how many local steps of plain SGD the client is known to take; None where that is not known."""
    how, size = seen.knowledge.training, seen.knowledge.batch_size
    return None if how is None or not how.descends or size is None else how.steps(size)


def as_gradient(seen: Observation[Model], replayed: bool = False) -> dict[str, Tensor]:
    """Return the observed tensors as gradients: a weight change is divided by -(mean learning rate x steps).

    Args:
        seen: the observation.
        replayed: the steps are to be replayed, by whatever optimizer; otherwise only plain SGD's make a gradient.

    Raises:
        NotSupportedError: a weight change whose scale is no gradient's.
    """
    if seen.kind == "gradient":
        return dict(seen.tensors)
    if "unit norm" in all_traits(seen.knowledge.defenses):
        return {name: -value for name, value in seen.tensors.items()}  # its size was taken off by the client
    how, size = seen.knowledge.training, seen.knowledge.batch_size
    if how is None or size is None or not (replayed or how.descends):
        raise NotSupportedError(
            "matching reads a weight change only when it knows the batch size and that the client used plain SGD; "
            "steps of AdamW, or of SGD with momentum, clipping, decay or a schedule, are replayed by attacks on text, "
            "as many as their replayed_steps"
        )
    steps = how.steps(size)
    return {name: value / -(how.mean_rate(steps) * steps) for name, value in seen.tensors.items()}


def word_gradient_hidden(seen: Observation) -> list[str]:
    """Return the views that matching on word vectors cannot predict: the word table's own gradient.

    A guess made of word vectors never looks anything up in the table, so its rows have no predicted gradient. The
    published harnesses leave them out as well. Where the table is tied to the output, it is left out whole.
    """
    word = set(seen.model.group("word"))
    return [name for name, view in seen.views.items() if view.parameter in word]


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
