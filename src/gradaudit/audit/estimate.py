"""What a case will cost before it is run: measured on its first batch, not guessed."""

import time
from dataclasses import dataclass

import torch

from gradaudit.audit.fitting import simulation_of
from gradaudit.audit.prepare import Prepared, private_batch
from gradaudit.client.client import Client
from gradaudit.streams import stream

_TRIED = 32
"""Public updates that are simulated to see how long they take."""


@dataclass(frozen=True)
class Estimate:
    """Rough cost of a case.

    Args:
        seconds: all batches together, on this machine.
        memory_mib: weights, one update and the attack's working copies.
        tokens: real tokens of the first batch; None of images.
        load: its tokens / width; None of images.
        share: share of the model's parameters that the attacker sees.
        learning: seconds to simulate the public updates that the attack learns from, once for all batches; what it
            takes to learn from them is not foreseen. 0 where nothing is learned.
    """

    seconds: float
    memory_mib: float
    tokens: int | None
    load: float | None
    share: float
    learning: float


def estimate(ready: Prepared) -> Estimate:
    """Return the cost of a prepared case, from one measured gradient of its first batch.

    Args:
        ready: the prepared case.
    """
    batch = private_batch(ready, 0)
    tokens = None if batch.sizes is None else sum(batch.sizes)
    client = Client(ready.model)
    client.update(batch, stream(0, "warm-up"))
    times = []
    for turn in range(2):  # the better of two: a busy machine can make one many times slower
        began = time.perf_counter()
        client.update(batch, stream(0, "estimate", turn))
        times.append(time.perf_counter() - began)
    once = min(times)
    attack = ready.attack.gradient_evaluations(len(batch), tokens or 0)
    how = ready.client.training
    steps = how.steps(len(batch))
    if 1 < steps <= getattr(ready.attack, "replayed_steps", 1):
        attack *= steps
    # beside the attack: the client's own update, two for the diagnosis, one for the judge's baseline
    attacked = min(once * attack, ready.attack.seconds_at_most)
    seconds = (attacked + once * (steps + 3)) * len(ready.batches)
    size = sum(p.numel() * p.element_size() for p in ready.model.parameters().values())
    fixed = {*ready.client.frozen(), *ready.model.untrained()}
    views = [v for v in ready.selection.views(ready.model).values() if v.parameter not in fixed]
    seen = sum(v(ready.model.parameters()[v.parameter]).numel() for v in views)
    every = sum(p.numel() for p in ready.model.parameters().values())
    return Estimate(
        seconds=seconds,
        memory_mib=(size * (2 + 3 * seen / every)) / 2**20,
        tokens=tokens,
        load=None if tokens is None else tokens / ready.model.width,
        share=seen / every,
        learning=_simulating(ready) if ready.attack.unfitted else 0.0,
    )


def _simulating(ready: Prepared) -> float:
    """Return the seconds that simulating all public updates takes, from some of them; nothing of the attack is run."""
    public, size = ready.public, ready.case.data.batch_size
    if public is None:
        return 0.0
    simulation = simulation_of(ready.client, ready.selection)
    whole = len(public) // size
    some = torch.arange(min(_TRIED, whole) * size)
    if not len(some):
        return 0.0
    times = []
    for turn in range(2):
        began = time.perf_counter()
        simulation.try_out(public, some, size, stream(0, "learning", turn))
        times.append((time.perf_counter() - began) / (len(some) // size))
    return min(times) * ready.attack.simulated_updates(whole)
