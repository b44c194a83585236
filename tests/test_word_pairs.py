"""Word pairs: the likeliest sentence against all sentences, probabilities that sum to one, and what is on disk."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny_models
from gradaudit.audit.fitting import fit
from gradaudit.client.client import Client
from gradaudit.data.text import make_batch
from gradaudit.errors import BadInputError
from gradaudit.learned import manifest as disk
from gradaudit.learned.manifest import digest_of_inverter
from gradaudit.learned.public import Public
from gradaudit.learned.text import word_pairs
from gradaudit.learned.text.inverter import Inverter, load_inverter, save_inverter
from gradaudit.learned.text.word_pairs import PAIRS, count_pairs, weigh
from gradaudit.registry import build
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import Given

WORDS, LENGTH = 6, 5


def chain(count: int, length: int, seed: int, stay: float = 0.9) -> torch.Tensor:
    """Texts in which a word is followed by the next one nearly always, [n, 1, T]."""
    rng = stream(seed, "chain")
    out = [torch.randint(WORDS, (count,), generator=rng)]
    for _ in range(length - 1):
        other = torch.randint(WORDS, (count,), generator=rng)
        out.append(torch.where(torch.rand(count, generator=rng) < stay, (out[-1] + 1) % WORDS, other))
    return torch.stack(out, 1)[:, None]


def read(classes: torch.Tensor, seed: int, signal: float) -> torch.Tensor:
    """Log probabilities, up to a constant, that a reader would give who sees each word in noise of deviation 1."""
    hot = torch.nn.functional.one_hot(classes, WORDS).float()
    return signal * (signal * hot + torch.randn(hot.shape, generator=stream(seed, "noise")))


@pytest.mark.parametrize("weight", [0.0, 0.4, 1.0])
def test_it_is_the_likeliest_of_all_sentences(weight):
    pairs = count_pairs(chain(50, LENGTH, 0), WORDS)
    logits = read(chain(20, LENGTH, 1), 2, 1.0)
    every = torch.tensor(list(itertools.product(range(WORDS), repeat=LENGTH)))
    beside = pairs.ratios(every[:, :-1], every[:, 1:]).sum(1)
    for one, found in zip(logits[:, 0], pairs.likeliest(logits, weight)[:, 0], strict=True):
        scores = one[torch.arange(LENGTH), every].sum(1) + weight * beside
        assert every[scores.argmax()].tolist() == found.tolist()
    if weight == 0:
        assert torch.equal(pairs.likeliest(logits, 0.0), logits.argmax(-1))


def test_what_may_follow_a_word_is_a_probability():
    pairs = count_pairs(chain(30, 3, 0, stay=1.0), WORDS + 2)  # two words that never occur
    each = torch.arange(WORDS + 2)
    alone = (pairs.words + 0.5) / (pairs.words.sum() + 0.5 * (WORDS + 2))
    after = pairs.ratios(each[:, None], each[None]).exp() * alone
    assert torch.allclose(after.sum(1), torch.ones(WORDS + 2), atol=1e-5)
    assert torch.equal(pairs.ratios(each[-1:, None], each[None]), torch.zeros(1, WORDS + 2)), "it begins no pair"
    begun = float(pairs.counts[0])  # the only pair that word 0 begins
    assert after[0, 1].item() == pytest.approx((begun - 0.75 + 0.75 * alone[1].item()) / begun, rel=1e-5)
    assert after[0, 3].item() == pytest.approx(0.75 * alone[3].item() / begun, rel=1e-4)


def test_words_that_depend_on_each_other_are_read_better_and_others_weigh_nothing():
    text = chain(300, 8, 1)
    pairs = count_pairs(chain(300, 8, 0), WORDS)
    weight, right = weigh(pairs, [(read(text, 2, 1.5), text)])
    alone = 100 * float((read(text, 2, 1.5).argmax(-1) == text).float().mean())
    assert weight >= 0.75, "the reading and the pairs are independent here: a weight of 1 is right"
    assert right > alone + 10
    other = chain(300, 8, 3, stay=0.0)
    weight, right = weigh(count_pairs(chain(300, 8, 4, stay=0.0), WORDS), [(read(other, 5, 1.5), other)])
    assert right < 100 * float((read(other, 5, 1.5).argmax(-1) == other).float().mean()) + 1
    swapped, _ = weigh(pairs, [(read(other, 5, 1.5), other)])
    assert swapped <= 0.1, "pairs of another language are left out"


def test_sentences_are_held_against_the_slots_they_fit():
    pairs = count_pairs(chain(300, 8, 0), WORDS)
    text = chain(200, 8, 1).view(100, 2, 8)
    logits = read(text, 2, 1.5)
    assert weigh(pairs, [(logits.flip(1), text)]) == weigh(pairs, [(logits, text)])


def test_few_words_are_weighed_at_a_position(monkeypatch):
    monkeypatch.setattr(word_pairs, "_FEW", 2)
    pairs = count_pairs(chain(50, LENGTH, 0), WORDS)
    logits = read(chain(20, LENGTH, 1), 2, 1.0)
    found = pairs.likeliest(logits, 1.0)
    assert bool((logits.topk(2, -1).indices == found[..., None]).any(-1).all())


@pytest.fixture(scope="module", params=["layers", "network"])
def made(load, tmp_path_factory, request):
    model = load("gpt2", "causal-lm")
    words = [i for i in range(model.vocabulary_size) if i not in model.special.ids and i != model.unknown]
    rows = torch.tensor(words[:WORDS])[chain(400, LENGTH, 0)[:, 0]]
    public = Public(rows, torch.ones_like(rows, dtype=torch.bool), None, "made up")
    client = Client(model, freeze=("word",), defenses=(build("defense", "gaussian", {"sigma": 0.02}),))
    how = {"learner": request.param, "share": 0.1, "bottleneck": 64, "width": 32, "epochs": 4, "learning_rate": 5e-3}
    folder = tmp_path_factory.mktemp(request.param)
    attack = fit(
        build("attack", "lti", how | {"pseudo": True, "pairs": True}), client, Selection("all"), public, 1, 0, folder
    )
    return client, attack, folder, torch.tensor(words[:WORDS])[chain(60, LENGTH, 1)[:, 0]]


def test_text_that_goes_on_as_public_text_does_is_read_better(made):
    client, _, folder, rows = made
    whole = load_inverter(folder)
    assert whole.manifest.pairs_weight > 0

    def right(inverter: Inverter, other: int = 0) -> float:
        found = []
        for n, row in enumerate(rows):
            batch = make_batch(client.model, ["made up"], None, [row.tolist()])
            found.append(inverter.sentences(tiny_models.seen_of(client, batch, "all", Given(), n))[0])
        return float((torch.tensor(found) == rows.roll(other, 0)).float().mean())

    assert float(whole.pairs.counts.sum()) == 380 * (LENGTH - 1), "what is held out is not counted"
    without = Inverter(whole.manifest, whole.network, whole.scaling)
    assert right(whole) > right(without) + 0.05
    silent = Inverter(
        whole.manifest.model_copy(update={"pairs_weight": 0.0}), whole.network, whole.scaling, whole.pairs
    )
    assert right(silent) == right(without)
    assert right(whole, 1) < 0.35, "another window's update tells little more than how often words occur"


def test_pairs_that_weigh_nothing_are_not_kept(made, tmp_path, monkeypatch):
    client, attack, _, rows = made
    monkeypatch.setattr(word_pairs, "WEIGHTS", (0.0,))
    public = Public(rows, torch.ones_like(rows, dtype=torch.bool), None, "made up")
    fit(replace(attack, inverter="", epochs=1), client, Selection("all"), public, 1, 0, tmp_path)
    assert load_inverter(tmp_path).pairs is None
    assert not (tmp_path / PAIRS).exists()


def test_pairs_are_read_again_as_they_were_and_damaged_ones_are_refused(made, tmp_path):
    _, _, folder, _ = made
    whole = load_inverter(folder)
    save_inverter(tmp_path / "again", whole)
    again = load_inverter(tmp_path / "again")
    assert torch.equal(again.pairs.keys, whole.pairs.keys)
    assert torch.equal(again.pairs.counts, whole.pairs.counts)
    digest = digest_of_inverter(tmp_path / "again")
    assert digest == digest_of_inverter(folder)
    path, tensors = tmp_path / "again" / PAIRS, load_file(tmp_path / "again" / PAIRS)
    for change, said in (
        ({"keys": tensors["keys"].flip(0)}, "no text has"),
        ({"keys": tensors["keys"] + whole.manifest.classes**2}, "no text has"),
        ({"counts": tensors["counts"] * torch.nan}, "no text has|infinite"),
        ({"words": -tensors["words"] - 1}, "no text has"),
        ({"words": tensors["words"][1:].contiguous()}, "does not hold"),
        ({"keys": tensors["keys"].int()}, "does not hold"),
    ):
        save_file(tensors | change, path)
        assert digest_of_inverter(tmp_path / "again") != digest, "a run does not go on with another inverter"
        with pytest.raises(BadInputError, match=said):
            load_inverter(tmp_path / "again")
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(BadInputError, match="truncated"):
        load_inverter(tmp_path / "again")
    path.unlink()
    with pytest.raises(BadInputError, match="missing"):
        load_inverter(tmp_path / "again")
    manifest = tmp_path / "again" / disk.MANIFEST
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"pairs": 0}))
    assert load_inverter(tmp_path / "again").pairs is None
