"""Strategies: good inputs with something wrong in them, of every kind that the program reads."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from hypothesis import strategies as st
from safetensors.torch import load, save

from fuzz.corpus import CASE, CLAIMS, SWEEP, as_toml, toml
from gradaudit.registry import known


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


def _leaves(value: Any) -> Iterator[Any]:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else None
    if inner is None:
        yield value
    else:
        for one in inner:
            yield from _leaves(one)


@st.composite
def broken_data(draw: st.DrawFn, data: Any, most: int = 2) -> Any:
    """Draw data like some JSON or TOML, with a value replaced, left out, moved or added."""
    data = copy.deepcopy(data)
    for _ in range(draw(st.integers(1, most))):
        places = [path for path in _places(data) if path]
        if not places:
            return copy.deepcopy(draw(ODD))
        *where, last = draw(st.sampled_from(places[:400]))
        held: Any = data
        for key in where:
            held = held[key]
        how = draw(st.sampled_from(["replace", "replace", "near", "near", "drop", "add", "swap"]))
        if how == "near" and isinstance(held[last], int | float):
            held[last] = type(held[last])(held[last] * draw(st.sampled_from([0, -1, 2, 10, 1000, 10**6])))
        elif how == "near" and isinstance(held[last], str):
            held[last] = draw(st.sampled_from(sorted({v for v in _leaves(data) if isinstance(v, str)})))
        elif how in ("replace", "near"):
            held[last] = copy.deepcopy(draw(ODD))  # what is drawn may be changed next
        elif how == "drop":
            del held[last]
        elif how == "add" and isinstance(held, dict):
            held[draw(st.sampled_from(["x", "name", "", "__class__", "path", "auto_map", "lora", "axes"]))] = (
                copy.deepcopy(draw(ODD))
            )
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
    """Sweeps of two points."""
    made = st.one_of(broken_data(SWEEP).map(toml), broken_bytes(toml(SWEEP)))
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


@st.composite
def updates(draw: st.DrawFn, root: Path) -> Input:
    """Updates that no training sends, in bundles that are otherwise whole, and knowledge that nobody has."""
    tensors = load((root / "bundle" / "update.safetensors").read_bytes())
    manifest = json.loads((root / "bundle" / "manifest.json").read_bytes())
    for name in draw(st.lists(st.sampled_from(sorted(tensors)), max_size=6, unique=True)):
        value, how = (
            tensors.pop(name),
            draw(st.sampled_from(["spike", "scale", "zero", "one", "noise", "rows", "drop"])),
        )
        size = draw(st.sampled_from([1e-30, 1e-6, 1.0, 1e6, 1e30, -1.0]))
        if how == "spike":
            value = torch.zeros_like(value)
            value.view(-1)[-1] = size
        elif how == "rows":
            value = value.flip(0).contiguous()
        elif how == "noise":
            value = size * torch.randn(value.shape, generator=torch.Generator().manual_seed(0))
        elif how != "drop":
            value = {"scale": size * value, "zero": 0 * value, "one": torch.full_like(value, size)}[how]
        if how != "drop":
            tensors[name] = value
    if draw(st.booleans()):
        manifest["knowledge"] = draw(broken_data(manifest["knowledge"], 3))
    else:
        sure = {"lengths": [6, 5], "labels": [0, 1], "dropout": draw(st.sampled_from([0.0, 0.1, 0.9])),
                "defenses": [{"name": draw(st.sampled_from(sorted(known("defense"))))}]}  # fmt: skip
        manifest["knowledge"] |= {key: sure[key] for key in draw(st.lists(st.sampled_from(sorted(sure)), unique=True))}
    manifest["kind"] = draw(st.sampled_from(["gradient", "gradient", "delta"]))
    data = save(tensors)
    manifest |= {"sha256": hashlib.sha256(data).hexdigest(), "tensors": {n: list(t.shape) for n, t in tensors.items()}}
    files = {"bundle/update.safetensors": data, "bundle/manifest.json": json.dumps(manifest).encode()}
    attack = draw(st.sampled_from([("dager",), ("decode",), ("blind",), ("tag", "--set", "steps=2")]))
    return Input("update", ("attack", "bundle", "--json", "--attack", *attack), files)


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
        "update": updates(root),
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
