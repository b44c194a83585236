"""The client's side: a private batch goes in, an update comes out, and only an `Observation` passes the wall."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

import torch
from torch import Tensor

import gradaudit.client.images
import gradaudit.client.text  # noqa: F401 - each registers how it is trained on
from gradaudit.client.checks import check_client
from gradaudit.client.example_gradients import Mode
from gradaudit.client.examples import Apart, Examples, examples_of
from gradaudit.defenses.base import BatchDefense, Defense, ExampleDefense, ModelDefense, RoleDefense, UpdateDefense
from gradaudit.defenses.feedback import ErrorFeedback
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models.base import Model, TextModel
from gradaudit.models.local_steps import (
    AUTOCAST,
    WEIGHTS,
    Parameters,
    by_optimizer,
    in_groups,
    local_steps,
    optimizer_of,
)
from gradaudit.registry import describe
from gradaudit.selection import Selection
from gradaudit.streams import draw_seed, global_stream, stream
from gradaudit.types import Batch, LocalTraining, Private, Update

M = TypeVar("M", bound=Model)
_SCALED = 65536.0
"""By which the loss is multiplied in fp16, and gradients divided: where torch's GradScaler starts."""


@dataclass(frozen=True)
class Client:
    """One honest client of a federated training.

    Args:
        model: the global model it was sent.
        training: one gradient (the default), or local steps.
        dropout: train with dropout on, at the rates the model is configured with.
        freeze: selection expressions of what is not trained ("embeddings", "0-2:q,k,v", ...).
        defenses: what acts on the text (first; images have no such), on the examples' gradients (at most one, before
            the rest) and on the update before it leaves, in order.
        dropout_rate: rate at every place that drops out, in place of the configured ones; None keeps those.
        padding: side on which a batch's shorter sentences are filled up; on the left their positions start later.
        clients: how many share the batch in equal parts, each with training and defenses of its own; the server sees
            the mean of their updates alone, as secure aggregation lets it.
        held: what error feedback holds back of earlier rounds, [clients, ...] by parameter name; None for nothing. It
            comes from private examples, like an update.

    Raises:
        BadInputError: padding on the left of an encoder, whose head reads the first row; a defense of examples'
            gradients behind another defense; no client; error feedback without a defense behind it that it could
            feed, or twice.
        NotSupportedError: a defense of words or of attention on a model of images; low precision with a defense of
            examples' gradients.
    """

    model: Model
    training: LocalTraining = LocalTraining()  # noqa: RUF009 - frozen, so sharing it is safe
    dropout: bool = False
    freeze: tuple[str, ...] = ()
    defenses: tuple[Defense, ...] = ()
    dropout_rate: float | None = None
    padding: Literal["right", "left"] = "right"
    clients: int = 1
    held: Mapping[str, Tensor] | None = None

    def __post_init__(self) -> None:
        check_client(self.model, self.defenses, self.padding, self.clients)
        if self.training.precision != "fp32" and self._guard() is not None:
            raise NotSupportedError('a defense of examples\' gradients takes them in float32: set precision = "fp32"')

    def frozen(self) -> tuple[str, ...]:
        """Return the names of the parameters that `freeze` and the defenses freeze.

        Raises:
            BadInputError: an expression that covers a parameter only in part (GPT-2's q alone is a third of one).
        """
        # as one selection: a view named twice counts once
        own = Selection(" ".join(self.freeze)).parameters(self.model) if self.freeze else ()
        frozen = [d.frozen(self.model) for d in self.defenses if isinstance(d, ModelDefense)]
        by_role = [d.frozen(self._text()) for d in self.defenses if isinstance(d, RoleDefense)]
        return tuple(dict.fromkeys(name for some in (own, *frozen, *by_role) for name in some))

    def dropout_in_force(self) -> float:
        """Return the dropout rate while training, 0.0 where it is off."""
        return (self._rate() or self.model.dropout_rate()) if self._dropping() else 0.0

    def _rate(self) -> float | None:
        """Return the dropout rate that takes the configured ones' place; None keeps those."""
        told = [d.dropout() for d in self.defenses if isinstance(d, ModelDefense)]
        return next((rate for rate in reversed(told) if rate is not None), self.dropout_rate)

    def _dropping(self) -> bool:
        return self.dropout or any(isinstance(d, ModelDefense) and d.dropout() is not None for d in self.defenses)

    def _text(self) -> TextModel:
        assert isinstance(self.model, TextModel)  # `__post_init__` refuses its defenses otherwise
        return self.model

    def update(self, batch: Private, rng: torch.Generator, expected: float | None = None) -> Update:
        """Train on the batch and return what leaves the client.

        Args:
            batch: the private batch.
            rng: the client's random stream; dropout, minibatch order and defenses each get their own from it.
            expected: examples a batch has in the mean, where this one was drawn by chance: a defense of examples'
                gradients divides by it wherever a step takes the whole batch; None for the batch's own.

        Raises:
            BadInputError: an empty batch, nothing left to train, or a training that diverged.
        """
        examples_of(self.model, batch, self.padding, self.training.label_smoothing)  # refused before anything is drawn
        seed = draw_seed(rng)
        _, trained = self._trained()
        if not trained:
            raise BadInputError("every parameter is frozen; nothing is trained and nothing is sent")
        tensors = self._summed(batch, trained, seed, expected)
        # a sum is finite only where every entry is, and costs a third of looking at each; it may overflow by itself
        broken = [n for n, t in tensors.items() if not bool(t.sum().isfinite()) and not bool(t.isfinite().all())]
        if broken:
            raise BadInputError(
                f"the update of '{broken[0]}' holds NaN or infinite values: the training diverged or the weights are "
                "broken; lower the learning rate or mend the model"
            )
        return self.made(tensors)

    def _trained(self) -> tuple[tuple[str, ...], dict[str, Tensor]]:
        frozen = tuple(dict.fromkeys((*self.frozen(), *self.model.untrained())))
        return frozen, {n: p for n, p in self.model.parameters().items() if n not in frozen}

    def trained(self) -> tuple[str, ...]:
        """Return the names of the parameters that are trained and sent."""
        return tuple(self._trained()[1])

    def made(self, tensors: Mapping[str, Tensor]) -> Update:
        """Return tensors, by parameter name, as this client's update."""
        frozen, _ = self._trained()
        return Update(
            tensors=tensors,
            kind="gradient" if self.training.optimizer == "none" else "delta",
            training=self._together(),
            dropout=self.dropout_in_force(),
            frozen=frozen,
            defenses=tuple(describe(d) for d in self.defenses),
        )

    def order(self, size: int, rng: torch.Generator) -> tuple[tuple[int, ...], ...] | None:
        """Return the rows that each local step of an update takes, for the judge; None of several clients.

        Args:
            size: examples of the batch.
            rng: a stream as the update's own was.
        """
        if self.clients > 1:
            return None
        steps = in_groups(self._minibatches(size, draw_seed(rng)), self.training.accumulate)
        return tuple(tuple(torch.cat(rows).tolist()) for rows in steps)

    def silent(self, rng: torch.Generator, expected: float) -> Update:
        """Return what a client sends whose sampling chose no sentence: the noise of its defense alone.

        Args:
            rng: the client's random stream.
            expected: sentences a batch has in the mean.

        Raises:
            BadInputError: it samples nothing: such a client always has a batch.
        """
        guard = self._guard()
        if guard is None or not guard.sampled or self.training.optimizer != "none":
            raise BadInputError("a client without sentences sends nothing")
        _, trained = self._trained()
        tensors = guard.on_examples(iter(()), trained, expected, stream(draw_seed(rng), "defense", 0, 0))
        return self.made(tensors)

    def example_gradients(self, batch: Private, rng: torch.Generator) -> dict[str, Tensor]:
        """Return the gradient of each example of a batch, [B, ...] by parameter name, undefended.

        Args:
            batch: the private batch.
            rng: the client's random stream, for dropout.

        Raises:
            BadInputError: the extra `dp` is missing.
        """
        _, trained = self._trained()
        seed = draw_seed(rng)
        apart = examples_of(self.model, batch, self.padding, self.training.label_smoothing).apart_once(trained)
        chunks = list(apart.chunks(torch.arange(len(batch)), self._part_mode(seed, 0)))
        if len(chunks) == 1:
            return chunks[0]
        return {name: torch.cat([chunk[name] for chunk in chunks]) for name in chunks[0]}

    def _summed(
        self, batch: Private, trained: Mapping[str, Tensor], seed: int, expected: float | None
    ) -> dict[str, Tensor]:
        if self.clients == 1:
            return self._alone(batch, trained, seed, expected, 0)
        if len(batch) % self.clients:
            raise BadInputError(
                f"{len(batch)} examples are no equal parts for {self.clients} clients; change batch_size"
            )
        total: dict[str, Tensor] = {}
        for number, rows in enumerate(torch.arange(len(batch)).chunk(self.clients)):
            own = draw_seed(stream(seed, "client of several", number))
            one = self._alone(batch.take(rows), trained, own, expected and expected / self.clients, number)
            total = {name: value + total[name] if total else value for name, value in one.items()}
        return {name: value / self.clients for name, value in total.items()}

    def _together(self) -> LocalTraining:
        # clients that step side by side take as many steps as one with all of their data and minibatches
        how = self.training
        return how if how.minibatch is None else replace(how, minibatch=how.minibatch * self.clients)

    def _alone(
        self, batch: Private, trained: Mapping[str, Tensor], seed: int, expected: float | None, number: int
    ) -> dict[str, Tensor]:
        for place, defense in enumerate(self.defenses):
            if isinstance(defense, BatchDefense) and isinstance(batch, Batch):
                batch = defense.on_batch(self._text(), batch, stream(seed, "defense", place))
        examples = examples_of(self.model, batch, self.padding, self.training.label_smoothing)
        if self.training.optimizer == "none":
            tensors = self._gradient(examples, len(batch), trained, seed, expected)
        else:
            tensors = self._weight_change(examples, len(batch), trained, seed, expected)
        for place, defense in enumerate(self.defenses):
            if isinstance(defense, ErrorFeedback) and self.held is not None:
                tensors = {name: value + self.held[name][number] for name, value in tensors.items()}
            elif isinstance(defense, UpdateDefense):
                tensors = defense.on_update(tensors, stream(seed, "defense", place))
            elif isinstance(defense, RoleDefense):
                tensors = defense.on_roles(self._text(), tensors, stream(seed, "defense", place))
        return tensors

    def _gradient(
        self, examples: Examples, size: int, trained: Mapping[str, Tensor], seed: int, expected: float | None
    ) -> dict[str, Tensor]:
        everything = torch.arange(size)
        guard = self._guard()
        if guard is not None:
            return self._guarded(guard, examples.apart_once(trained), everything, expected or float(size), seed, 0)
        own, given = dict(trained), None
        if self.training.precision in WEIGHTS:
            fixed, own = self._copied(trained)
            given = fixed | own
        with self._mode(seed, 0):
            found = self._slopes(lambda: examples.loss(everything, given), own)
        return {
            name: (torch.zeros_like(p) if (g := found[name]) is None else g.to(p.dtype)).detach()
            for name, p in trained.items()
        }

    def _copied(self, trained: Mapping[str, Tensor]) -> tuple[Parameters, Parameters]:
        """Return the parameters that stay and those that are trained, each a leaf, in the type of the training."""
        kind = WEIGHTS.get(self.training.precision)
        every = {n: p.detach().to(kind or p.dtype, copy=n in trained) for n, p in self.model.parameters().items()}
        own = {n: every.pop(n).requires_grad_() for n in trained}
        return every, own

    def _weight_change(
        self, examples: Examples, size: int, trained: Mapping[str, Tensor], seed: int, expected: float | None
    ) -> dict[str, Tensor]:
        guard, how = self._guard(), self.training
        apart = None if guard is None else examples.apart(trained)
        fixed, local = self._copied(trained)
        if apart is not None:
            local = apart.parameters

        def gradient(params: Parameters, rows: Tensor, step: int) -> Mapping[str, Tensor | None]:
            if guard is not None and apart is not None:
                whole = len(rows) == size and how.minibatch is None
                mean = float(min(how.minibatch or size, size)) if guard.sampled else float(len(rows))
                divisor = expected if whole and expected else mean
                return self._guarded(guard, apart, rows, divisor, seed, step)
            with self._mode(seed, step):
                return self._slopes(lambda: examples.loss(rows, fixed | params), params)

        def mean(params: Parameters, some: Sequence[Tensor], step: int) -> Mapping[str, Tensor | None]:
            one, *more = (gradient(params, rows, step * how.accumulate + n) for n, rows in enumerate(some))
            if not more:
                return one
            every = {name: [g for g in (own[name] for own in (one, *more)) if g is not None] for name in params}
            return {name: sum(gs[1:], gs[0]) / how.accumulate if gs else None for name, gs in every.items()}

        step = by_optimizer(optimizer_of(how, local.values()), how.rates(how.steps(size)), how.clip_norm)
        local = local_steps(local, in_groups(self._minibatches(size, seed), how.accumulate), mean, step)
        return {n: (p.to(trained[n].dtype) - trained[n]).detach() for n, p in local.items()}

    def _guard(self) -> ExampleDefense | None:
        return next((d for d in self.defenses if isinstance(d, ExampleDefense)), None)

    def _guarded(
        self, guard: ExampleDefense, apart: Apart, rows: Tensor, expected: float, seed: int, step: int
    ) -> dict[str, Tensor]:
        chunks = apart.chunks(rows, self._part_mode(seed, step)) if len(rows) else iter(())
        rng = stream(seed, "defense", 0, step)
        return guard.on_examples(chunks, apart.parameters, expected, rng)

    def _part_mode(self, seed: int, step: int) -> Mode:
        def mode(model: Model, part: int) -> AbstractContextManager[None]:
            # hooks take gradients in training mode only, so no dropout is a rate of 0 there
            if not self._dropping():
                return model.training_mode(0.0)
            return dropout_on(model, stream(seed, "dropout", step, part), self._rate())

        return mode

    def _minibatches(self, size: int, seed: int) -> Iterator[Tensor]:
        order = stream(seed, "minibatch order")
        guard, most = self._guard(), self.training.minibatch or size
        for _ in range(self.training.epochs):
            if most >= size:
                yield torch.arange(size)
            elif guard is not None and guard.sampled:
                for _ in range(-(-size // most)):
                    yield (torch.rand(size, generator=order) < most / size).nonzero().flatten()
            else:
                yield from torch.split(torch.randperm(size, generator=order), most)

    def _slopes(self, loss: Callable[[], Tensor], params: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Return the loss's gradient by parameter name, in the client's precision; None where one has no part in it."""
        kind = AUTOCAST.get(self.training.precision)
        with nullcontext() if kind is None else torch.autocast(self.model.device.type, kind):
            value = loss()
        wanted = list(params.values())
        if kind != torch.float16:
            return dict(zip(params, torch.autograd.grad(value, wanted, allow_unused=True), strict=True))
        scale = (
            _SCALED  # as torch's GradScaler: small slopes are zero in fp16, and it halves the scale until none is inf
        )
        while True:
            found = torch.autograd.grad(value * scale, wanted, retain_graph=True, allow_unused=True)
            if scale <= 1 or all(g is None or bool(g.isfinite().all()) for g in found):
                return {name: g if g is None else g / scale for name, g in zip(params, found, strict=True)}
            scale /= 2

    def _mode(self, seed: int, step: int) -> AbstractContextManager[None]:
        if not self._dropping():
            return nullcontext()
        return dropout_on(self.model, stream(seed, "dropout", step), self._rate())


@contextmanager
def dropout_on(model: Model, rng: torch.Generator, rate: float | None) -> Iterator[None]:
    """Train inside the block, with the masks drawn from one stream; evaluation mode after."""
    with global_stream(rng, model.device), model.training_mode(rate):
        yield
