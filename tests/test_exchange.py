"""Words exchanged one by one: slopes against differences, and whole sentences through defenses beside the control."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from gradaudit.client.client import Client
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.leakage.matching import similarity
from gradaudit.leakage.matching.exchange import Exchanges, Guess, Sentence, exchange_words
from gradaudit.leakage.matching.similarity import Likeness
from gradaudit.leakage.observed import word_gradient_hidden
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Given
from tiny_models import EVERY, batch_of, seen_of, sentences

TOLD = Given(lengths=True, labels=True)


def client_of(model, *defenses) -> Client:
    return Client(model, defenses=tuple(build("defense", *d) for d in defenses))


def judged(like: Likeness, ids: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor | None) -> float:
    return float(like(ids[None], mask[None], None if labels is None else labels[None])[0])


@pytest.mark.parametrize(("family", "task"), [("gpt2", "causal-lm"), ("bert", "classification")])
def test_the_truth_is_likest_and_slopes_are_the_limit_of_differences(load, family, task):
    model = load(family, task)
    batch = batch_of(model, sentences((5,), 3), None if task == "causal-lm" else [1])
    like = Likeness(seen_of(client_of(model), batch, given=TOLD), "exchange")
    given = None if task == "causal-lm" else batch.labels
    assert judged(like, batch.ids, batch.mask, given) == pytest.approx(1, abs=1e-5)
    wrong = batch.ids.clone()
    slot = len(model.special.prefix) + 1
    known = (*batch.sequences()[0], *model.special.ids)
    wrong[0, slot] = next(i for i in range(model.vocabulary_size) if i not in known)
    here = judged(like, wrong, batch.mask, given)
    assert here < 0.999
    slopes = like.slopes(wrong[None], batch.mask[None], None if given is None else given[None])[0]
    assert torch.equal(slopes.gather(2, wrong[..., None]), torch.zeros(1, wrong.shape[1], 1))

    # a word that is a little of another one: its vector, and as a target its share
    table, other, little = model.word_vectors(), int(batch.ids[0, slot]), 1e-2
    vectors = table[wrong].clone()
    vectors[0, slot] += little * (table[other] - table[int(wrong[0, slot])])
    labels = batch.labels
    if task == "causal-lm":
        labels = torch.nn.functional.one_hot(wrong, len(table)).float()
        labels[0, slot, other], labels[0, slot, wrong[0, slot]] = little, 1 - little
    made = like._made(batch.mask, labels, embeddings=vectors)
    assert (float(like._cosine(made).detach()) - here) / little == pytest.approx(float(slopes[0, slot, other]), rel=0.1)


def test_the_truth_s_own_signs_are_the_signs_that_were_sent(load):
    model = load("gpt2", "causal-lm")
    batch = batch_of(model, sentences((5,), 3), None)
    seen = seen_of(client_of(model, ("sign", {})), batch, given=TOLD)
    assert judged(Likeness(seen, "exchange"), batch.ids, batch.mask, None) > 0.99
    assert judged(Likeness(seen, "exchange", replay=False), batch.ids, batch.mask, None) < 0.99


@pytest.mark.parametrize("numbers", [2**26, 1])
@pytest.mark.parametrize(("family", "task"), [(family, "classification") for family in EVERY] + [("gpt2", "causal-lm")])
def test_guesses_judged_together_are_as_like_as_gradients_made_one_by_one_say(load, monkeypatch, family, task, numbers):
    monkeypatch.setattr(similarity, "_NUMBERS", numbers)
    model = load(family, task)
    made = [batch_of(model, sentences((n, 5), n), None if task == "causal-lm" else [1, 0]) for n in (3, 4, 5)]
    seen = seen_of(client_of(model), made[0], given=TOLD)
    longest = max(one.ids.shape[1] for one in made)
    ids = torch.stack([F.pad(one.ids, (0, longest - one.ids.shape[1])) for one in made])
    mask = torch.stack([F.pad(one.mask, (0, longest - one.mask.shape[1])) for one in made])
    given = None if task == "causal-lm" else torch.stack([one.labels for one in made])
    like = Likeness(seen, "exchange")
    together = like(ids, mask, given)
    assert like.spent == 3

    hidden = word_gradient_hidden(seen)
    names = [name for name in seen.tensors if name not in hidden]
    sent = torch.cat([seen.tensors[name].flatten() for name in names])
    for at, one in enumerate(made):
        parameters = model.parameters()
        with torch.enable_grad():
            loss = model.loss(ids=one.ids, mask=one.mask, labels=one.ids if given is None else one.labels)
            wanted = sorted({seen.views[name].parameter for name in names})
            gradients = dict(zip(wanted, torch.autograd.grad(loss, [parameters[n] for n in wanted]), strict=True))
        own = torch.cat([seen.views[name](gradients[seen.views[name].parameter]).flatten() for name in names])
        assert float(together[at]) == pytest.approx(float(F.cosine_similarity(own, sent, dim=0)), abs=1e-4)
    assert float(together[0]) == pytest.approx(1, abs=1e-4)
    assert float(together[1:].max()) < 0.999


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
        assert one.details["gradient_evaluations"] <= 700 + 3
        if one.certificates == ("likely",):
            assert one.sequences[0] == tuple(batch.sequences()[0])


class Rugged:
    """A likeness where nothing is better than the start, and slopes speak for other words there than anywhere else."""

    def __init__(self, start: Sentence) -> None:
        self.start, self.spent, self.sloped, self.table = start, 0, list[Sentence](), torch.eye(64)

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor, labels: object) -> torch.Tensor:
        self.spent += len(ids)
        return torch.tensor([0.5 if tuple(one[0].tolist()) == self.start else 0.1 for one in ids])

    def slopes(self, ids: torch.Tensor, mask: torch.Tensor, labels: object) -> torch.Tensor:
        self.spent += 3
        self.sloped.append(tuple(ids[0, 0].tolist()))
        words = torch.arange(64) < 20 if self.sloped[-1] == self.start else torch.arange(64) >= 20
        return words.float().expand(1, 1, ids.shape[2], 64).clone()


def exchanges(words: torch.Tensor, longest: int | None = None, evaluations: int = 400) -> Exchanges:
    return Exchanges((((), ()),), words, (), (), 0, 1, longest, 4, evaluations)


@pytest.mark.parametrize("longest", [None, 9])
def test_where_nothing_helps_a_third_of_the_words_is_exchanged_along_their_slopes_or_left_out(longest):
    start = (63,) * 9
    like = Rugged(start)
    how = exchanges(torch.arange(64) != 40, longest, 6000)
    best = exchange_words(like, Guess((start,)), how, stream(0, "x"), "t")
    assert best == Guess((start,), None, 0.5)
    if longest is None:
        kicked = [[word for word in one if word != 63] for one in like.sloped]
        assert any(len(one) == 3 and max(one) < 20 for one in kicked), "three words that the start's slopes speak for"
    else:
        assert any(len(one) <= 6 for one in like.sloped)


class Spelled:
    """A likeness that says how much of a sentence is right, from its beginning; one of another length is less so."""

    def __init__(self, truth: Sentence) -> None:
        self.truth, self.spent, self.table, self.seen = truth, 0, torch.eye(8), set[int]()
        self.lengths = set[int]()

    def __call__(self, ids: torch.Tensor, mask: torch.Tensor, labels: object) -> torch.Tensor:
        self.spent += len(ids)
        self.seen |= set(ids[mask].tolist())
        self.lengths |= set(mask.sum(-1).flatten().tolist())
        return torch.tensor([self.of(one[0][kept[0]].tolist()) for one, kept in zip(ids, mask, strict=True)])

    def of(self, words: list[int]) -> float:
        right = [a == b for a, b in zip(words, self.truth, strict=False)] + [False]
        return right.index(False) / max(len(words), len(self.truth))

    def slopes(self, ids: torch.Tensor, mask: torch.Tensor, labels: object) -> torch.Tensor:
        self.spent += 3
        return torch.zeros(1, 1, ids.shape[2], 8)


@pytest.mark.parametrize("length", [1, 9])
def test_a_sentence_grows_and_shrinks_to_its_length_unless_that_is_known(length):
    truth = (5, 1, 4, 2, 6)
    words = torch.arange(8) > 0
    start = Guess(((1,) * length,))
    grown = exchange_words(Spelled(truth), start, exchanges(words, 12, 6000), stream(0, "x"), "t")
    assert grown.sentences == (truth,)
    kept = exchange_words(Spelled(truth), start, exchanges(words, None, 6000), stream(0, "x"), "t")
    assert len(kept.sentences[0]) == length
    short = exchange_words(Spelled(truth), Guess(((1,),)), exchanges(words, 3, 6000), stream(0, "x"), "t")
    assert len(short.sentences[0]) <= 3


def test_words_that_may_not_be_put_in_never_are(load):
    client = client_of(load("gpt2", "causal-lm"))
    batch = batch_of(client.model, sentences((5,), 3), None)
    like = Likeness(seen_of(client, batch, given=TOLD), "exchange")
    truth = batch.sequences()[0]
    words = torch.ones(client.model.vocabulary_size, dtype=torch.bool)
    words[truth[1]] = False
    start = Guess(((0,) * len(truth),))
    found = exchange_words(like, start, exchanges(words, evaluations=200), stream(0, "x"), "test")
    assert truth[1] not in found.sentences[0]
    assert found.likeness > judged(like, torch.zeros_like(batch.ids), batch.mask, None)


def test_a_label_that_is_not_known_is_exchanged_too(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 4), 2), [1, 0])
    seen = seen_of(client_of(model), batch, given=Given(lengths=True))
    assert seen.knowledge.labels is None
    frame = (tuple(model.special.prefix), tuple(model.special.suffix))
    words = torch.arange(model.vocabulary_size) >= 0
    how = Exchanges((frame, frame), words, (), (), 2, 1, None, 4, 200)
    right = tuple(tuple(model.content(one)) for one in batch.sequences())
    found = exchange_words(Likeness(seen, "exchange"), Guess(right, (0, 0)), how, stream(0, "x"), "test")
    assert (found.sentences, found.labels) == (right, (1, 0))
    assert found.likeness == pytest.approx(1, abs=1e-5)


def test_an_empty_sentence_has_its_frame_alone(load):
    model = load("bert")
    batch = batch_of(model, ["", sentences((2,), 2)[0]], [1, 1])
    seen = seen_of(client_of(model), batch, given=TOLD)
    found = build("attack", "exchange", {"evaluations": 50})(seen, stream(0, "a"))
    assert found.sequences[0] == (*model.special.prefix, *model.special.suffix)
    alone = seen_of(client_of(model), batch_of(model, [""], [1]), given=TOLD)
    found = build("attack", "exchange", {"evaluations": 50})(alone, stream(0, "a"))
    assert (found.sequences, found.details["gradient_evaluations"]) == ((tuple(batch.sequences()[0]),), 1)


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_a_sentence_does_not_outgrow_the_model(load, monkeypatch, family):
    asked: list[Exchanges] = []
    monkeypatch.setattr(
        "gradaudit.attacks.exchange.exchange_words", lambda like, start, how, *_: asked.append(how) or start
    )
    model = load(family)
    seen = seen_of(client_of(model), batch_of(model, sentences((4,), 7), [1]), selection="head")
    build("attack", "exchange", {"longest": 10_000})(seen, stream(0, "a"))
    (before, behind), longest = asked[0].frames[0], asked[0].longest
    assert len(before) + len(behind) + (longest or 0) == model.max_length


def test_few_words_are_enough_and_no_others_are_proposed():
    words = torch.arange(8) == 3
    how = Exchanges((((), ()),), words, (1, 3), (2,), 0, 1, 6, 48, 300)
    like = Spelled((3, 3, 4))
    found = exchange_words(like, Guess(((3,),)), how, stream(0, "x"), "t")
    assert found.sentences[0][:2] == (3, 3)
    assert like.seen == {3}


def test_ctrl_c_before_anything_was_judged_is_no_other_error(monkeypatch):
    like = Spelled((3,))
    monkeypatch.setattr(Spelled, "of", lambda self, words: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        exchange_words(like, Guess(((1,),)), exchanges(torch.arange(8) > 0, 6), stream(0, "x"), "t")


def test_what_every_text_sends_alike_makes_no_guess_likely(load):
    model = load("bert")
    seen = seen_of(client_of(model), batch_of(model, sentences((3,), 2), [1]), selection="head")
    (bias,) = [name for name, one in seen.tensors.items() if one.dim() == 1]
    little = replace(seen, tensors={bias: seen.tensors[bias]}, views={bias: seen.views[bias]})
    found = build("attack", "exchange", {"evaluations": 50})(little, stream(0, "a"))
    assert found.details["likeness"] == pytest.approx(1, abs=1e-5)
    assert found.certificates == ("guess",)


def test_a_word_too_many_is_left_out_at_once_but_never_too_many():
    truth = (5, 1, 4, 2, 6)
    how = exchanges(torch.arange(8) > 0, 12, 40)
    found = exchange_words(Spelled(truth), Guess(((5, 1, 4, 2, 7, 6),)), how, stream(0, "x"), "t")
    assert found.sentences == (truth,)
    like = Spelled((5,))
    exchange_words(like, Guess(((5, 5, 5),)), replace(how, shortest=2, evaluations=2000), stream(0, "x"), "t")
    assert min(like.lengths) == 2


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
def test_a_sentence_stands_in_its_frame_and_grows_where_its_length_is_not_given(load, monkeypatch, lengths):
    asked: list[tuple[Guess, Exchanges]] = []

    def watched(like, start, how, rng, name):
        asked.append((start, how))
        return exchange_words(like, start, how, rng, name)

    monkeypatch.setattr("gradaudit.attacks.exchange.exchange_words", watched)
    client = client_of(load("bert", "classification"))
    batch = batch_of(client.model, sentences((4,), 7), [1])
    seen = seen_of(client, batch, given=Given(labels=True, lengths=lengths))
    found = build("attack", "exchange", {"evaluations": 2, "proposals": 1})(seen, stream(0, "a"))
    (start, how), special = asked[0], client.model.special
    assert not bool(how.words[torch.tensor(sorted(special.ids))].any())
    assert how.frames == ((tuple(special.prefix), tuple(special.suffix)),)
    assert (len(start.sentences[0]), how.longest is None) == (4 if lengths else 1, lengths)
    sentence = found.sequences[0]
    assert (sentence[0], sentence[-1]) == (special.prefix[0], special.suffix[0])


def test_one_sentence_is_read_from_biases_norms_and_head(load):
    model = load("bert")
    client = Client(model, freeze=("embeddings *:*",))
    batches = [batch_of(model, [text], [1]) for text in sentences((2, 3, 2), 11)]
    attack = build("attack", "exchange", {"evaluations": 2000})
    found = [
        attack(seen_of(client, b, given=Given(lengths=True), seed=n), stream(0, "a")) for n, b in enumerate(batches)
    ]
    assert sum(tuple(b.sequences()[0]) == f.sequences[0] for b, f in zip(batches, found, strict=True)) >= 2
    texts = [set(model.content(b.sequences()[0])) for b in batches]
    others = [len(set(f.sequences[0]) & texts[(n + 1) % 3]) / len(texts[(n + 1) % 3]) for n, f in enumerate(found)]
    assert sum(others) / 3 < 0.5, "another batch's update tells nothing of this one"
