"""The wall: no private batch reaches an attack, by imports, by types, or by any chain of references."""

from __future__ import annotations

import ast
import gc
import inspect
import types
import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path

import pytest
import torch

import gradaudit
import gradaudit.models.base
import gradaudit.models.views
from gradaudit.attacks.base import Attack
from gradaudit.audit.batch import chance, sent
from gradaudit.audit.prepare import prepare, private_batch
from gradaudit.case import parse_case
from gradaudit.client.client import Client
from gradaudit.models.base import Model
from gradaudit.registry import known
from gradaudit.streams import draw_seed, stream
from gradaudit.types import (
    Batch,
    Given,
    ImageBatch,
    Knowledge,
    LocalTraining,
    Observation,
    PublicImages,
    Reconstruction,
)
from tiny_models import SETTINGS, batch_of, seen_of, sentences

ROOT = Path(gradaudit.__file__).parent
FILES = {
    ".".join(("gradaudit", *path.relative_to(ROOT).with_suffix("").parts)).removesuffix(".__init__"): path
    for path in ROOT.rglob("*.py")
}
GROUND = (
    "errors",
    "types",
    "streams",
    "progress",
    "registry",
    "selection",
    "files",
    "workspace",
    "kinds",
    "scores",
    "defense_traits",
)
"""Files at the root that every room may import."""
TOP = ("__main__", "case", "catalog", "cli", "demo")
"""Files at the root that put rooms together; no room but those named in `ARROWS` imports one."""
ARROWS: dict[str, tuple[str, ...]] = {
    "models": (),
    "data": ("models",),
    "defenses": ("models",),
    "metrics": ("record",),
    "leakage": ("models",),
    "learned": ("models",),
    "attacks": ("models", "leakage", "learned"),
    "accounting": ("defenses",),
    "client": ("models", "defenses", "learned"),
    "judge": ("models", "client", "data", "leakage", "metrics", "record"),
    "audit": ("accounting", "attacks", "case", "client", "data", "defenses", "judge", "learned", "machine",
              "metrics", "models", "record"),
    "bundles": ("accounting", "attacks", "audit", "case", "data", "models"),
    "integrations": ("bundles",),
    "verdict": ("record",),
    "sweeps": ("accounting", "audit", "case", "client", "data", "defenses", "leakage", "machine", "metrics", "models",
               "record", "verdict"),
    "report": ("accounting", "bundles", "flags", "metrics", "record", "sweeps", "verdict"),
    "api": ("audit", "bundles", "case", "catalog", "machine", "metrics", "record", "report", "verdict"),
}  # fmt: skip
"""Which room may import which, beside itself and the ground; one list for the folders below a room."""
ATTACK_SIDE = ("attacks", "leakage", "learned", "models", *GROUND)
"""All that an attack may reach by imports, at any depth: a new room is outside until someone lets it in."""
MAY_JOIN = ("gradaudit.judge", "gradaudit.audit", "gradaudit.demo", "gradaudit.cli")
"""Rooms and files that may see both a batch and what an attack makes of it."""
MOST_FILES, MOST_LINES = 20, 400
"""Of a folder, and of a file that does not say why it is longer."""


def names_for_types_only(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)


def statements(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield every statement that may run: whole functions too, not what only type checkers read."""
    for node in ast.iter_child_nodes(tree):
        if names_for_types_only(node):
            continue
        yield node
        yield from statements(node)


def imported(path: Path, name: str) -> set[str]:
    """Return the gradaudit modules that a file imports anywhere (inside functions as well)."""
    found = set()
    for node in statements(ast.parse(path.read_text(encoding="utf8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: relative import"
            found |= {node.module or "", *(f"{node.module}.{alias.name}" for alias in node.names)}
    return {module for module in found if module in FILES}


IMPORTS = {name: imported(path, name) for name, path in FILES.items()}


def reach(start: str) -> set[str]:
    found, todo = set(), [start]
    while todo:
        for module in IMPORTS[todo.pop()] - found - {"gradaudit"}:  # its version alone
            found.add(module)
            todo.append(module)
    return found


def side(*rooms: str) -> list[str]:
    return sorted(name for name in FILES if name.split(".")[1:2] and name.split(".")[1] in rooms)


def within(module: str, rooms: tuple[str, ...]) -> bool:
    return any(module == f"gradaudit.{room}" or module.startswith(f"gradaudit.{room}.") for room in rooms)


def test_no_two_classes_have_one_name():
    where: dict[str, str] = {}
    for module, path in FILES.items():
        for node in ast.walk(ast.parse(path.read_text(encoding="utf8"))):
            if isinstance(node, ast.ClassDef):
                assert node.name not in where, f"{node.name} is in {where[node.name]} and in {module}"
                where[node.name] = module


def test_the_import_reader_sees_what_is_there():
    assert "gradaudit.client.client" in IMPORTS["gradaudit.judge.diagnosis"]
    assert "gradaudit.leakage.rowspace.subspace" in IMPORTS["gradaudit.attacks.dager"]
    assert "gradaudit.models.base" not in IMPORTS["gradaudit.types"], "for type checkers only"
    assert {"gradaudit.client.client", "gradaudit.data.text"} <= reach("gradaudit.audit.run")
    assert len(side("attacks")) >= 5


def room_of(module: str) -> str:
    return module.split(".")[1]


@pytest.mark.parametrize("room", sorted(ARROWS))
def test_a_room_imports_the_rooms_it_may(room):
    allowed = {room, *ARROWS[room], *GROUND}
    found = {(module, other) for module in side(room) for other in IMPORTS[module] - {"gradaudit"}}
    assert found
    assert not {pair for pair in found if room_of(pair[1]) not in allowed}
    used = {room_of(other) for _, other in found}
    assert set(ARROWS[room]) <= used, "an arrow that nobody needs is taken away"


def test_every_folder_is_a_room_and_every_file_has_its_place():
    rooms = {path.name for path in ROOT.iterdir() if (path / "__init__.py").exists()}
    assert rooms == set(ARROWS)
    files = {path.stem for path in ROOT.glob("*.py")}
    between = {name for arrows in ARROWS.values() for name in arrows}
    assert files - {"__init__"} <= {*GROUND, *TOP, *between}
    for name in GROUND:
        assert {room_of(m) for m in IMPORTS[f"gradaudit.{name}"] - {"gradaudit"}} <= {*GROUND, "models"}


def test_no_folder_and_no_file_is_too_large_to_take_in():
    for folder in (ROOT, *(path for path in ROOT.rglob("*") if path.is_dir())):
        assert len(list(folder.glob("*.py"))) <= MOST_FILES, folder.name
    for name, path in FILES.items():
        text = path.read_text(encoding="utf8")
        assert len(text.splitlines()) <= MOST_LINES or "One file because" in (
            ast.get_docstring(ast.parse(text)) or ""
        ), name


def test_no_module_imports_itself_through_others():
    for name in FILES:
        assert not any(name in reach(other) for other in IMPORTS[name] - {"gradaudit", name}), name


@pytest.mark.parametrize("module", side("attacks", "leakage", "learned"))
def test_the_attack_side_reaches_its_own_rooms_alone(module):
    assert not {m for m in reach(module) if room_of(m) not in ATTACK_SIDE}


@pytest.mark.parametrize("module", sorted(set(side("attacks")) - {"gradaudit.attacks.auto"}))  # which runs others
def test_attacks_do_not_import_each_other(module):
    others = {m for m in IMPORTS[module] if within(m, ("attacks",))}
    assert others <= {"gradaudit.attacks", "gradaudit.attacks.base", "gradaudit.attacks.options"}


def mentions(name: str, word: str) -> bool:
    tree = ast.parse(FILES[name].read_text(encoding="utf8"))
    return any(word in (getattr(n, "id", None), getattr(n, "attr", None), getattr(n, "name", None))
               for n in ast.walk(tree))  # fmt: skip


def test_only_judge_and_audit_join_both_sides():
    """No other module imports `Batch` and anything of an attack or of its result."""
    for name in FILES:
        if name == "gradaudit.types" or not (mentions(name, "Batch") or mentions(name, "ImageBatch")):
            continue
        both = mentions(name, "Reconstruction") or any(within(m, ("attacks", "leakage")) for m in IMPORTS[name])
        assert not both or name.startswith(MAY_JOIN), name
    assert mentions("gradaudit.client.client", "Batch")
    assert not mentions("gradaudit.client.client", "Reconstruction")
    for kind in ("Batch", "ImageBatch"):
        assert all(not mentions(name, kind) for name in side("attacks", "leakage", "models"))


def types_in(hint: object) -> Iterator[type]:
    if isinstance(hint, type):
        yield hint
    if isinstance(hint, typing.TypeVar):  # the kind of model an observation is of
        yield getattr(gradaudit.models.base, hint.__bound__.__forward_arg__)
    for part in typing.get_args(hint):
        yield from types_in(part)


def field_types(cls: type, seen: frozenset[type] = frozenset()) -> set[type]:
    """Return every type a dataclass can hold, through the dataclasses in it."""
    known = vars(gradaudit.models.base) | vars(gradaudit.models.views)  # where type checkers look as well
    hints = typing.get_type_hints(cls, localns=known)
    found = {t for f in fields(cls) for t in types_in(hints[f.name])}
    for inner in found - seen:
        if is_dataclass(inner):
            found |= field_types(inner, seen | found | {cls})
    return found


@pytest.mark.parametrize("cls", [Observation, Knowledge, Reconstruction])
def test_no_field_could_hold_a_batch(cls):
    reached = field_types(cls)
    assert not {Batch, ImageBatch} & reached
    assert Client not in reached
    if cls is Observation:
        assert {Knowledge, LocalTraining, Model, PublicImages} <= reached, "the walk goes through the fields"


@pytest.mark.parametrize("name", sorted(known("attack")))
def test_an_attack_is_called_with_what_was_seen_and_chance_alone(name):
    cls = known("attack")[name]
    assert list(inspect.signature(cls.run).parameters) == ["self", "seen", "rng"]
    assert cls.__call__ is Attack.__call__, "the checks around run cannot be replaced"


def everything_from(start: object) -> dict[int, object]:
    """Return every object that can be reached from one, code and classes left out."""
    code = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType)
    found, todo = {id(start): start}, [start]
    while todo:
        for item in gc.get_referents(todo.pop()):
            if id(item) not in found and not isinstance(item, code):
                found[id(item)] = item
                todo.append(item)
    return found


@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining("sgd", 0.1, 2)], ids=["gradient", "delta"])
@pytest.mark.parametrize(("family", "task"), SETTINGS)
def test_no_chain_of_references_leads_back_to_the_batch(load, family, task, training):
    model = load(family, task)
    secret = sentences((4, 6), 1)
    batch = batch_of(model, secret)
    seen = seen_of(Client(model, training, dropout=True), batch, given=Given(lengths=True))
    reached = everything_from(seen)
    private = [batch.ids, batch.mask, batch.texts, *secret, *([batch.labels] if batch.labels is not None else [])]
    assert id(batch) not in reached
    assert not [item for item in private if id(item) in reached]
    storages = {item.untyped_storage().data_ptr() for item in private if isinstance(item, torch.Tensor)}
    for item in reached.values():
        assert not isinstance(item, (Batch, ImageBatch, Client))
        if isinstance(item, torch.Tensor):
            assert item.untyped_storage().data_ptr() not in storages
            assert item.grad_fn is None or not item.requires_grad, "a graph remembers its inputs"
        if isinstance(item, str):
            assert item not in secret
    assert id(model.module) in reached, "the walk goes through the model"
    assert any(t is seen.tensors[next(iter(seen.tensors))] for t in reached.values())


def test_no_attack_can_draw_the_clients_noise_again(folders, tmp_path):
    """An attack that knows every seed, place and setting, and regenerates the noise to subtract it, gains nothing."""
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\nriver stone,0\nquiet garden,1\n")
    noise = {"name": "gaussian", "sigma": 1.0}
    told = {"model": f"random:{folders['bert']}", "attack": {"name": "decode"}, "defense": [noise], "seed": 3}
    ready = prepare(parse_case(told | {"data": {"path": str(rows), "label": "label"}}), tmp_path, torch.device("cpu"))
    batch = private_batch(ready, 0)
    _, seen = sent(ready, batch, 0)
    clean = Client(ready.model).update(batch, stream(0, "any")).tensors
    (defense,) = ready.client.defenses

    def left_of(rng: torch.Generator) -> float:
        """Return how far an update is from the clean one once the noise that a stream gives is taken off."""
        added = defense.on_update(
            {n: torch.zeros_like(t) for n, t in clean.items()}, stream(draw_seed(rng), "defense", 0)
        )
        return max(float((seen.tensors[name] - added[name] - clean[name]).abs().max()) for name in clean)

    assert seen.model.spec.seed == 3, "the attack may know how the model was made"
    assert left_of(stream(seen.model.spec.seed, "client", 0)) > 1.0
    assert left_of(chance(ready, ready.rows.batch([1]), 0)) > 1.0, "with another batch at hand"
    assert left_of(chance(ready, batch, 0)) < 1e-4, "the test draws as the client does: only the truth gives its noise"
