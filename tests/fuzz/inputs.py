"""Strategies: good inputs with something wrong in them, of every kind that the program reads."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st

from fuzz.corpus import CASE, CLAIMS, as_toml, toml


@dataclass(frozen=True)
class Input:
    """One input of the program.

    Args:
        kind: of file that is broken.
        arguments: of the command line, run in a copy of the corpus.
        files: contents by path in that copy.
        codes: exit codes that are documented for it.
    """

    kind: str
    arguments: tuple[str, ...]
    files: dict[str, bytes] = field(default_factory=dict)
    codes: tuple[int, ...] = (0, 2, 3)


ODD_NUMBERS = st.sampled_from(
    [0, -1, 1, 2, 7, 2**31, 2**63, -(2**63), 10**9, 10**30, 0.0, -0.5, 1e-320, 1e308, float("nan"), float("inf")]
)
ODD_TEXTS = st.sampled_from(
    ["", " ", "none", "../../../etc/passwd", "/dev/zero", "~", "a" * 5000, "\u202e", "\x00", "\x1b[31m", "{}", "%s",
     "é", "🏠", "0-99:q", "*:f", "0:", "random:bert", "dager", "decode", "sgd", "text", "1e9"]
)  # fmt: skip
ODD = st.one_of(
    ODD_NUMBERS,
    ODD_TEXTS,
    st.booleans(),
    st.none(),
    st.text(max_size=8),
    st.sampled_from(
        [[], {}, [[]], [1], {"a": 1}, ["x"] * 300, {"": {"": {}}}, [None], {"name": "topk"}, [{"name": "sign"}]]
    ),
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield path
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, one in inner:
        yield from _places(one, (*path, key))


@st.composite
def broken_data(draw: st.DrawFn, data: Any, most: int = 2) -> Any:
    """Draw data like some JSON or TOML, with a value replaced, left out, moved or added."""
    data = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, most))):
        places = [path for path in _places(data) if path]
        if not places:
            return draw(ODD)
        *where, last = draw(st.sampled_from(places[:400]))
        held: Any = data
        for key in where:
            held = held[key]
        how = draw(st.sampled_from(["replace", "replace", "replace", "drop", "add", "swap"]))
        if how == "replace":
            held[last] = draw(ODD)
        elif how == "drop":
            del held[last]
        elif how == "add" and isinstance(held, dict):
            held[draw(st.sampled_from(["x", "name", "", "__class__", "path", "auto_map", "lora", "axes"]))] = draw(ODD)
        else:
            held[last] = copy.deepcopy(draw(st.sampled_from([data, held, *(CASE.values())])))
    return data


@st.composite
def broken_bytes(draw: st.DrawFn, data: bytes) -> bytes:
    """Draw a file that was cut, flipped, filled, doubled or is another altogether."""
    how = draw(st.sampled_from(["cut", "flip", "insert", "zeros", "double", "other", "start"]))
    at = draw(st.integers(0, max(0, len(data) - 1)))
    if how == "cut":
        return data[:at]
    if how == "start":
        return data[at:]
    if how == "flip" and data:
        return data[:at] + bytes([data[at] ^ (1 << draw(st.integers(0, 7)))]) + data[at + 1 :]
    if how == "insert":
        return data[:at] + draw(st.binary(min_size=1, max_size=8)) + data[at:]
    if how == "zeros":
        return data[:at] + bytes(len(data) - at)
    if how == "double":
        return data + data
    return draw(st.one_of(st.binary(max_size=40), st.sampled_from([b"", b"\xff\xfe", b"[" * 2000, b"9" * 6000, b"{}"])))


def cases() -> st.SearchStrategy[Input]:
    """Cases that are checked, and run where the attack is quick."""
    made = st.one_of(broken_data(CASE).map(toml), broken_bytes(toml(CASE)))
    commands = st.sampled_from([("check",), ("check",), ("run", "--out", "out", "--json")])
    return st.builds(lambda d, c: Input("case", (*c, "file.toml"), {"file.toml": d}), made, commands)


def sweeps() -> st.SearchStrategy[Input]:
    axes = {"data.batch_size": [1, 2], "client.dropout": [True]}
    good = {k: v for k, v in CASE.items() if k != "client"} | {
        "axes": axes,
        "data": {"path": "rows.csv", "label": "label"},
    }
    made = st.one_of(broken_data(good).map(toml), broken_bytes(toml(good)))
    return made.map(lambda d: Input("sweep", ("sweep", "file.toml", "--out", "out", "--json"), {"file.toml": d}))


def claims() -> st.SearchStrategy[Input]:
    made = st.one_of(broken_data(CLAIMS).map(toml), broken_bytes(toml(CLAIMS)))
    return made.map(lambda d: Input("claims", ("claims", "file.toml"), {"file.toml": d}, (0, 1, 2, 3)))


def settings() -> st.SearchStrategy[Input]:
    """Options of the command line."""
    keys = st.sampled_from(
        ["seed", "model", "data.path", "data.text", "attack.name", "client", "a.b", "", "lora.rank", "layers"]
    )
    pair = st.builds(lambda k, v: f"{k}={as_toml(v)}", keys, ODD) | st.text(max_size=12)
    options = st.sampled_from(["--set", "--device", "--selection", "--attack", "--seed", "--blocks", "--model"])
    values = (pair | ODD_TEXTS).filter(lambda text: "\x00" not in text)
    case = {"file.toml": toml(CASE)}
    return st.one_of(
        values.map(lambda v: Input("options", ("check", "file.toml", "--set", v), case)),
        values.map(
            lambda v: Input("options", ("run", "file.toml", "--out", "out", "--fail-on", v), case, (0, 1, 2, 3))
        ),
        st.builds(lambda o, v: Input("options", ("attack", "bundle", o, v), {}), options, values),
    )


def data(root: Path) -> st.SearchStrategy[Input]:
    """Files of rows, in each format."""
    rows = [{"text": "river stone", "label": 0}, {"text": "quiet garden", "label": 1}, {"text": "blue", "label": 1}]
    lines = broken_data(rows).map(
        lambda d: "".join(json.dumps(one) + "\n" for one in (d if isinstance(d, list) else [d])).encode()
    )
    table = st.lists(st.lists(ODD_TEXTS | st.text(max_size=5), max_size=4), max_size=4)
    separated = table.map(
        lambda t: "\n".join([",".join(["text", "label"]), *map(",".join, t)]).encode("utf8", "replace")
    )
    good = (root / "rows.csv").read_bytes()
    made = st.one_of(
        st.tuples(st.just("jsonl"), lines),
        st.tuples(st.just("csv"), separated | broken_bytes(good)),
        st.tuples(st.just("tsv"), broken_bytes(good.replace(b",", b"\t"))),
        st.tuples(st.just("txt"), st.binary(max_size=60)),
        st.tuples(st.just("parquet"), broken_bytes((root / "rows.parquet").read_bytes())),
    )
    fields = st.sampled_from(
        [{"label": "label"}, {"label": 1, "text": 0}, {"text": 7}, {}, {"header": False, "text": 0}]
    )

    def check(found: tuple[str, bytes], told: dict[str, Any]) -> Input:
        name = f"broken.{found[0]}"
        case = {"model": "random:bert", "data": {"path": name, **told}, "attack": {"name": "blind"}}
        return Input("data", ("check", "file.toml"), {name: found[1], "file.toml": toml(case)})

    return st.builds(check, made, fields)


def _json_file(root: Path, path: str) -> st.SearchStrategy[bytes]:
    good = (root / path).read_bytes()
    broken = broken_data(json.loads(good), 3).map(lambda d: json.dumps(d).encode("utf8", errors="replace"))
    return st.one_of(broken, broken, broken_bytes(good))


def _tensors(root: Path, path: str) -> st.SearchStrategy[bytes]:
    """Safetensors files whose header or bytes are broken."""
    good = (root / path).read_bytes()
    size = int.from_bytes(good[:8], "little")
    header = json.loads(good[8 : 8 + size])

    def joined(found: Any) -> bytes:
        text = json.dumps(found).encode("utf8", errors="replace")
        return len(text).to_bytes(8, "little") + text + good[8 + size :]

    return st.one_of(broken_data(header).map(joined), broken_bytes(good))


def _of_folder(kind: str, root: Path, path: str, arguments: tuple[str, ...]) -> st.SearchStrategy[Input]:
    made = _tensors(root, path) if path.endswith(".safetensors") else _json_file(root, path)
    return made.map(lambda d: Input(kind, arguments, {path: d}))


def every_kind(root: Path) -> dict[str, st.SearchStrategy[Input]]:
    """Return the strategy of each kind of input, by its name.

    Args:
        root: of the corpus (`make_corpus`).
    """
    records = [path for path in ("run/records.jsonl", "run/texts.jsonl") if (root / path).is_file()]
    bundle, adapted = ("attack", "bundle", "--json"), ("attack", "adapted", "--json")
    return {
        "case": cases(),
        "sweep": sweeps(),
        "claims": claims(),
        "options": settings(),
        "data": data(root),
        "bundle": st.one_of(
            _of_folder("bundle", root, "bundle/manifest.json", bundle),
            _of_folder("bundle", root, "bundle/update.safetensors", bundle),
        ),
        "config": st.one_of(
            _of_folder("config", root, "bundle/model/config.json", bundle),
            _of_folder("config", root, "bundle/model/model.safetensors", bundle),
        ),
        "tokenizer": st.one_of(
            *(
                _of_folder("tokenizer", root, f"bundle/model/{name}.json", bundle)
                for name in ("tokenizer", "tokenizer_config")
            )
        ),
        "adapters": st.one_of(
            *(
                _of_folder("adapters", root, f"adapted/model/adapter/{name}", adapted)
                for name in ("adapter_config.json", "adapter_model.safetensors")
            )
        ),
        "records": st.one_of(
            _of_folder("records", root, "run/run.json", ("report", "run", "--show-text")),
            *(st.one_of(broken_bytes((root / p).read_bytes()), _lines(root, p)).map(
                lambda d, p=p: Input("records", ("report", "run", "--show-text"), {p: d})) for p in records),
        ),
        "inverter": st.one_of(
            *(
                _of_folder("inverter", root, f"inverter/{path.name}", ("run", "lti.toml", "--out", "out", "--json"))
                for path in sorted((root / "inverter").iterdir())
                if path.suffix in (".json", ".safetensors")
            )
        ),
        "checkpoint": _of_folder(
            "checkpoint", root, "run/run.json", ("run", "again.toml", "--out", "run", "--json")
        ),
    }  # fmt: skip


def _lines(root: Path, path: str) -> st.SearchStrategy[bytes]:
    """Records of which the first is broken."""
    first, _, rest = (root / path).read_bytes().partition(b"\n")
    return broken_data(json.loads(first), 3).map(lambda d: json.dumps(d).encode("utf8", "replace") + b"\n" + rest)
