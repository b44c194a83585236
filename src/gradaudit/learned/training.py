"""Training of the network: Adam, a schedule, early stopping by public validation, checkpoints that survive a kill."""

import json
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from gradaudit.errors import BadInputError
from gradaudit.files import replacing, stored_tensors
from gradaudit.progress import step as progressed
from gradaudit.streams import global_stream, stream

N = TypeVar("N", bound=nn.Module)
_SECONDS = 60.0
"""Between two checkpoints."""
_WARM = 50
"""Steps over which the learning rate rises: the first updates of Adam are of full size whatever the gradient's."""


@dataclass(frozen=True)
class Recipe:
    """How the network is trained.

    Args:
        steps: of the optimizer.
        learning_rate: Adam's, at its highest.
        decay: fall to zero by a cosine; else constant.
        every: steps between two validations.
        patience: validations without a better one after which it stops; 0 never.
    """

    steps: int
    learning_rate: float
    decay: bool
    every: int
    patience: int

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        rise = min(1.0, (step + 1) / _WARM)
        fall = 0.5 * (1 + math.cos(math.pi * step / self.steps)) if self.decay else 1.0
        return self.learning_rate * rise * fall


@dataclass(frozen=True)
class Trained:
    """What came of a training: the network at its best validation.

    Args:
        score: of the validation.
        step: at which it was.
        steps: taken in all.
    """

    score: float
    step: int
    steps: int


def weights_by(rng: torch.Generator | None) -> AbstractContextManager[object]:
    """Let modules made inside the block draw their weights by torch's usual law; None leaves them to be loaded."""
    return torch.device("meta") if rng is None else global_stream(rng, torch.device("cpu"))


def with_weights(network: N, tensors: Mapping[str, Tensor]) -> N:
    """Return a network that was left to be loaded with its weights, in evaluation."""
    network.load_state_dict(tensors, assign=True)
    return network.requires_grad_(False).eval()


def split(count: int, size: int, share: float, seed: int, what: str) -> tuple[Tensor, Tensor]:
    """Return which rows of public data are held out and which are learned from, whole updates of both.

    Args:
        count: rows there are.
        size: rows an update.
        share: of the updates that is held out.
        seed: of the draw.
        what: the rows in words.

    Raises:
        BadInputError: too few rows.
    """
    held = max(1, round(share * (count // size)))
    kept = count // size - held
    if kept < 1:
        raise BadInputError(
            f"[public] has {count} {what} that no audited batch holds; an attack that learns from updates of {size} "
            f"needs {2 * size} at least, and thousands to learn anything"
        )
    order = torch.randperm(count, generator=stream(seed, "split"))
    return order[: held * size], order[held * size : (held + kept) * size]


def train(
    network: N,
    batch: Callable[[int], tuple[Tensor, Tensor]],
    validate: Callable[[N], float],
    recipe: Recipe,
    checkpoint: Path | None,
    what: str,
    loss_of: Callable[[Tensor, Tensor], Tensor],
) -> Trained:
    """Train a network in place and leave it at its best validation.

    Args:
        network: with its first weights.
        batch: gives inputs [n, bins] and targets [n, ...] of a step; the same for the same step, so that a training
            that was stopped goes on as it would have.
        validate: gives a score on held-out public data, the higher the better.
        recipe: how to train.
        checkpoint: file that is written about once a minute and read when it is there; None for none. Whoever calls
            removes it.
        what: name for the progress bar.
        loss_of: gives the loss of outputs and targets.
    """
    parameters = dict(network.named_parameters())
    state = _State(parameters)
    if checkpoint is not None:
        state.read(checkpoint, network)
    saved = time.monotonic()
    optimizer = state.optimizer
    for number in range(state.step, recipe.steps):
        if recipe.patience and state.waited >= recipe.patience:
            break
        inputs, targets = batch(number)
        for group in optimizer.param_groups:
            group["lr"] = recipe.rate(number)
        with torch.enable_grad():
            loss = loss_of(network(inputs), targets)
            optimizer.zero_grad(set_to_none=True)
            torch.autograd.backward(loss)
        optimizer.step()
        state.step = number + 1
        if state.step % recipe.every == 0 or state.step == recipe.steps:
            state.judged(validate(network), network)
        progressed(what, state.step, recipe.steps)
        if checkpoint is not None and time.monotonic() - saved > _SECONDS:
            state.write(checkpoint, network)
            saved = time.monotonic()
    if checkpoint is not None and state.step < recipe.steps:
        state.write(checkpoint, network)
    if state.best:
        network.load_state_dict(state.best)
    return Trained(state.score, state.best_step, state.step)


class _State:
    """All that a training needs to go on."""

    def __init__(self, parameters: Mapping[str, Tensor]) -> None:
        self.parameters = parameters
        self.optimizer = torch.optim.Adam(parameters.values())
        self.step, self.waited, self.best_step = 0, 0, 0
        self.score = -math.inf
        self.best: dict[str, Tensor] = {}

    def judged(self, score: float, network: nn.Module) -> None:
        self.waited += 1
        if score > self.score:
            self.score, self.best_step, self.waited = score, self.step, 0
            self.best = {n: p.detach().clone() for n, p in network.named_parameters()}

    def _moments(self) -> Iterator[tuple[str, Tensor]]:
        for name, p in self.parameters.items():
            for kind in ("exp_avg", "exp_avg_sq"):
                yield f"{kind}.{name}", self.optimizer.state[p][kind]

    def write(self, path: Path, network: nn.Module) -> None:
        held = {f"now.{n}": p.detach() for n, p in network.named_parameters()}
        held |= {f"best.{n}": p for n, p in self.best.items()} | dict(self._moments())
        numbers = {"step": self.step, "waited": self.waited, "best": self.best_step, "score": self.score}
        with replacing(path) as fresh:
            save_file({n: t.cpu().contiguous() for n, t in held.items()}, fresh, {"state": json.dumps(numbers)})

    def read(self, path: Path, network: nn.Module) -> None:
        """Take up what was written; a file that is not of this training is passed over."""
        try:
            with stored_tensors(path) as file:
                told = json.loads(file.metadata["state"])
                step, waited, best_step = (int(told[name]) for name in ("step", "waited", "best"))
                score = float(told["score"])
                wanted = {n: tuple(p.shape) for n, p in self.parameters.items()}
                kinds = (
                    "now",
                    "exp_avg",
                    "exp_avg_sq",
                    *(("best",) if any(n.startswith("best.") for n in file.shapes) else ()),
                )
                if any(file.shapes.get(f"{kind}.{n}") != s for n, s in wanted.items() for kind in kinds):
                    return
                held = file.read(file.shapes)
        except (BadInputError, KeyError, ValueError, TypeError, OverflowError, RecursionError):
            return
        with torch.no_grad():
            for name, p in self.parameters.items():
                p.copy_(held[f"now.{name}"])
                moments = {k: held[f"{k}.{name}"].to(p) for k in ("exp_avg", "exp_avg_sq")}
                self.optimizer.state[p] = {"step": torch.tensor(float(step)), **moments}
        device = next(iter(self.parameters.values())).device
        self.best = {n.removeprefix("best."): t.to(device) for n, t in held.items() if n.startswith("best.")}
        self.step, self.waited, self.best_step, self.score = step, waited, best_step, score
