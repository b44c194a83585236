"""Attacks of other packages run in a program of their own: what they get, and what they cannot reach."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from gradaudit import registry
from gradaudit.attacks.base import ModelChangedError
from gradaudit.audit import apart
from gradaudit.audit.batch import sent
from gradaudit.audit.prepare import prepare, private_batch
from gradaudit.audit.run_attack import attempt
from gradaudit.case import parse_case
from gradaudit.client.client import Client
from gradaudit.registry import build, from_plugin, known
from gradaudit.streams import stream
from gradaudit.types import Given
from tiny_models import batch_of, seen_of, sentences

PLUGIN = '''
import gc, os, sys
from dataclasses import dataclass
import torch
from gradaudit.attacks.base import Attack
from gradaudit.attacks.decode import Decode
from gradaudit.errors import NotSupportedError
from gradaudit.registry import register
from gradaudit.types import Batch, NamedWord, Reconstruction

@register
@dataclass(frozen=True)
class Twin(Decode):
    name = "twin"

@register
@dataclass(frozen=True)
class Thief(Attack):
    """Returns every batch that it can lay hands on."""
    name = "thief"
    source = "gc, frames"
    textless = True
    def run(self, seen, rng):
        held = [one for one in gc.get_objects() if isinstance(one, Batch)]
        frame = sys._getframe()
        while frame:
            held += [one for one in frame.f_locals.values() if isinstance(one, Batch)]
            frame = frame.f_back
        return Reconstruction(tuple(tuple(row) for batch in held for row in batch.sequences()))

@register
@dataclass(frozen=True)
class Shows(Attack):
    """Returns the images that it has from elsewhere."""
    name = "shows"
    source = "none"
    tasks = ("image-classification",)
    textless = True
    def run(self, seen, rng):
        norms = {name: float(tensor.norm()) for name, tensor in seen.tensors.items()}
        return Reconstruction(images=seen.public.images[:2], details=norms)

@register
@dataclass(frozen=True)
class Acts(Attack):
    """Does as it is told."""
    name = "acts"
    source = "none"
    textless = True
    how: str = ""
    def run(self, seen, rng):
        if self.how == "end":
            os._exit(7)
        if self.how == "raise":
            raise ZeroDivisionError("told")
        if self.how == "refuse":
            raise NotSupportedError("told so")
        if self.how == "write":
            next(iter(seen.model.parameters().values())).data.zero_()
        print("a line")
        os.write(1, b"another line")
        words = (NamedWord(7, (0, 2), True), NamedWord(8))
        numbers = {"drawn": float(torch.rand(1, generator=rng)), "pid": os.getpid(), "lengths": seen.knowledge.lengths}
        return Reconstruction(((1, 2, 3),), (1,), ("guess",), ("a note",), numbers, words=words)
'''


@pytest.fixture(scope="module")
def plugin(tmp_path_factory):
    """Put a package with an entry point on the path, as an installed one is."""
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "elsewhere.py").write_text(PLUGIN)
    about = folder / "elsewhere-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: elsewhere\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[gradaudit.plugins]\nelsewhere = elsewhere\n")
    attacks = dict(registry._entries["attack"])
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()
    registry._loaded.clear()
    assert "thief" in known("attack")
    yield
    if apart._program.cache_info().currsize:
        apart._program().process.kill()
        apart._program.cache_clear()
    sys.path.remove(str(folder))
    sys.modules.pop("elsewhere")
    registry._entries["attack"] = attacks


@pytest.fixture
def seen(load):
    model = load("bert", "classification")
    batch = batch_of(model, sentences((4, 6), 1))
    return seen_of(Client(model), batch, given=Given(lengths=True)), batch


def tried(name, seen, **fields):
    return attempt(build("attack", name, fields), seen, stream(3, "attack"), lambda found: found)


def test_the_truth_is_not_in_the_program_of_an_attack_from_elsewhere(plugin, seen):
    observation, batch = seen
    thief = build("attack", "thief", {})
    assert {tuple(s) for s in batch.sequences()} <= set(thief(observation, stream(0, "attack")).sequences), (
        "it can steal"
    )
    found = tried("thief", observation)
    assert found.error is None
    assert found.found.sequences == ()


def test_it_sees_and_answers_what_an_attack_of_ours_does(plugin, seen):
    observation, batch = seen
    mine, theirs = tried("decode", observation).found, tried("twin", observation).found
    assert from_plugin(known("attack")["twin"])
    assert not from_plugin(known("attack")["decode"])
    assert mine.sequences == theirs.sequences
    assert sorted(theirs.sequences) == sorted(tuple(s) for s in batch.sequences())
    assert (mine.certificates, mine.labels, mine.notes) == (theirs.certificates, theirs.labels, theirs.notes)


def test_all_that_it_answers_comes_back_and_its_prints_do_not(plugin, seen, capfd):
    found = tried("acts", seen[0]).found
    here = build("attack", "acts", {})(seen[0], stream(3, "attack"))
    assert found.details["pid"] != here.details["pid"]
    assert found.details["drawn"] == here.details["drawn"], "its random stream is the one it was given"
    assert tuple(found.details["lengths"]) == seen[0].knowledge.lengths
    for name in ("sequences", "labels", "certificates", "notes", "words"):
        assert getattr(found, name) == getattr(here, name)
    assert found.images is None
    capfd.readouterr()
    assert tried("acts", seen[0]).error is None
    assert capfd.readouterr().out == ""


def test_its_errors_are_those_of_an_attack_of_ours(plugin, seen):
    observation, _ = seen
    assert tried("acts", observation, how="raise").error == "ZeroDivisionError: told"
    refused = tried("acts", observation, how="refuse")
    assert (refused.error, refused.unsupported) == ("told so", True)
    before = {name: weight.clone() for name, weight in observation.model.parameters().items()}
    with pytest.raises(ModelChangedError):
        tried("acts", observation, how="write")
    assert all(torch.equal(before[name], weight) for name, weight in observation.model.parameters().items())
    found = tried("twin", observation).found
    assert set(found.certificates) == {"proven"}, "the other program's model is whole again"


def test_images_cross_too(plugin, tmp_path):
    pytest.importorskip("sklearn")
    case = {"task": "image-classification", "model": "lenet", "attack": {"name": "shows"}}
    case["data"] = {"source": "digits", "batch_size": 2, "batches": 1}
    ready = prepare(parse_case(case), tmp_path, torch.device("cpu"))
    _, observation = sent(ready, private_batch(ready, 0), 0)
    found = tried("shows", observation).found
    assert torch.equal(found.images, observation.public.images[:2])
    assert found.details == {name: float(tensor.norm()) for name, tensor in observation.tensors.items()}


def test_an_attack_that_ends_its_program_is_a_record_and_another_program_is_started(plugin, seen):
    assert tried("acts", seen[0], how="end").error == "attack 'acts' ended the program that ran it (code 7)"
    assert apart._program.cache_info().currsize == 0, "the next batch starts one"
