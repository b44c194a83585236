"""Words exchanged one by one: slopes against differences, and whole sentences through defenses beside the control."""

from __future__ import annotations

import pytest
import torch

from gradaudit.client.client import Client
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.leakage.matching.exchange import Exchanges, Guess, exchange_words
from gradaudit.leakage.matching.similarity import Likeness
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Given
from tiny_models import batch_of, seen_of, sentences

TOLD = Given(lengths=True, labels=True)


def client_of(model, *defenses) -> Client:
    return Client(model, defenses=tuple(build("defense", *d) for d in defenses))


@pytest.mark.parametrize(("family", "task"), [("gpt2", "causal-lm"), ("bert", "classification")])
def test_the_truth_is_likest_and_slopes_are_the_limit_of_differences(load, family, task):
    model = load(family, task)
    batch = batch_of(model, sentences((5,), 3), None if task == "causal-lm" else [1])
    like = Likeness(seen_of(client_of(model), batch, given=TOLD), batch.mask, "exchange")
    assert like(batch.ids, batch.labels) == pytest.approx(1, abs=1e-5)
    wrong = batch.ids.clone()
    slot = len(model.special.prefix) + 1
    known = (*batch.sequences()[0], *model.special.ids)
    wrong[0, slot] = next(i for i in range(model.vocabulary_size) if i not in known)
    here = like(wrong, batch.labels)
    assert here < 0.999
    slopes = like.slopes(wrong, batch.labels)
    assert torch.equal(slopes.gather(2, wrong[..., None]), torch.zeros(1, wrong.shape[1], 1))

    # a word that is a little of another one: its vector, and as a target its share
    table, other, little = model.word_vectors(), int(batch.ids[0, slot]), 1e-2
    vectors = table[wrong].clone()
    vectors[0, slot] += little * (table[other] - table[int(wrong[0, slot])])
    labels = batch.labels
    if task == "causal-lm":
        labels = torch.nn.functional.one_hot(wrong, len(table)).float()
        labels[0, slot, other], labels[0, slot, wrong[0, slot]] = little, 1 - little
    loss = model.loss(embeddings=vectors, mask=batch.mask, labels=labels)
    made = like._made(loss, graph=False)
    assert (float(like._cosine(made)) - here) / little == pytest.approx(float(slopes[0, slot, other]), rel=0.1)


@pytest.mark.parametrize(
    ("family", "task", "defense"),
    [
        ("gpt2", "causal-lm", None),
        ("gpt2", "causal-lm", ("sign", {})),
        ("gpt2", "causal-lm", ("topk", {"keep": 0.2})),
        ("gpt2", "causal-lm", ("clip", {"norm": 0.01})),
        ("gpt2", "causal-lm", ("normalized-gaussian", {"sigma": 1e-3})),
    ],
    ids=str,
)
def test_sentences_come_back_through_defenses(load, family, task, defense):
    client = client_of(load(family, task), *([defense] if defense else []))
    texts = sentences((5, 5, 5, 5), 7)
    batches = [batch_of(client.model, [text], None if task == "causal-lm" else [1]) for text in texts]
    attack = build("attack", "exchange", {"evaluations": 700, "proposals": 24})
    found = [attack(seen_of(client, b, given=TOLD, seed=n), stream(0, "a")) for n, b in enumerate(batches)]

    def right(shift: int) -> float:
        pairs = [(a, b) for n, f in enumerate(found) for a, b in zip(
            f.sequences[0], batches[(n + shift) % len(batches)].sequences()[0], strict=True)]  # fmt: skip
        free = [(a, b) for a, b in pairs if b not in client.model.special.ids]
        return sum(a == b for a, b in free) / len(free)

    assert right(0) > 0.6
    assert right(1) < 0.3, "another batch's update tells nothing of this one"
    for one, batch in zip(found, batches, strict=True):
        assert one.details["gradient_evaluations"] <= 700 + 2 * 24 + 5
        if one.certificates == ("likely",):
            assert one.sequences[0] == tuple(batch.sequences()[0])


class Rugged:
    """A likeness where nothing is better than the start, and slopes speak for other words there than anywhere else."""

    def __init__(self, start: torch.Tensor) -> None:
        self.start, self.spent, self.visited = start, 0, [start]

    def __call__(self, ids: torch.Tensor, labels: object) -> float:
        self.spent += 1
        return 0.5 if torch.equal(ids, self.start) else 0.1

    def slopes(self, ids: torch.Tensor, labels: object) -> torch.Tensor:
        self.spent += 3
        self.visited.append(ids)
        words = torch.arange(64) < 20 if torch.equal(ids, self.start) else torch.arange(64) >= 20
        return words.float().expand(1, ids.shape[1], 64).clone()


def test_a_kick_goes_from_the_likest_guess_along_its_own_slopes():
    start = torch.full((1, 5), 63)
    like = Rugged(start)
    how = Exchanges(torch.ones(1, 5, dtype=torch.bool), torch.arange(64) != 40, 0, 4, 400)
    best = exchange_words(like, Guess(start, None, 0.5), how, stream(0, "x"), "test")
    assert torch.equal(best.ids, start)
    assert best.likeness == 0.5
    assert len(like.visited) > 5
    for ids in like.visited[2:]:
        assert bool(((ids < 20) | (ids == start)).all())
        assert 0 < int((ids != start).sum()) <= 3


def test_words_that_may_not_be_put_in_never_are(load):
    client = client_of(load("gpt2", "causal-lm"))
    batch = batch_of(client.model, sentences((5,), 3), None)
    seen = seen_of(client, batch, given=TOLD)
    like = Likeness(seen, batch.mask, "exchange")
    truth = batch.sequences()[0]
    words = torch.ones(client.model.vocabulary_size, dtype=torch.bool)
    words[truth[1]] = False
    start = torch.zeros_like(batch.ids)
    how = Exchanges(batch.mask, words, 0, 16, 200)
    found = exchange_words(like, Guess(start, None, like(start, None)), how, stream(0, "x"), "test")
    assert truth[1] not in found.ids[0].tolist()
    assert found.likeness > like(start, None)


def test_a_label_that_is_not_known_is_exchanged_too(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 4), 2), [1, 0])
    seen = seen_of(client_of(model), batch, given=Given(lengths=True))
    assert seen.knowledge.labels is None
    found = build("attack", "exchange", {"evaluations": 300})(seen, stream(0, "a"))
    assert set(found.labels or ()) <= {0, 1}
    assert len(found.labels or ()) == 2
    like = Likeness(seen, batch.mask, "exchange")
    assert found.details["likeness"] >= like(torch.tensor(list(found.sequences)), torch.tensor([0, 0])) - 1e-5


def test_what_cannot_be_matched_is_refused(load):
    model = load("bert")
    batch = batch_of(model, sentences((4,), 2), [1])
    seen = seen_of(client_of(model), batch, selection="word", given=TOLD)
    with pytest.raises(NotSupportedError, match="nothing to match"):
        build("attack", "exchange", {})(seen, stream(0, "a"))
    gpt2 = client_of(load("gpt2"), ("normalized-gaussian", {"sigma": 1e-3}))
    thirds = seen_of(gpt2, batch_of(gpt2.model, sentences((4,), 2), [1]), selection="0:q", given=TOLD)
    with pytest.raises(NotSupportedError, match="'exchange' cannot normalize a part of a matrix"):
        build("attack", "exchange", {})(thirds, stream(0, "a"))
    with pytest.raises(BadInputError, match="evaluations must be at least 1"):
        build("attack", "exchange", {"evaluations": 0})
    assert not build("attack", "exchange", {}).reckons_with("dp-sgd", model, 2)
    assert build("attack", "exchange", {}).reckons_with("dp-sgd", model, 1)


@pytest.mark.parametrize("lengths", [False, True])
def test_the_end_is_a_word_like_others_where_the_length_is_not_given(load, monkeypatch, lengths):
    asked: list[Exchanges] = []

    def watched(like, start, how, rng, name):
        asked.append(how)
        return exchange_words(like, start, how, rng, name)

    monkeypatch.setattr("gradaudit.attacks.exchange.exchange_words", watched)
    client = client_of(load("bert", "classification"))
    seen = seen_of(client, batch_of(client.model, sentences((4,), 7), [1]), given=Given(labels=True, lengths=lengths))
    build("attack", "exchange", {"evaluations": 2, "proposals": 1})(seen, stream(0, "a"))
    (end,) = client.model.special.suffix
    assert bool(asked[0].words[end]) != lengths
    others = sorted(client.model.special.ids - {end})
    assert not bool(asked[0].words[torch.tensor(others)].any())
