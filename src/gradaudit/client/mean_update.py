"""The mean update of a round's clients, what a server applies: made together where its law is known."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from gradaudit.client.client import Client
from gradaudit.defenses.base import ExampleDefense, ModelDefense, UpdateDefense
from gradaudit.errors import BadInputError
from gradaudit.streams import draw_seed, stream
from gradaudit.types import Private, Update

_ALONE = 4
"""Examples of a client from which on its gradient is computed by itself: below, each example's own are cheaper."""


def mean_update(client: Client, batch: Private, clients: int, rng: torch.Generator) -> Update:
    """Return a draw of the mean update of several clients, each with an equal part of the batch.

    It has the law of `Client(clients=...)`'s, which computes and defends every client's update by itself. Here single
    gradients are made together: DP-SGD clips all examples in one pass and draws the sum of the clients' noise; without
    a defense the mean is the whole batch's gradient; noise that does not look at the update is drawn once, of the
    mean's law; and where each client's gradient is needed, those of single examples come out of one pass.

    Args:
        client: one of the clients; its own `clients` is how many share one's batch (secure aggregation).
        batch: the examples of all.
        clients: how many.
        rng: the round's random stream.

    Raises:
        BadInputError: as `Client.update`; or the extra `dp` is missing, which makes single sentences' gradients of some
            models.
    """
    several = clients * client.clients
    defenses = [d for d in client.defenses if isinstance(d, UpdateDefense)]
    trained = tuple(d for d in client.defenses if isinstance(d, ModelDefense))
    guards = [d for d in client.defenses if isinstance(d, ExampleDefense)]
    plain = client.training.one_gradient and len(batch) % several == 0 and several > 1
    if plain and len(guards) == 1 and not guards[0].sampled and len(trained) + 1 == len(client.defenses):
        # each clips its own examples and adds its own noise: as one client with all sentences and the noises' sum
        together = (*trained, guards[0].of_several(several))
        return replace(client, clients=several).made(
            replace(client, defenses=together, clients=1).update(batch, rng).tensors
        )
    if not plain or len(defenses) + len(trained) != len(client.defenses) or batch.labels is None:
        return replace(client, clients=several).update(batch, rng)
    bare = replace(client, defenses=trained, clients=1)
    seed = draw_seed(rng)
    found = _whole(bare, batch, stream(seed, "mean")) if _by_mean(defenses, several) else None
    tensors: Mapping[str, Tensor]
    if found is not None:
        tensors, left = found, defenses
    else:
        first = next(n for n in range(len(defenses) + 1) if _by_mean(defenses[n:], several))
        parts = updates_by_parts(bare, batch, several, stream(seed, "own"))
        tensors, left = _mean_of_parts(parts, defenses[:first], several, seed), defenses[first:]
    for place, defense in enumerate(left, len(defenses) - len(left)):
        noisy = defense.on_mean(tensors, several, stream(seed, "defense", place))
        assert noisy is not None
        tensors = noisy
    return replace(client, clients=several).made(tensors)


def _mean_of_parts(
    parts: Iterable[tuple[Tensor, Mapping[str, Tensor]]], defenses: list[UpdateDefense], clients: int, seed: int
) -> dict[str, Tensor]:
    """Return a draw of the mean of what clients send through defenses, made part by part so that few lie in memory."""
    total: dict[str, Tensor] = {}
    for number, (some, own) in enumerate(parts):
        for place, defense in enumerate(defenses[:-1]):
            own = defense.on_each(own, stream(seed, "defense", place, number))
        sent = defenses[-1].mean_of_each(own, stream(seed, "defense", len(defenses) - 1, number))
        for name, value in sent.items():
            value *= len(some) / clients
            total[name] = total[name].add_(value) if name in total else value
    return total


def _by_mean(defenses: list[UpdateDefense], clients: int) -> bool:
    """Say whether the mean of the updates decides the law of what is sent."""
    nothing: dict[str, Tensor] = {}
    return all(d.on_mean(nothing, clients, torch.Generator()) is not None for d in defenses)


def _whole(client: Client, batch: Private, rng: torch.Generator) -> Mapping[str, Tensor]:
    """Return the gradient of the whole batch."""
    order, parts = _by_length(batch)
    return replace(client, clients=parts).update(batch.take(order), rng).tensors


def _by_length(batch: Private) -> tuple[Tensor, int]:
    """Return the sentences, short ones first, and in how many parts they are computed: less padding in each.

    Examples that are all of one size are one part.
    """
    size = len(batch)
    if batch.sizes is None:
        return torch.arange(size), 1
    parts = next((n for n in (4, 2) if size % n == 0 and size >= 8 * n), 1)
    return torch.tensor(batch.sizes).argsort(stable=True), parts


def each_update(client: Client, batch: Private, clients: int, rng: torch.Generator) -> dict[str, Tensor]:
    """Return the update of each of several clients, [clients, ...] by parameter name; see `updates_by_parts`."""
    parts = list(updates_by_parts(client, batch, clients, rng))
    back = torch.cat([numbers for numbers, _ in parts]).argsort().to(client.model.device)
    return {name: torch.cat([own[name] for _, own in parts])[back] for name in parts[0][1]}


def updates_by_parts(
    client: Client, batch: Private, clients: int, rng: torch.Generator
) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
    """Yield the updates of several clients, some clients at a time: their numbers [n] and tensors [n, ...] by name.

    Args:
        client: one of them.
        batch: the examples of all, in equal parts.
        clients: how many.
        rng: the round's random stream.

    Raises:
        BadInputError: as `Client.update`; no equal parts.
    """
    if len(batch) % clients:
        raise BadInputError(f"{len(batch)} examples are no equal parts for {clients} clients; change batch_size")
    size, seed = len(batch) // clients, draw_seed(rng)
    plain = client.training.one_gradient and all(isinstance(d, ModelDefense) for d in client.defenses)
    if size >= _ALONE or not plain or batch.labels is None:
        for n, rows in enumerate(torch.arange(len(batch)).chunk(clients)):
            sent = client.update(batch.take(rows), stream(seed, "client", n)).tensors
            yield torch.tensor([n]), {name: value[None] for name, value in sent.items()}
        return
    order, parts = _by_length(batch) if size == 1 else (torch.arange(len(batch)), 1)
    for n, rows in enumerate(order.chunk(parts)):
        found = client.example_gradients(batch.take(rows), stream(seed, "mean", n))
        if size > 1:
            found = {name: value.view(-1, size, *value.shape[1:]).mean(1) for name, value in found.items()}
        yield rows[::size] // size, found
