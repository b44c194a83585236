"""Progress of long work: an attack says `track(range(steps), "matching")`; whoever runs it decides how to show it.

Whoever runs it may end it, too: at the next step that it reports once its time is over.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sized
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

Sink = Callable[[str, int, int | None], None]
"""Called with (what is being done, steps done, steps in all or None)."""

_sink: ContextVar[Sink | None] = ContextVar("gradaudit_progress", default=None)
_end: ContextVar[float] = ContextVar("gradaudit_end", default=math.inf)
T = TypeVar("T")


@contextmanager
def shown_by(sink: Sink) -> Iterator[None]:
    """Send the progress of everything inside the block to `sink`."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)


class TimeIsOverError(Exception):
    """Work was ended because its time is over.

    Args:
        said: during what.
        found: what it has; None for nothing.
    """

    def __init__(self, said: str, found: Any = None) -> None:
        super().__init__(said)
        self.found = found


class StoppedError(KeyboardInterrupt):
    """Ctrl-C in work that has something to show already.

    Args:
        found: what it has.
    """

    def __init__(self, found: Any) -> None:
        super().__init__("stopped with Ctrl-C")
        self.found = found


@contextmanager
def answering(answer: Callable[[Any], Any]) -> Iterator[None]:
    """Let Ctrl-C, or the end of the time, inside the block give what there is already.

    Args:
        answer: given what a block within had, None for nothing, it returns what this one has, None for nothing.

    Raises:
        StoppedError: Ctrl-C, with the answer.
        KeyboardInterrupt: Ctrl-C before there was one.
        TimeIsOverError: the end of the time, with the answer where there is one.
    """
    try:
        yield
    except KeyboardInterrupt as stop:
        found = answer(stop.found if isinstance(stop, StoppedError) else None)
        if found is None:
            raise KeyboardInterrupt from None
        raise StoppedError(found) from None
    except TimeIsOverError as over:
        token = _end.set(math.inf)  # the answer may take its time
        try:
            over.found = answer(over.found)
        finally:
            _end.reset(token)
        raise


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """End the work inside the block after so many seconds, at the first step that it reports or `on_time`.

    Raises:
        TimeIsOverError: inside the block, where it was ended.
    """
    token = _end.set(min(time.monotonic() + seconds, _end.get()))
    try:
        yield
    finally:
        _end.reset(token)


def on_time(what: str) -> None:
    """Go on with `what` as long as there is time: for loops that are too short to be shown.

    Raises:
        TimeIsOverError: the time is over.
    """
    if time.monotonic() > _end.get():
        raise TimeIsOverError(f"time was over during {what}")


def step(what: str, done: int, total: int | None = None) -> None:
    """Report that `done` of `total` steps of `what` are done."""
    sink = _sink.get()
    if sink is not None:
        sink(what, done, total)
    on_time(what)


def track(items: Iterable[T], what: str, total: int | None = None) -> Iterator[T]:
    """Yield the items, reporting progress after each."""
    if total is None and isinstance(items, Sized):
        total = len(items)
    for done, item in enumerate(items, 1):
        yield item
        step(what, done, total)
