"""Kinds of data: what differs from text to images stands in one file of each room, and is looked up through this."""

from collections.abc import Iterator
from typing import Generic, TypeVar

from gradaudit.errors import NotSupportedError

T = TypeVar("T")


class ByKind(Generic[T]):
    """What one room has for each kind of data.

    Args:
        what: it is, in words, for the error.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._items: dict[str, T] = {}

    def add(self, kind: str, item: T) -> T:
        """Register what there is for a kind, and return it.

        Raises:
            ValueError: there is something else already.
        """
        if self._items.setdefault(kind, item) is not item:
            raise ValueError(f"{self._what} of '{kind}' is registered twice")
        return item

    def __getitem__(self, kind: str) -> T:
        """Return what there is for a kind.

        Raises:
            NotSupportedError: nothing.
        """
        if kind not in self._items:
            raise NotSupportedError(f"there is no {self._what} of {kind}; known are {', '.join(self._items)}")
        return self._items[kind]

    def get(self, kind: str) -> T | None:
        """Return what there is for a kind; None for nothing."""
        return self._items.get(kind)

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def remove(self, kind: str) -> None:
        """Forget a kind."""
        self._items.pop(kind, None)
