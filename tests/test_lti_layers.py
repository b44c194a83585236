"""LTI by layers: the linear guess against refits one by one, and the reader from end to end beside its swap control."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import tiny_models
from gradaudit.audit.fitting import fit
from gradaudit.client.client import Client
from gradaudit.data.text import make_batch
from gradaudit.errors import BadInputError
from gradaudit.learned import manifest as disk
from gradaudit.learned.public import Public
from gradaudit.learned.ridge import fit_ridge
from gradaudit.learned.text import features, layered_fit
from gradaudit.learned.text.hashing import Hash
from gradaudit.learned.text.inverter import load_inverter
from gradaudit.learned.text.layers import LayeredNetwork, LayeredShape
from gradaudit.learned.text.words import word_vectors
from gradaudit.registry import build
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Given, Observation

LENGTH, TEXTS, WORDS = 5, 700, 12
QUICK = {"learner": "layers", "share": 0.1, "bottleneck": 64, "width": 32, "epochs": 6, "learning_rate": 5e-3}


def texts(model, count: int, seed: int, shortest: int = LENGTH) -> Public:
    """Windows of a dozen words, drawn at random: what a window holds, no other window tells."""
    rng = stream(seed, "texts")
    words = torch.tensor([i for i in range(model.vocabulary_size) if i not in model.special.ids and i != model.unknown])
    ids = words[torch.randint(WORDS, (count, LENGTH), generator=rng)]
    lengths = torch.randint(shortest, LENGTH + 1, (count, 1), generator=rng)
    return Public(ids, torch.arange(LENGTH) < lengths, None, "made up")


def client_of(model, *defenses) -> Client:
    return Client(model, freeze=("word",), defenses=tuple(build("defense", *d) for d in defenses))


def fitted(client: Client, folder: Path, public: Public, selection: str = "all", size: int = 1, **fields):
    return fit(build("attack", "lti", QUICK | fields), client, Selection(selection), public, size, 0, folder)


def seen_of(client: Client, row: list[int], seed: int, selection: str) -> Observation:
    batch = make_batch(client.model, ["made up"], None, [row])
    return tiny_models.seen_of(client, batch, selection, Given(), seed)


def right(guesses, rows) -> float:
    """Share of positions with the right token; a guess of another length counts where they overlap."""
    hits = sum(a == b for g, r in zip(guesses, rows, strict=True) for a, b in zip(g, r, strict=False))
    return hits / sum(len(r) for r in rows)


@pytest.mark.parametrize("rows", [12, 40], ids=["fewer rows", "more rows"])
def test_what_is_left_out_is_predicted_as_by_a_refit_without_it(rows):
    rng = stream(0, "ridge")
    inputs, wanted = torch.randn(rows, 20, generator=rng), torch.randn(rows, 3, generator=rng)
    inputs -= inputs.mean(0)
    wanted -= wanted.mean(0)  # the mean is kept in all refits
    found = fit_ridge(inputs.clone(), wanted, (0.05,))
    unit = inputs.square().sum(1).mean()
    a, y = inputs.double(), wanted.double()

    def solved(some: torch.Tensor) -> torch.Tensor:
        return torch.linalg.solve(a[some].T @ a[some] + 0.05 * unit * torch.eye(20, dtype=a.dtype), a[some].T @ y[some])

    every = torch.arange(rows)
    torch.testing.assert_close(found.weights.double(), solved(every), rtol=1e-3, atol=1e-4)
    for n in range(rows):
        expected = a[n] @ solved(every[every != n])
        torch.testing.assert_close(found.left_out[n].double(), expected, rtol=1e-3, atol=1e-3)
    own = inputs @ found.weights
    assert float((own - wanted).square().mean()) < float((found.left_out - wanted).square().mean())


def test_the_penalty_that_leaves_out_best_is_taken():
    rng = stream(1, "ridge")
    inputs = torch.randn(60, 40, generator=rng)
    wanted = torch.randn(60, 2, generator=rng)  # nothing to be learned: the largest penalty is right
    assert fit_ridge(inputs.clone(), wanted, (1e-3, 10.0)).penalty == 10.0
    assert fit_ridge(inputs.clone(), inputs @ torch.randn(40, 2, generator=rng), (1e-4, 10.0)).penalty == 1e-4


@pytest.mark.parametrize("signed", [False, True])
def test_entries_apart_have_bins_of_their_own(signed):
    sizes = {"a": 50, "table": 30, "b": 40}
    hash_ = Hash(sizes, 20 + 12, 7, signed, ("table", 6, 12))
    parts = {name: torch.randn(3, size, generator=stream(0, name)) for name, size in sizes.items()}
    out = hash_(parts.items(), 3)
    assert torch.equal(out[:, 20:], parts["table"][:, 6:18])
    without = parts | {"table": parts["table"].clone()}
    without["table"][:, 6:18] = 0
    plain = Hash(sizes, 20, 7, signed)
    torch.testing.assert_close(out[:, :20], plain(without.items(), 3))
    assert float(hash_.counts(sizes)[:, 20:].sum()) == 12


@pytest.mark.parametrize(
    ("defense", "selection", "fields"),
    [(None, "all", {}), (("sign", {}), "all", {}), (("topk", {"keep": 0.05}), "all", {}),
     (("gaussian", {"sigma": 0.003}), "all", {"pseudo": True}), (None, "0-1:q,f", {"share": 0.2})],
    ids=["none", "sign", "topk", "noise, drawn", "no position table"],
)  # fmt: skip
def test_it_reads_what_it_never_saw(load, tmp_path, defense, selection, fields):
    client = client_of(load("gpt2", "causal-lm"), *([defense] if defense else []))
    attack = fitted(client, tmp_path, texts(client.model, TEXTS, 1), selection, references=300, **fields)
    rows = texts(client.model, 40, 2).ids.tolist()
    found = [attack(seen_of(client, row, n, selection), stream(0, "attack")) for n, row in enumerate(rows)]
    guesses = [f.sequences[0] for f in found]
    assert right(guesses, rows) > (0.45 if selection == "all" else 0.25), "chance is one in twelve"
    likely = max(float((torch.tensor(rows) == word).float().mean()) for word in {w for r in rows for w in r})
    swapped = right(guesses, rows[1:] + rows[:1])
    assert swapped < likely + 4 * (likely / (40 * LENGTH)) ** 0.5, "another window's update tells nothing of this one"
    about = json.loads((tmp_path / disk.MANIFEST).read_text())
    assert about["learner"] == "layers"
    assert (about["apart"] is None) == (selection != "all")


def test_lengths_are_read_too(load, tmp_path):
    client = client_of(load("gpt2", "causal-lm"))
    attack = fitted(client, tmp_path, texts(client.model, TEXTS, 1, shortest=3))
    public = texts(client.model, 30, 2, shortest=3)
    rows = [ids[mask].tolist() for ids, mask in zip(public.ids, public.mask, strict=True)]
    guesses = [attack(seen_of(client, r, n, "all"), stream(0, "a")).sequences[0] for n, r in enumerate(rows)]
    assert sum(len(g) == len(r) for g, r in zip(guesses, rows, strict=True)) > 15, "chance is one in three"
    assert right(guesses, rows) > 0.5


def test_what_is_read_from_disk_reads_the_same(load, tmp_path):
    client = client_of(load("gpt2", "causal-lm"))
    attack = fitted(client, tmp_path, texts(client.model, 200, 1), epochs=2)
    inverter = load_inverter(tmp_path)
    seen = seen_of(client, texts(client.model, 1, 3).ids[0].tolist(), 0, "all")
    assert inverter.sentences(seen) == attack(seen, stream(0, "attack")).sequences
    shape = inverter.manifest.network()
    assert isinstance(shape, LayeredShape)
    assert {n: tuple(p.shape) for n, p in inverter.network.named_parameters()} == shape.tensors()
    path = tmp_path / disk.MANIFEST
    about = json.loads(path.read_text())
    path.write_text(json.dumps(about | {"width": about["width"] + 1}))
    with pytest.raises(BadInputError, match="does not hold the network"):
        load_inverter(tmp_path)
    name, first, count = about["apart"]
    for wrong in ([name, 10**9, count], [name, first - 1, count], ["nothing", first, count], [name, first, 10**9]):
        path.write_text(json.dumps(about | {"apart": wrong}))
        with pytest.raises(BadInputError, match=r"keeps entries apart that .* does not have; it is damaged"):
            load_inverter(tmp_path)


def test_a_position_is_read_from_its_own_neighbors_alone():
    shape = LayeredShape(40 + 9 * 4, 4, 16, 6, 9, 11)
    network = LayeredNetwork(shape, stream(0, "weights"))
    told = torch.randn(1, 9, 10, generator=stream(0, "told"))
    moved = told.clone()
    moved[0, 4] += 1
    changed = (network.reader(told) - network.reader(moved)).abs().sum(-1)[0, 0] > 0
    assert changed.tolist() == [2 <= place <= 6 for place in range(9)]


def test_word_vectors_that_are_cut_keep_what_differs_most(load):
    model = load("gpt2", "causal-lm")
    whole = word_vectors(model, 10_000)
    few = word_vectors(model, 5)
    assert few.shape == (len(whole), 5)
    centered = (whole - whole.mean(0)).double()
    kept = torch.linalg.svdvals(centered)[:5].square().sum()
    projected = torch.linalg.lstsq(few.double() - few.double().mean(0), centered).solution
    assert float(((few.double() - few.double().mean(0)) @ projected).square().sum()) == pytest.approx(float(kept))


def test_what_it_cannot_do_is_refused(load, tmp_path):
    client = client_of(load("gpt2", "causal-lm"))
    public = texts(client.model, 40, 1)
    with pytest.raises(BadInputError, match=r"reads one sentence by its positions; .*network"):
        fitted(client, tmp_path, public, size=2)
    for field, value, said in (("learner", "layer", "'network' or 'layers'"), ("references", 0, "references")):
        with pytest.raises(BadInputError, match=said):
            build("attack", "lti", {field: value})


def test_what_does_not_fit_into_memory_is_refused_before_it_is_taken(load, tmp_path, monkeypatch):
    monkeypatch.setattr("gradaudit.learned.text.layered_fit._LARGEST", 1000)
    client = client_of(load("gpt2", "causal-lm"))
    with pytest.raises(BadInputError, match="do not fit into memory; lower share, references or width"):
        fitted(client, tmp_path, texts(client.model, 40, 1))


@pytest.mark.parametrize(("pseudo", "piece"), [(False, 1.0), (True, 1.0), (True, 3.0)])
def test_drawn_text_is_new_in_every_epoch(load, tmp_path, monkeypatch, pseudo, piece):
    simulated: list[tuple[int, ...]] = []

    def counted(simulation, hash_, texts, size, rng):
        simulated.extend(tuple(row) for row in texts.ids.tolist())
        return features.hashed(simulation, hash_, texts, size, rng)

    monkeypatch.setattr(layered_fit, "hashed", counted)
    public = texts(load("gpt2", "causal-lm"), 200, 1)
    how = {"epochs": 4, "references": 100, "patience": 0, "pseudo": pseudo, "piece": piece}
    fitted(client_of(load("gpt2", "causal-lm")), tmp_path, public, **how)
    own = {tuple(row) for row in public.ids.tolist()}
    drawn = [row for row in simulated if row not in own]
    # ten are held out; of 760 windows of five words out of twelve, a few are drawn twice, or are public ones: as are
    # those that one piece fills, from the first of five words on
    new = 760 * (1 - (1 - 1 / piece) ** 4 / 5)
    assert len(simulated) == (10 + 4 * 190 if pseudo else 200)
    assert 0.97 * new < len(set(drawn)) <= 1.03 * new if pseudo else not drawn
