"""Progress of long work: an attack says `track(range(steps), "matching")`; whoever runs it decides how to show it."""

from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

Sink = Callable[[str, int, int | None], None]
"""Called with (what is being done, steps done, steps in all or None)."""

_sink: ContextVar[Sink | None] = ContextVar("gradaudit_progress", default=None)
T = TypeVar("T")


@contextmanager
def shown_by(sink: Sink) -> Iterator[None]:
    """Send the progress of everything inside the block to `sink`."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)


def step(what: str, done: int, total: int | None = None) -> None:
    """Report that `done` of `total` steps of `what` are done."""
    sink = _sink.get()
    if sink is not None:
        sink(what, done, total)


def track(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield the items, reporting progress after each."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    for done, item in enumerate(items, 1):
        yield item
        step(what, done, total)
