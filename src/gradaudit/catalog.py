"""What there is to choose from: `gradaudit list` and `show`, derived from the registry, and cases to start from."""

import dataclasses
import inspect
import json
import os
import tomllib
from pathlib import Path
from typing import Any

from gradaudit.attacks.base import Attack
from gradaudit.case import parse_case
from gradaudit.data.draw import draw
from gradaudit.data.named import NAMED
from gradaudit.data.text import load_rows
from gradaudit.defense_traits import traits_of
from gradaudit.errors import unknown_name
from gradaudit.metrics.images import IMAGE_METRICS
from gradaudit.metrics.text import METRICS
from gradaudit.models.families import FAMILIES
from gradaudit.models.images import IMAGE_MODELS
from gradaudit.models.zoo import EMBEDDED, RANDOM, SHAPES
from gradaudit.registry import known

_CASE = """\
# An audit of your own training: the data is yours, the attacker is an honest-but-curious server.
model = {model:<25} # embedded name, hub id or folder; 'gradaudit list models'
task = {task:<26} # or "causal-lm" for next words, "classification" with a label column
seed = 0

[data]
{source}
batch_size = {size:<20} # sentences an update
batches = {batches:<23} # updates, each attacked by itself

[client]
dropout = {dropout:<23} # true: training mode, at the model's configured rates
freeze = []                       # for example ["embeddings"]

[knowledge]                       # what the attacker is given
labels = false
lengths = false

[attack]
name = "auto"                     # several, two minutes a batch; 'gradaudit list attacks'
"""
_CLASSES = {"model": '"minilm"', "task": '"classification"', "dropout": "true"}
_NEXT_WORDS = {"model": '"smollm2"', "task": '"causal-lm"', "dropout": "false"}  # its family has no dropout

EXAMPLE = _CASE.format(
    **_CLASSES,
    source="""\
source = "sample"                 # embedded sentences; your own, in place of this line ('gradaudit init' writes it):
# path = "messages.csv"           # csv, tsv, jsonl, parquet, txt; or hub = "..."; or source = "cola", ...
# text = "body"                   # column name, or 0-based number
# label = "topic\"""",
    size=4,
    batches=2,
)
"""A case that runs as it is."""


def starter(data: Path, text: str | None, label: str | None, beside: Path) -> str:
    """Return a commented case, as TOML, that audits a client who trains on a file.

    Args:
        data: the file, from the current folder.
        text, label: columns, by name or 0-based number; without a label the client trains on next words.
        beside: folder of the case file, from which the case finds the data.

    Raises:
        BadInputError: no such file or column, or a row without text.
    """
    where = Path(os.path.relpath(data.expanduser(), beside)).as_posix()
    told = {"path": json.dumps(where, ensure_ascii=False)}
    for key, column in (("text", text), ("label", label)):
        if column is not None:
            told[key] = column if column.isdecimal() else json.dumps(column, ensure_ascii=False)
    kind = _NEXT_WORDS if label is None else _CLASSES
    source = "\n".join(f"{key} = {value}" for key, value in told.items())
    rows = load_rows(parse_case(tomllib.loads(_CASE.format(**kind, source=source, size=1, batches=1))).data, beside)
    size = min(_SIZE, len(rows))
    written = _CASE.format(**kind, source=source, size=size, batches=min(_BATCHES, len(rows) // size))
    draw(parse_case(tomllib.loads(written)).data, rows)
    return written


_SIZE, _BATCHES = 4, 5


def listing(kind: str) -> list[dict[str, str]]:
    """Return name and one line about each of "attacks", "models", "metrics", "defenses" or "data".

    Raises:
        BadInputError: another kind.
    """
    if kind in ("attacks", "defenses"):
        return [{"name": name, "about": _first_line(cls)} for name, cls in known(kind[:-1]).items()]
    if kind == "metrics":
        return [{"name": name, "about": about} for name, about in (METRICS | IMAGE_METRICS).items()]
    if kind == "models":
        embedded = [{"name": name, "about": item.about} for name, item in EMBEDDED.items()]
        shapes = [{"name": RANDOM + name, "about": f"{item.about}, random weights"} for name, item in SHAPES.items()]
        other = [
            {"name": "FOLDER", "about": f"any local folder with a model of type {', '.join(sorted(FAMILIES))}"},
            {"name": "OWNER/NAME", "about": "any hub id of those families"},
            {"name": RANDOM + "FOLDER", "about": "a folder's config and tokenizer with random weights"},
        ]
        images = [{"name": name, "about": f"{item.about}; of images"} for name, item in IMAGE_MODELS.items()]
        return embedded + shapes + other + images
    if kind == "data":
        return [{"name": name, "about": f"{item.about}; license: {item.license}"} for name, item in NAMED.items()]
    raise unknown_name("kind", kind, _LISTED)


def details(kind: str, name: str) -> dict[str, Any]:
    """Return everything about one attack, defense, model, metric or data set: fields, defaults, sources, what it needs.

    Raises:
        BadInputError: an unknown kind or name.
    """
    kind = kind.rstrip("s")
    if (kind, name) == ("case", "example"):
        return {"kind": kind, "name": name, "about": EXAMPLE}
    if kind in ("attack", "defense"):
        found = known(kind)
        if name not in found:
            raise unknown_name(kind, name, found)
        return _described(kind, found[name])
    if kind in ("model", "metric", "data"):
        items = {item["name"]: item for item in listing(kind if kind == "data" else kind + "s")}
        if name not in items:
            raise unknown_name(kind, name, items)
        return {"kind": kind, **items[name]}
    raise unknown_name("kind", kind, ["attack", "model", "metric", "defense", "data", "case"])


def shipped() -> dict[str, Any]:
    """Return all of the catalog, as the file that is shipped holds it.

    `python -m gradaudit.catalog > src/gradaudit/data/catalog.json` writes it anew.
    """
    every = {kind: listing(kind) for kind in _LISTED}
    named = {
        kind.removesuffix("s"): {item["name"]: details(kind, item["name"]) for item in items}
        for kind, items in every.items()
    }
    return {"listing": every, "details": named | {"case": {"example": details("case", "example")}}}


_LISTED = ("attacks", "models", "metrics", "defenses", "data")


def _reckoned_with(cls: type[Any]) -> list[str]:
    """Return the names of the defenses whose traits an attack handles."""
    if cls.takes_any:
        return ["*"]
    on_text = set(cls.tasks) & set(Attack.tasks)  # `Attack` itself guesses words back from stand-ins
    handled = cls.handles | ({"stand-ins"} if on_text else set())
    return [name for name in known("defense") if (own := traits_of(name)) and own <= handled]


def _described(kind: str, cls: type[Any]) -> dict[str, Any]:
    out: dict[str, Any] = {"kind": kind, "name": cls.name, "about": inspect.getdoc(cls) or ""}
    if kind == "attack":
        out |= {
            "source": cls.source,
            "needs": list(cls.needs),
            "tasks": list(cls.tasks),
            "models_dropout": cls.models_dropout,
            "models_defenses": _reckoned_with(cls),
        }
    else:
        out["acts_on"] = cls.acts_on
    out["fields"] = [
        {
            "name": f.name,
            "default": list(f.default) if isinstance(f.default, tuple) else f.default,
            **{key: f.metadata.get(key, "") for key in ("about", "unit", "source")},
        }
        for f in dataclasses.fields(cls)
    ]
    return out


def _first_line(cls: type[Any]) -> str:
    return (inspect.getdoc(cls) or "").split("\n")[0]


if __name__ == "__main__":
    print(json.dumps(shipped(), ensure_ascii=False, indent=1))
