"""What attacks on images owe: valid answers, the same for one seed, an untouched model; what they read or cannot."""

from __future__ import annotations

import gc
import json
import types
from dataclasses import dataclass, fields, replace
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import pytest
import torch

from gradaudit.attacks.base import Attack
from gradaudit.audit import run as audit
from gradaudit.audit.prepare import Prepared, prepare
from gradaudit.case import parse_case
from gradaudit.client.client import Client
from gradaudit.client.observation import knowledge_of, observation
from gradaudit.data.images import load_images, public_images
from gradaudit.data.spec import DataSpec
from gradaudit.errors import MissingKnowledgeError
from gradaudit.files import read_lines
from gradaudit.judge.images import ImageJudge
from gradaudit.leakage.images.generator import GeneratorSpec, generator_of
from gradaudit.leakage.images.matching import ImageMatch, match_for, total_variation
from gradaudit.models.base import Model
from gradaudit.models.images import ImageModel, load_image_model
from gradaudit.models.spec import ModelSpec
from gradaudit.record import Record
from gradaudit.registry import build, known
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Given, ImageBatch, LocalTraining, Observation, PublicImages, Reconstruction
from gradaudit.workspace import learned_in

pytest.importorskip("sklearn")
pytest.importorskip("torchmetrics")
pytest.importorskip("PIL")

ATTACKS = sorted(
    name
    for name, cls in known("attack").items()
    if "image-classification" in cls.tasks and name not in ("auto", "lti-images")
)  # the latter is fitted first: tests/test_lti_images.py; what the former tries is here
SHORT = {
    "ig": {"steps": 4, "restarts": 2},
    "gigip": {"latent_steps": 3, "weight_steps": 3, "restarts": 2, "training_steps": 3, "latent": 8},
}
QUICK = {
    "ig": {"steps": 150, "restarts": 2},
    "gigip": {"latent_steps": 60, "weight_steps": 120, "restarts": 2, "training_steps": 300, "latent": 32},
}
CLIENTS: dict[str, dict[str, Any]] = {
    "one gradient": {},
    "local steps": {"training": LocalTraining("sgd", 0.1, 2)},
    "sign": {"defenses": (build("defense", "sign", {}),)},
    "topk": {"defenses": (build("defense", "topk", {"keep": 0.05}),)},
    "frozen": {"freeze": ("head",)},
}


@pytest.fixture(scope="module")
def digits():
    return load_images(DataSpec(source="digits"), Path())


@pytest.fixture(scope="module")
def public(digits) -> PublicImages:
    return public_images(digits, digits, [tuple(range(20))])


@pytest.fixture(scope="module")
def learning(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("learned")


def model_of(name: str = "lenet") -> ImageModel:
    return load_image_model(ModelSpec(name, "image-classification", 10, 0, image=(1, 8, 8)))


def seen_of(
    client: Client, batch: ImageBatch, public: PublicImages | None, given: Given | None = None, selection: str = "all"
) -> Observation[Model]:
    update = client.update(batch, stream(0, "client"))
    known_facts = knowledge_of(batch, update, given or Given())
    return observation(client.model, update, Selection(selection), known_facts, public)


def state_of(model: ImageModel) -> list[Any]:
    return [
        {n: p.detach().clone() for n, p in model.module.state_dict().items()},
        [(n, p.requires_grad, p.grad is None) for n, p in model.module.named_parameters()],
        [(n, m.training, len(m._forward_hooks)) for n, m in model.module.named_modules()],
    ]


def same(one: list[Any], other: list[Any]) -> bool:
    return one[1:] == other[1:] and all(torch.equal(v, other[0][n]) for n, v in one[0].items())


def assert_valid(found: Reconstruction, model: ImageModel, size: int) -> None:
    assert found.images is not None
    assert found.images.shape == (size, *model.shape)
    assert not found.images.requires_grad
    assert bool(found.images.isfinite().all())
    assert 0 <= float(found.images.min()) <= float(found.images.max()) <= 1
    assert found.labels is None or len(found.labels) == size
    assert found.labels is None or all(0 <= y < 10 for y in found.labels)
    assert found.sequences == ()
    json.dumps(dict(found.details))


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("made", CLIENTS)
@pytest.mark.parametrize("architecture", ["lenet", "resnet"])
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_answers_validly_the_same_for_one_seed(name, architecture, made, size, digits, public, learning):
    model = model_of(architecture)
    seen = seen_of(Client(model, **CLIENTS[made]), digits.batch(range(size)), public)
    before, tensors = state_of(model), {n: t.clone() for n, t in seen.tensors.items()}
    answers = []
    for elsewhere in (0, 1):
        torch.manual_seed(elsewhere)
        with learned_in(learning):
            answers.append(build("attack", name, SHORT.get(name, {}))(seen, stream(0, "attack")))
    assert_valid(answers[0], model, size)
    assert torch.equal(answers[0].images, answers[1].images)
    assert answers[0].labels == answers[1].labels
    assert same(state_of(model), before)
    assert all(torch.equal(t, tensors[n]) for n, t in seen.tensors.items())


@pytest.mark.parametrize("name", ATTACKS)
def test_missing_knowledge_is_named(name, digits, public):
    client = Client(model_of())
    for need in known("attack")[name].needs:
        given = Given() if need == "public" else replace(Given(), **{need: False})
        seen = seen_of(client, digits.batch([0]), None if need == "public" else public, given)
        with pytest.raises(MissingKnowledgeError, match=f"attack '{name}' must be given {need}"):
            build("attack", name, SHORT.get(name, {}))(seen, stream(0, "attack"))
    least = Given(**{f.name: f.name in known("attack")[name].needs for f in fields(Given)})
    seen = seen_of(client, digits.batch([0]), public if "public" in known("attack")[name].needs else None, least)
    assert_valid(build("attack", name, SHORT.get(name, {}))(seen, stream(0, "attack")), model_of(), 1)


@dataclass(frozen=True)
class Rogue(Attack[ImageModel]):
    """An attack of the tests that changes the model, and may then break down."""

    name: ClassVar[str] = "rogue"
    source: ClassVar[str] = "tests"
    tasks: ClassVar[tuple[str, ...]] = ("image-classification",)
    deed: str = ""
    fails: bool = False

    def run(self, seen: Observation[ImageModel], rng: torch.Generator) -> Reconstruction:
        parameter = next(iter(seen.model.parameters().values()))
        if self.deed == "writes":
            parameter.data.add_(1)
        if self.deed == "trains":
            seen.model.module.train()
        if self.fails:
            raise ZeroDivisionError
        return Reconstruction()


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("deed", ["writes", "trains"])
def test_an_attack_that_changes_the_model_is_caught(deed, fails, digits):
    seen = seen_of(Client(model_of()), digits.batch([0]), None)
    assert Rogue()(seen, stream(0, "attack")) == Reconstruction()
    with pytest.raises(RuntimeError, match="attack 'rogue' changed the model"):
        Rogue(deed, fails)(seen, stream(0, "attack"))


# the wall


def everything_from(start: object) -> dict[int, object]:
    code = (types.ModuleType, type, types.FunctionType, types.BuiltinFunctionType, types.CodeType, types.FrameType)
    found, todo = {id(start): start}, [start]
    while todo:
        for item in gc.get_referents(todo.pop()):
            if id(item) not in found and not isinstance(item, code):
                found[id(item)] = item
                todo.append(item)
    return found


@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining("sgd", 0.1, 2)], ids=["gradient", "delta"])
def test_no_chain_of_references_leads_back_to_the_batch(training, digits, public):
    batch = digits.batch([0, 1])
    seen = seen_of(Client(model_of(), training), batch, public)
    reached = everything_from(seen)
    storages = {t.untyped_storage().data_ptr() for t in (batch.images, batch.labels, digits.pixels)}
    assert not {id(batch), id(digits), id(batch.images), id(batch.labels)} & reached.keys()
    for item in reached.values():
        assert not isinstance(item, (ImageBatch, Client))
        if isinstance(item, torch.Tensor):
            assert item.untyped_storage().data_ptr() not in storages
            assert item.grad_fn is None
    assert id(public.images) in reached, "the walk goes through what the attacker has"


def test_a_case_gives_the_attacker_no_audited_image(tmp_path: Path):
    data = {"batches": 4, "batch_size": 3, "shuffle_seed": 5}
    case = {"task": "image-classification", "model": "lenet", "data": data, "attack": {"name": "blind"}}
    ready = prepare(parse_case(case), tmp_path, torch.device("cpu"))
    assert isinstance(ready, Prepared)
    assert ready.public is not None
    hidden = torch.cat([ready.rows.batch(numbers).images for numbers in ready.batches])
    apart = (ready.public.images[:, None] - hidden[None]).abs().flatten(2).amax(2)
    assert float(apart.min()) > 0
    assert len(ready.public.images) <= 1797 - 12


# what is read, and what cannot be


def error_of(batch: ImageBatch, found: Reconstruction) -> float:
    value = ImageJudge().judge(batch, found).scores["mse"]
    assert value is not None
    return value


@pytest.mark.parametrize("name", sorted(QUICK))
def test_swap_control(name, digits, public, learning):
    """A's update gives A's digit, far below the blind guess's error, and nothing of B's that the guess lacks."""
    client, own, swapped, blind = Client(model_of()), [], [], []
    attack = build("attack", name, QUICK[name])
    for n in range(3):
        mine, other = digits.batch([n]), digits.batch([n + 4])
        assert int(mine.labels[0]) != int(other.labels[0])
        seen = seen_of(client, mine, public)
        seen_of(client, other, public)
        with learned_in(learning):
            found = attack(seen, stream(n, "attack"))
        assert found.labels == (int(mine.labels[0]),), "read off the output layer"
        own.append(error_of(mine, found))
        swapped.append(error_of(other, found))
        blind.append(error_of(other, build("attack", "blind", {})(seen, stream(n, "blind"))))
    assert mean(own) < 0.01
    assert mean(swapped) > mean(blind)


@pytest.mark.parametrize("what", ["zero", "noise"])
@pytest.mark.parametrize("name", sorted(QUICK))
def test_nothing_and_noise_tell_nothing(name, what, digits, public, learning):
    client, scores, blind = Client(model_of()), [], []
    for n in range(3):
        batch = digits.batch([n])
        seen = seen_of(client, batch, public)
        rng = torch.Generator().manual_seed(n)
        noise = {k: torch.randn(t.shape, generator=rng) for k, t in seen.tensors.items()}
        made = {k: torch.zeros_like(t) if what == "zero" else noise[k] for k, t in seen.tensors.items()}
        with learned_in(learning):
            found = build("attack", name, SHORT[name])(replace(seen, tensors=made), stream(n, "attack"))
        scores.append(error_of(batch, found))
        blind.append(error_of(batch, build("attack", "blind", {})(seen, stream(n, "blind"))))
    assert mean(scores) > 0.8 * mean(blind)


@pytest.mark.parametrize(
    ("name", "defense", "fields"), [("ig", "sign", {}), ("ig", "topk", {"keep": 0.02}), ("gigip", "sign", {})]
)
def test_knowing_the_defense_helps(name, defense, fields, digits, public, learning):
    """The same update, told of the defense and not: the adapted distance reads more, over three digits."""
    client = Client(model_of(), defenses=(build("defense", defense, fields),))
    told, untold = [], []
    for n in range(3):
        batch = digits.batch([n])
        for scores, given in ((told, Given(labels=True)), (untold, Given(labels=True, defenses=False))):
            with learned_in(learning):
                found = build("attack", name, QUICK[name])(seen_of(client, batch, public, given), stream(n, "attack"))
            scores.append(error_of(batch, found))
    assert mean(told) < mean(untold)


# distances


def test_distances_are_zero_at_the_truth_and_do_not_see_its_size():
    rng = torch.Generator().manual_seed(0)
    observed = {"a": torch.randn(3, 4, generator=rng), "b": torch.randn(5, generator=rng)}
    shown = {n: t[None].repeat(2, *[1] * t.dim()) * torch.tensor([1.0, 3.0]).view(2, *[1] * t.dim())
             for n, t in observed.items()}  # fmt: skip
    signs = {n: t.sign() for n, t in observed.items()}
    pruned = {n: t * (t.abs() > 0.5) for n, t in observed.items()}
    for match, target in (
        (ImageMatch(), observed),
        (ImageMatch("sign", power=2), signs),
        (ImageMatch("sign", power=1), signs),
        (ImageMatch(support=True), pruned),
    ):
        torch.testing.assert_close(match(shown, target), torch.zeros(2), atol=1e-6, rtol=0)
        assert float(match({n: -t for n, t in shown.items()}, target).min()) > 0.9
    assert float(ImageMatch()(shown, pruned)[0]) > 1e-3, "what was pruned is not known to plain cosine"


def test_the_hinge_by_hand():
    predicted = {"a": torch.tensor([[3.0, -1.0, 2.0, 5.0]])}
    observed = {"a": torch.tensor([1.0, 1.0, -1.0, 0.0])}
    assert float(ImageMatch("sign", power=2)(predicted, observed)) == pytest.approx((1 + 4) / (9 + 1 + 4))
    assert float(ImageMatch("sign", power=1)(predicted, observed)) == pytest.approx((1 + 2) / (3 + 1 + 2))
    plain = ImageMatch("sign", power=2, relative=False)
    assert float(plain(predicted, observed)) == pytest.approx(1 + 4)
    assert float(plain({"a": predicted["a"] / 1e4}, observed)) < 1e-7, "what vanishes fits any signs"


def test_the_distance_follows_what_was_told(digits):
    def chosen(given: Given, *names: str) -> ImageMatch:
        client = Client(model_of(), defenses=tuple(build("defense", n, {}) for n in names))
        return match_for(seen_of(client, digits.batch([0]), None, given), 2, True)  # type: ignore[arg-type]

    assert chosen(Given()) == ImageMatch("cosine", False, 2)
    assert chosen(Given(), "gaussian") == ImageMatch("cosine", False, 2)
    assert chosen(Given(), "topk") == chosen(Given(), "random-pruning") == ImageMatch("cosine", True, 2)
    assert chosen(Given(), "topk", "sign") == ImageMatch("sign", True, 2)
    assert chosen(Given(defenses=False), "sign") == ImageMatch("cosine", False, 2)


def test_total_variation_by_hand():
    image = torch.tensor([[0.0, 1.0, 1.0], [0.5, 0.5, 0.5]]).view(1, 1, 1, 2, 3)
    assert float(total_variation(image)) == pytest.approx((2 * 1.5 / 3 + 3 * 1 / 4) / 32)


# the generator


def test_a_generator_is_learned_once_and_draws_digits(public, tmp_path: Path):
    spec = GeneratorSpec(latent=16, steps=200)
    with learned_in(tmp_path):
        one = generator_of(public, spec, torch.device("cpu"))
        kept = list(tmp_path.iterdir())
        assert len(kept) == 1
        made = kept[0].stat().st_mtime_ns
        with learned_in(tmp_path / "inner"):  # the outermost folder is taken
            again = generator_of(public, spec, torch.device("cpu"))
        assert kept[0].stat().st_mtime_ns == made
        assert list(tmp_path.iterdir()) == kept
        kept[0].write_bytes(b"damaged")
        anew = generator_of(public, spec, torch.device("cpu"))
    assert all(torch.equal(w, again.weights[n]) and torch.equal(w, anew.weights[n]) for n, w in one.weights.items())
    drawn = one(torch.randn(200, 16, generator=torch.Generator().manual_seed(0)))
    mean_image = public.images.mean(0)
    to_digits = (drawn[:, None] - public.images[None, :500]).square().flatten(2).mean(2).min(1).values.mean()
    noise = torch.rand(drawn.shape, generator=torch.Generator().manual_seed(1))
    of_noise = (noise[:, None] - public.images[None, :500]).square().flatten(2).mean(2).min(1).values.mean()
    assert float(to_digits) < 0.4 * float(of_noise)
    assert float((drawn - mean_image).square().mean()) > 0.01, "not the mean image alone"


# end to end


def test_a_run_keeps_pixels_apart_and_its_generator(tmp_path: Path):
    case = {
        "task": "image-classification",
        "model": "lenet",
        "data": {"batches": 2, "batch_size": 2},
        "attack": {"name": "gigip", **SHORT["gigip"]},
    }
    ready = prepare(parse_case(case), tmp_path, torch.device("cpu"))
    records = list(audit.run(ready, tmp_path / "out"))
    assert [r.error for r in records] == [None, None]
    assert list(read_lines(tmp_path / "out" / "records.jsonl", Record)) == records
    assert (tmp_path / "out" / "images.jsonl").stat().st_mode & 0o777 == 0o600
    assert len(list((tmp_path / "out" / "learned").iterdir())) == 1
    assert "iVBOR" not in (tmp_path / "out" / "records.jsonl").read_text()
    for record in records:
        assert record.knowledge["public"].startswith("the digits of scikit-learn")
        assert set(record.scores) == {"mse", "psnr", "ssim", "lpips"}
        assert record.scores["lpips"] is None
        assert len(record.images) == len(record.images_baseline) == 2
        assert record.scores["mse"] == pytest.approx(mean(m.mse for m in record.images))
    again = list(audit.run(ready, tmp_path / "out"))
    assert again == records, "what is finished is not run again"


@pytest.mark.parametrize("more", [0, 3])
def test_the_best_of_many_images_is_flagged_and_what_was_matched_is_diagnosed(more, tmp_path: Path, monkeypatch):
    table = {"task": "image-classification", "model": "lenet", "data": {"batches": 1, "batch_size": 2},
             "attack": {"name": "ig"}, "knowledge": {"batch_size": False}}  # fmt: skip
    monkeypatch.setattr(known("attack")["ig"], "needs", ())  # told the size, it returns no more
    ready = prepare(parse_case(table), tmp_path, torch.device("cpu"))
    batch = ready.rows.batch(ready.batches[0])
    other = torch.full((more, *batch.images.shape[1:]), torch.nan)
    other[1:] = 0.5
    many = Reconstruction(images=torch.cat([other, batch.images]), labels=(*[0] * more, *batch.labels.tolist()))
    monkeypatch.setattr(type(ready.attack), "run", lambda self, seen, rng: many)
    [record] = audit.run(ready, tmp_path / "out")
    assert ("surplus-guesses" in record.flags) == (more > 0)
    assert record.scores["mse"] == 0
    assert record.diagnosis.verdict == "solved"
    assert record.diagnosis.guess == pytest.approx(0, abs=1e-6)
    blank = Reconstruction(images=torch.full((3, *batch.images.shape[1:]), torch.nan))
    monkeypatch.setattr(type(ready.attack), "run", lambda self, seen, rng: blank)
    [record] = audit.run(ready, tmp_path / "blank")
    assert record.diagnosis.verdict == "no guess"
