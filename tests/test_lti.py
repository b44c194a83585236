"""LTI from end to end: it learns a tiny target on public text, reads it, and nothing of what it was not made for."""

from __future__ import annotations

import copy
import dataclasses
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from gradaudit.audit.fitted_rows import ROWS
from gradaudit.audit.fitting import fit, target_of
from gradaudit.client.client import Client
from gradaudit.data.text import make_batch
from gradaudit.errors import AuditError, BadInputError, NotSupportedError
from gradaudit.learned import manifest as disk
from gradaudit.learned.manifest import refuse_misfit
from gradaudit.learned.public import Public
from gradaudit.learned.text.inverter import load_inverter, save_inverter
from gradaudit.learned.text.network import Network, NetworkShape, hits, loss_of
from gradaudit.learned.training import Recipe, train
from gradaudit.registry import build
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Given, LocalTraining, Observation
from tiny_models import batch_of, sentences

LENGTH, TEXTS, WORDS = 4, 900, 12
SEEN = "0-1:q,f"
QUICK = {"share": 0.2, "bottleneck": 96, "width": 32, "epochs": 16, "learning_rate": 5e-3, "own_words": True}


def texts(model, count: int, seed: int) -> Public:
    """Windows of four of a dozen words, drawn at random: what a window holds, no other window tells."""
    rng = stream(seed, "texts")
    words = torch.tensor([i for i in range(model.vocabulary_size) if i not in model.special.ids and i != model.unknown])
    ids = words[torch.randint(WORDS, (count, LENGTH), generator=rng)]
    return Public(ids, torch.ones_like(ids, dtype=torch.bool), None, "made up")


def client_of(model, *defenses) -> Client:
    return Client(model, freeze=("word",), defenses=tuple(build("defense", *d) for d in defenses))


def fitted(client: Client, folder: Path, size: int = 1, count: int = TEXTS, **fields):
    attack = build("attack", "lti", QUICK | fields)
    return fit(attack, client, Selection(SEEN), texts(client.model, count, 1), size, 0, folder)


def seen_of(client: Client, rows: torch.Tensor, seed: int = 0, selection: str = SEEN) -> Observation:
    ids = rows.view(-1, rows.shape[-1]).tolist()
    batch = make_batch(client.model, ["made up"] * len(ids), None, ids)
    return tiny_models.seen_of(client, batch, selection, Given(), seed)


def right(guesses, rows: torch.Tensor) -> float:
    """Share of positions with the right token."""
    pairs = [(a, b) for g, r in zip(guesses, rows, strict=True) for a, b in zip(g, r.tolist(), strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


@pytest.fixture(scope="module")
def made(load, tmp_path_factory):
    client = client_of(load("gpt2", "causal-lm"))
    folder = tmp_path_factory.mktemp("inverter")
    return client, fitted(client, folder), folder


@pytest.mark.parametrize(
    ("defense", "pseudo"),
    [(None, False), (None, True), (("sign", {}), False), (("topk", {"keep": 0.1}), True),
     (("gaussian", {"sigma": 0.003}), False), (("random-pruning", {"rate": 0.5}), False)],
    ids=lambda d: str(d[0] if isinstance(d, tuple) else d),
)  # fmt: skip
def test_it_reads_what_it_never_saw_through_the_defense(load, made, tmp_path, defense, pseudo):
    client, attack, _ = made
    if defense is not None or pseudo:
        client = client_of(load("gpt2", "causal-lm"), *([defense] if defense else []))
        anew = pseudo or defense == ("random-pruning", {"rate": 0.5})  # simulated at every step: slower
        attack = fitted(client, tmp_path, pseudo=pseudo, epochs=8 if anew else QUICK["epochs"])
    rows = texts(client.model, 40, 2).ids
    found = [attack(seen_of(client, row, n), stream(0, "attack")) for n, row in enumerate(rows)]
    guesses = [f.sequences[0] for f in found]
    assert right(guesses, rows) > 0.3, "chance is one in twelve"
    assert f"{TEXTS} public texts (made up)" in found[0].notes[0], "what the attacker had is said"
    likely = max(float((rows == word).float().mean()) for word in rows.unique())
    swapped = right(guesses, rows.roll(1, 0))
    assert swapped < likely + 4 * (likely / rows.numel()) ** 0.5, "another window's update tells nothing of this one"


def test_several_sentences_come_in_any_order(load, tmp_path):
    client = client_of(load("gpt2", "causal-lm"))
    attack = fitted(client, tmp_path, size=2, count=2 * TEXTS)
    rows = texts(client.model, 30, 2).ids.view(15, 2, LENGTH)
    total = 0.0
    for pair in rows:
        found = attack(seen_of(client, pair), stream(0, "attack")).sequences
        total += max(right(order, pair) for order in (found, found[::-1]))
    assert total / 15 > 0.3


def test_the_loss_takes_the_best_order_and_both_kinds():
    rng = stream(0, "logits")
    logits, targets = torch.randn(3, 3, 4, 7, generator=rng), torch.randint(7, (3, 3, 4), generator=rng)
    orders = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]
    each = torch.stack([
        torch.nn.functional.cross_entropy(logits.flatten(0, 2), targets[:, o].flatten(), reduction="none").view(3, -1)
        for o in orders
    ])  # fmt: skip
    assert torch.allclose(loss_of(logits, targets), each.mean(-1).min(0).values.mean())
    one, hot = targets[:, :1], torch.nn.functional.one_hot(targets[:, :1], 7)
    squared = (logits[:, :1] - hot).square().sum(-1).mean()
    assert torch.allclose(loss_of(logits[:, :1], one, squared=True), squared)
    certain = 9.0 * torch.nn.functional.one_hot(targets[:, [2, 0, 1]], 7)
    assert hits(certain, targets) == 100.0


def test_a_fitted_inverter_is_read_again_as_it_was(made):
    client, attack, folder = made
    assert {p.name for p in folder.iterdir()} - {".lock"} == {disk.MANIFEST, disk.WEIGHTS, ROWS}
    one, other = load_inverter(folder), load_inverter(folder)
    seen = seen_of(client, texts(client.model, 1, 3).ids[0])
    assert one.sentences(seen) == other.sentences(seen) == attack(seen, stream(0, "attack")).sequences
    about = one.manifest
    assert about.accuracy > 30
    assert about.attack["epochs"] == QUICK["epochs"]
    assert about.target.fingerprint == client.model.fingerprint()
    save_inverter(folder, one)
    assert load_inverter(folder).sentences(seen) == one.sentences(seen)


def test_an_update_of_anything_else_is_refused_in_a_sentence(load, made):
    client, attack, _ = made
    model = client.model
    row = texts(model, 1, 3).ids[0]
    other = load("gpt2", "causal-lm", seed=1)
    cases: list[tuple[Observation, str]] = [
        (seen_of(client_of(other), row), "other weights"),
        (seen_of(client, row, selection="0:q,f"), "another selection"),
        (seen_of(client_of(model, ("sign", {})), row), "defenses none, not sign"),
        (seen_of(client, torch.stack([row, row])), "batch size 1, not 2"),
        (seen_of(replace(client, training=LocalTraining("sgd", 0.1)), row), "for a gradient, not for a delta"),
        (seen_of(replace(client, dropout=True), row), "dropout 0.0, not 0.1"),
    ]
    seen = seen_of(client, row)
    name = next(iter(seen.tensors))
    cut = replace(seen, tensors={**seen.tensors, name: seen.tensors[name][:2]})
    for wrong, said in [*cases, (cut, "of shape")]:
        with pytest.raises(NotSupportedError, match=said) as refusal:
            attack(wrong, stream(0, "attack"))
        assert "\n" not in str(refusal.value)
    untold = replace(seen, knowledge=replace(seen.knowledge, defenses=None, training=None, dropout=None))
    assert attack(untold, stream(0, "attack")).sequences, "what it was not told is taken to be so"
    with pytest.raises(NotSupportedError, match="has no inverter"):
        build("attack", "lti", {})(seen, stream(0, "attack"))


def test_an_inverter_that_would_take_far_more_memory_than_its_file_is_not_run(made):
    client, _, folder = made
    inverter = load_inverter(folder)
    seen = seen_of(client, texts(client.model, 1, 3).ids[0])
    for change, said in (
        ({"length": 60_000}, "more than the model takes"),
        ({"target": inverter.manifest.target.model_copy(update={"batch_size": 1 << 30})}, "fits into memory"),
        ({"target": inverter.manifest.target.model_copy(update={"loss": "squared"})}, "made for the loss squared"),
        ({"vocabulary": 3}, "knows 3 words"),
    ):
        known = seen
        if "target" in change:
            known = replace(seen, knowledge=replace(seen.knowledge, batch_size=None))
        with pytest.raises(NotSupportedError, match=said):
            replace(inverter, manifest=inverter.manifest.model_copy(update=change)).sentences(known)


def test_everything_that_decides_what_is_simulated_is_in_the_target(load):
    model = load("gpt2", "causal-lm")
    clients = [
        Client(model),
        Client(model, clients=2),
        Client(model, padding="left"),
        Client(model, dropout=True),
        Client(model, dropout=True, dropout_rate=0.1),
        Client(model, freeze=("word",)),
        Client(model, LocalTraining("sgd", 0.1)),
    ]
    made = [target_of(client, Selection("0:q"), 2).model_dump_json() for client in clients]
    other = copy.copy(model)
    other.spec = replace(model.spec, loss="squared")
    made.append(target_of(Client(other), Selection("0:q"), 2).model_dump_json())
    assert len(set(made)) == len(clients) + 1


def test_it_is_made_for_the_training_that_the_attacker_is_told_of(load):
    client = Client(load("gpt2", "causal-lm"), LocalTraining("sgd", 0.1, 1, 1), clients=2)
    batch = batch_of(client.model, sentences((4, 4, 4, 4), 1))
    seen = tiny_models.seen_of(client, batch, "all", Given(), 0)
    refuse_misfit(target_of(client, Selection("all"), 4), seen)


def damaged(folder: Path, into: Path, change) -> Path:
    into.mkdir()
    tensors, manifest = load_file(folder / disk.WEIGHTS), json.loads((folder / disk.MANIFEST).read_text())
    change(tensors, manifest)
    save_file(tensors, into / disk.WEIGHTS)
    (into / disk.MANIFEST).write_text(json.dumps(manifest))
    return into


@pytest.mark.parametrize(
    "change",
    [
        lambda t, m: m.update(bins=m["bins"] * 10**6),
        lambda t, m: m.update(classes=10**7),
        lambda t, m: m.update(format=2),
        lambda t, m: m.update(more=1),
        lambda t, m: m["target"].update(batch_size=4000),
        lambda t, m: t.pop("mean"),
        lambda t, m: t.update({"first.weight": t["first.weight"][:, :-1].contiguous()}),
        lambda t, m: t.update({"first.weight": t["first.weight"].half()}),
        lambda t, m: t["shared.weight"].fill_(float("nan")),
    ],
)
def test_a_damaged_inverter_is_refused_before_it_takes_memory(made, tmp_path, change):
    with pytest.raises(BadInputError) as refusal:
        load_inverter(damaged(made[2], tmp_path / "damaged", change))
    assert "\n" not in str(refusal.value)


def test_files_that_are_no_inverter_are_refused(made, tmp_path):
    with pytest.raises(BadInputError, match="no manifest"):
        load_inverter(tmp_path)
    folder = damaged(made[2], tmp_path / "cut", lambda t, m: None)
    (folder / disk.WEIGHTS).write_bytes((folder / disk.WEIGHTS).read_bytes()[:-100])
    with pytest.raises(BadInputError, match="truncated"):
        load_inverter(folder)


def test_a_training_that_was_stopped_ends_as_it_would_have(tmp_path, monkeypatch):
    monkeypatch.setattr("gradaudit.learned.training._SECONDS", 0.0)
    shape = NetworkShape(20, 8, 6, 1, 3, 5)
    rng = stream(0, "data")
    values, targets = torch.randn(40, 20, generator=rng), torch.randint(5, (40, 1, 3), generator=rng)
    recipe = Recipe(steps=30, learning_rate=0.01, decay=True, every=5, patience=0)

    def batch(step: int, stop: int = 99) -> tuple[torch.Tensor, torch.Tensor]:
        if step == stop:
            raise KeyboardInterrupt
        rows = torch.randint(40, (8,), generator=stream(0, "rows", step))
        return values[rows], targets[rows]

    def validate(network: Network) -> float:
        return hits(network(values), targets)

    whole, stopped = Network(shape, stream(0, "weights")), Network(shape, stream(0, "weights"))
    expected = train(whole, batch, validate, recipe, None, "", loss_of)
    place = tmp_path / "checkpoint.safetensors"
    with pytest.raises(KeyboardInterrupt):
        train(stopped, lambda step: batch(step, 17), validate, recipe, place, "", loss_of)
    fresh = Network(shape, stream(9, "other weights"))
    steps: list[int] = []

    def counted(step: int) -> tuple[torch.Tensor, torch.Tensor]:
        steps.append(step)
        return batch(step)

    assert train(fresh, counted, validate, recipe, place, "", loss_of) == expected
    assert steps[0] == 17
    assert all(torch.equal(p, dict(whole.named_parameters())[n]) for n, p in fresh.named_parameters())
    place.write_bytes(b"no checkpoint")
    assert train(Network(shape, stream(0, "weights")), batch, validate, recipe, place, "", loss_of) == expected
    whole_file = load_file(place)
    numbers = {"step": 17, "waited": 0, "best": 10, "score": 1.0}
    one = next(iter(dict(whole.named_parameters())))
    lacking = {n: t for n, t in whole_file.items() if n != f"exp_avg_sq.{one}"}
    for tensors, told in (
        (whole_file, "[" * 3000),
        (whole_file, json.dumps(numbers | {"step": None})),
        (lacking, json.dumps(numbers)),
        (whole_file | {f"best.{one}": torch.zeros(2)}, json.dumps(numbers)),
    ):
        save_file(tensors, place, {"state": told})
        begun = train(Network(shape, stream(0, "weights")), batch, validate, recipe, place, "", loss_of)
        assert begun == expected, "a damaged checkpoint is passed over"


def test_settings_that_make_no_sense_are_refused():
    wrong = ("share", 0.0), ("share", 1.5), ("validation", 1.0), ("epochs", 0), ("learning_rate", -1.0), ("piece", 0.5)
    for fields in (dict([one]) for one in wrong):
        with pytest.raises(BadInputError, match="attack 'lti'"):
            build("attack", "lti", fields)
    with pytest.raises(AuditError, match="learns nothing"):
        build("attack", "tag", {}).fitted_in(Path())
    assert {f.name for f in dataclasses.fields(build("attack", "lti", {}))} >= {"inverter", "pseudo", "share"}
