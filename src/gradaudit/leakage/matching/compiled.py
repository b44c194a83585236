"""A step of continuous search, compiled: traced once for all sentence lengths, then run without autograd's bookkeeping.

A step at batch size 1 is thousands of small operations, most of them of the double backward pass. `make_fx` writes them
down with the length as a symbol, slopes included, and `torch.compile` fuses them. It takes one to two minutes a model,
distance and batch size, and makes a step two to three times faster, so it is asked for (`--compile`) and not the rule.
Every new length is first checked against the plain way; where the two differ, or the compiler fails, the plain way is
taken and the record says so.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from gradaudit.leakage.matching.masks import Masks
from gradaudit.models.base import TextModel
from gradaudit.progress import step as progress

if TYPE_CHECKING:
    from gradaudit.leakage.matching.objective import Objective

_asked: ContextVar[bool] = ContextVar("gradaudit_compile", default=False)
_LENGTHS = (11, 13, 17, 19, 23, 29)
"""Lengths to trace at: one that no other size of the inputs has, or the two would be taken for the same symbol."""
_VALUE, _SLOPE = 1e-3, 1e-2
"""How far, relatively, value and slopes may lie from the plain way's: rounding, and signs of an L1 term near zero."""


@contextmanager
def compiling(asked: bool = True) -> Iterator[None]:
    """Let objectives inside the block compile their steps."""
    token = _asked.set(asked)
    try:
        yield
    finally:
        _asked.reset(token)


def asked() -> bool:
    """Say whether steps are to be compiled."""
    return _asked.get()


@dataclass
class _Step:
    """One traced step.

    Args:
        run: flat inputs to value and slopes; None where it could not be made.
        lengths: by length, whether it agreed with the plain way.
        said: why it is not used, at all or at some length, for the record.
    """

    run: Callable[..., tuple[Tensor, ...]] | None
    lengths: dict[int, bool] = field(default_factory=dict)
    said: str = ""


_steps: WeakKeyDictionary[TextModel, dict[Hashable, _Step]] = WeakKeyDictionary()


def distance_by_compiled_step(
    of: Objective, embeddings: Tensor, mask: Tensor, labels: Tensor, masks: Masks | None
) -> tuple[Tensor | None, str]:
    """Return the distances [N], differentiable once, or None for the plain way; and what to say of it in the record.

    With masks only one candidate at a time is taken: their slopes are of the sum over candidates.

    Args:
        of: what to measure.
        embeddings: [N, B, T, d].
        mask: [B, T] or [N, B, T].
        labels: as `TextModel.loss` takes them.
        masks: dropout masks, already drawn; None without dropout.
    """
    if not _asked.get():
        return None, ""
    if of.model.spec.task != "classification":
        return None, "models of the next word are not compiled"
    if masks is not None and (len(embeddings) > 1 or not masks.whole):
        return None, "several candidates under masks are not compiled"
    values = [] if masks is None else masks.variables()
    if masks is not None and not values:
        return None, ""  # they are drawn in the first pass
    size, length = embeddings.shape[1:3]
    key = (of.structure(), len(embeddings), size, mask.dim(), labels.dtype, labels.dim(), masks is None)
    mine = _steps.setdefault(of.model, {})
    if key not in mine:
        progress("compiling the search, once a model", 0, 1)
        mine[key] = _made(of, embeddings, mask, labels, masks)
        progress("compiling the search, once a model", 1, 1)
    found = mine[key]
    if found.run is None or not found.lengths.get(length, True):
        return None, found.said
    inputs = [embeddings, labels, *values, mask, *of.targets()]
    if length not in found.lengths:
        try:
            found.lengths[length] = _agrees(of, found.run, inputs, masks)
            found.said = "" if found.lengths[length] else f"differs from the plain way at {length} tokens"
        except Exception as error:  # a length may be compiled anew, and fail
            found.lengths[length], found.said = False, _reason(error)
        if not found.lengths[length]:
            return None, found.said
    value: Tensor = _CompiledRun.apply(found.run, 2 + len(values), *inputs)  # type: ignore[no-untyped-call]
    return value, "yes"


def _reason(error: Exception) -> str:
    """Return what an error says, in one line."""
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}"[:200]


class _CompiledRun(torch.autograd.Function):
    """A compiled step in an ordinary graph: its slopes were found beside its value."""

    @staticmethod
    def forward(ctx: Any, run: Callable[..., tuple[Tensor, ...]], count: int, *inputs: Tensor) -> Tensor:
        value, *ctx.slopes = run(*(t.detach() for t in inputs))
        ctx.rest = len(inputs) - count
        return value

    @staticmethod
    def backward(ctx: Any, outer: Tensor) -> tuple[Tensor | None, ...]:
        vectors, labels, *masks = ctx.slopes
        by_labels = labels * outer.view(-1, *[1] * (labels.dim() - 1)) if labels.dim() > 2 else None
        return (
            None,
            None,
            vectors * outer.view(-1, 1, 1, 1),
            by_labels,
            *(m * outer[0] for m in masks),
            *[None] * ctx.rest,
        )


def _plain(of: Objective, masks: Masks | None, count: int) -> Callable[..., tuple[Tensor, ...]]:
    """Return a step as a function of flat tensors: vectors, labels, `count` masks, the slots' mask, targets."""

    def run(*inputs: Tensor) -> tuple[Tensor, ...]:
        vectors, labels, *rest = inputs
        vectors = vectors.detach().requires_grad_()
        labels = labels.detach()
        if labels.is_floating_point():
            labels.requires_grad_()
        sites = [m.detach().requires_grad_() for m in rest[:count]]
        under = None if masks is None else masks.holding(sites)
        with torch.enable_grad():
            value = of.measured(vectors, rest[count], labels, under, rest[count + 1 :])
            wanted = [vectors, *([labels] if labels.is_floating_point() else []), *sites]
            slopes = torch.autograd.grad(value.sum(), wanted, allow_unused=True, materialize_grads=True)
        by_labels = slopes[1] if labels.is_floating_point() else torch.zeros_like(labels, dtype=vectors.dtype)
        return value.detach(), slopes[0], by_labels, *slopes[len(slopes) - count :]

    return run


def _made(of: Objective, embeddings: Tensor, mask: Tensor, labels: Tensor, masks: Masks | None) -> _Step:
    """Trace a step at a length of its own, and hand it to the compiler."""
    from torch.fx.experimental.proxy_tensor import make_fx  # seconds to import

    count = 0 if masks is None else len(masks.variables())
    targets = of.targets()
    others = {*embeddings.shape[:2], embeddings.shape[3], *labels.shape, *(n for t in targets for n in t.shape)}
    free = [n for n in _LENGTHS if n not in others and n <= of.model.max_length]
    if not free:
        return _Step(None, said="no length to trace at")
    size = (*embeddings.shape[:2], free[0], embeddings.shape[3])
    drawn = torch.randn(size, generator=torch.Generator().manual_seed(0)).to(embeddings)
    shown = torch.ones((*mask.shape[:-1], free[0]), dtype=torch.bool, device=mask.device)
    under = None if masks is None else Masks(size[1], torch.Generator().manual_seed(0))
    with torch.no_grad():
        of.measured(drawn, shown, labels.detach(), under, targets)  # draws the masks
    inputs = [drawn, labels.detach(), *([] if under is None else [m.detach() for m in under.variables()]), shown]
    try:
        graph = make_fx(_plain(of, under, count), tracing_mode="symbolic", _allow_non_fake_inputs=True)(
            *inputs, *targets
        )
        graph.graph.eliminate_dead_code()
        graph.recompile()
        run = torch.compile(graph, dynamic=True)
        with torch.no_grad():
            run(*inputs, *targets)
    except Exception as error:  # whatever the compiler cannot do, the plain way can
        return _Step(None, said=_reason(error))
    return _Step(run)


def _agrees(of: Objective, run: Callable[..., tuple[Tensor, ...]], inputs: list[Tensor], masks: Masks | None) -> bool:
    """Say whether a compiled step does what the plain one does."""
    count = 0 if masks is None else len(masks.variables())
    plain = _plain(of, masks, count)(*inputs)
    with torch.no_grad():
        found = run(*(t.detach() for t in inputs))
    value = (found[0] - plain[0]).abs() <= _VALUE * plain[0].abs() + 1e-6
    near = [
        float((a - b).norm()) <= _SLOPE * float(b.norm()) + 1e-6 for a, b in zip(found[1:], plain[1:], strict=True)
    ] if bool(value.all()) else [False]  # fmt: skip
    return all(near)
