"""The registry: `@register` on an attack or a defense makes the CLI, the docs table and the contract tests know it.

Files beside the built-in ones are imported on first use; other packages add theirs through the entry-point group
"gradaudit.plugins" (each entry names a module to import).
"""

import dataclasses
import importlib
import pkgutil
from collections.abc import Mapping
from importlib.metadata import entry_points
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from gradaudit.errors import BadInputError, unknown_name

PLUGINS = "gradaudit.plugins"
_entries: dict[str, dict[str, type[Any]]] = {"attack": {}, "defense": {}}
_loaded: set[str] = set()
C = TypeVar("C", bound=type[Any])
D = TypeVar("D")


def register(cls: C) -> C:
    """Add a frozen dataclass to the registry under its `kind` and `name`.

    Raises:
        TypeError: not a frozen dataclass with a name and a kind, or a name that is taken.
    """
    kind, name = getattr(cls, "kind", None), getattr(cls, "name", None)
    if not dataclasses.is_dataclass(cls) or not cls.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(f"{cls.__name__} must be a frozen dataclass: its fields are its hyperparameters")
    if kind not in _entries or not name:
        raise TypeError(f"{cls.__name__} needs a class attribute `name` and a base class with a `kind`")
    if name in _entries[kind] and _entries[kind][name].__qualname__ != cls.__qualname__:
        raise TypeError(f"{kind} '{name}' is registered twice")
    _entries[kind][name] = cls
    return cls


def known(kind: str) -> dict[str, type[Any]]:
    """Return everything registered under "attack" or "defense", by name."""
    if kind not in _loaded:
        _loaded.add(kind)
        folder = importlib.import_module(f"gradaudit.{kind}s")
        for module in pkgutil.iter_modules(folder.__path__):
            importlib.import_module(f"gradaudit.{kind}s.{module.name}")
        for entry in entry_points(group=PLUGINS):
            importlib.import_module(entry.value)
    return dict(sorted(_entries[kind].items()))


def from_plugin(cls: type[Any]) -> bool:
    """Return whether a class is of a package that the entry-point group names."""
    own = cls.__module__.partition(".")[0]
    return own != "gradaudit" and own in {entry.value.partition(".")[0] for entry in entry_points(group=PLUGINS)}


def build(kind: str, name: str, values: Mapping[str, Any]) -> Any:
    """Return a registered attack or defense with some of its fields set.

    Raises:
        BadInputError: an unknown name or field (with the closest one), or a value that does not fit the field.
    """
    found = known(kind)
    if name not in found:
        raise unknown_name(kind, name, found)
    cls = found[name]
    fields = [f.name for f in dataclasses.fields(cls)]
    for key in values:
        if key not in fields:
            raise unknown_name(f"field of {kind} '{name}'", key, fields)
    try:
        return TypeAdapter(cls).validate_python(dict(values))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        raise BadInputError(
            f"{kind} '{name}': {where}: {first['msg']}, got {first['input']!r}"
            if where
            else f"{kind} '{name}': {first['msg']}"
        ) from None


def describe(item: Any) -> dict[str, Any]:
    """Return a registered object as plain data: its name and all its fields."""
    return {"name": item.name, **dataclasses.asdict(item)}


def identity(item: Any, one_gradient: bool) -> dict[str, Any]:
    """Return what tells a registered object from others: all fields but those that change nothing.

    Args:
        item: the object.
        one_gradient: the client sends one gradient, so that fields about weight changes have no effect.
    """
    idle = {
        f.name
        for f in dataclasses.fields(item)
        if (f.metadata.get("later") and getattr(item, f.name) == f.default)
        or (one_gradient and f.metadata.get("deltas"))
    }
    return {name: value for name, value in describe(item).items() if name not in idle}


def filled(cls: type[D], item: Any, **own: Any) -> D:
    """Return a dataclass whose fields have the values that an object has under the same names.

    Args:
        cls: the dataclass.
        item: the object.
        own: fields that it has otherwise, or not at all.
    """
    same = {f.name: getattr(item, f.name) for f in dataclasses.fields(cls) if f.name not in own}  # type: ignore[arg-type]
    return cls(**same, **own)


def hyper(
    default: Any, about: str, *, unit: str = "", source: str = "", later: bool = False, deltas: bool = False
) -> Any:
    """Return a dataclass field with its meaning, unit and the source of its default beside it.

    Args:
        default: the default value (immutable).
        about: what it is, in one line.
        unit: its unit, when it has one.
        source: where the default comes from (paper, section), or why it differs.
        later: it was added after cases were run, and its default does what was done before: cases that do not set it
            keep their ids, and their records.
        deltas: it acts on weight changes only, and is no part of the id of a case of one gradient.
    """
    return dataclasses.field(
        default=default, metadata={"about": about, "unit": unit, "source": source, "later": later, "deltas": deltas}
    )
