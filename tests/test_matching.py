"""Gradient matching: closed forms against autograd and finite differences, and the truth as a stationary zero."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from gradaudit.client.client import Client
from gradaudit.errors import NotSupportedError
from gradaudit.leakage.matching import loop as harness
from gradaudit.leakage.matching.descent import Descent, Schedule, minimize
from gradaudit.leakage.matching.distances import L2, Cosine, Normalized, OnSupport, SquaredL2, WrongSigns
from gradaudit.leakage.matching.layout import layout, longest_position
from gradaudit.leakage.matching.masks import Masks
from gradaudit.leakage.matching.objective import Objective
from gradaudit.leakage.observed import as_gradient, nearest_tokens, word_gradient_hidden
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Given, LocalTraining
from tiny_models import EVERY_SETTING, FAMILIES, SETTINGS, batch_of, doubled, made_by, seen_of, sentences, summed


def plain_squared(p: list[Tensor], o: list[Tensor], l1: float) -> Tensor:
    return sum(((a - b) ** 2).sum() + l1 * (a - b).abs().sum() for a, b in zip(p, o, strict=True))


def plain_cosine(p: list[Tensor], o: list[Tensor]) -> Tensor:
    pairs = [1 - torch.cosine_similarity(a.flatten(), b.flatten(), dim=0) for a, b in zip(p, o, strict=True)]
    return sum(pairs) / len(pairs)


def plain_l2(p: list[Tensor], o: list[Tensor]) -> Tensor:
    return sum((a - b).norm() + 0.01 * (a - b).abs().sum() for a, b in zip(p, o, strict=True))


def plain_on_support(p: list[Tensor], o: list[Tensor]) -> Tensor:
    return plain_l2([a[b != 0] for a, b in zip(p, o, strict=True)], [b[b != 0] for b in o])


DISTANCES = {
    "squared": (SquaredL2(), lambda p, o: plain_squared(p, o, 0.0)),
    "squared+l1": (SquaredL2(l1=0.01), lambda p, o: plain_squared(p, o, 0.01)),
    "l2": (L2(), plain_l2),
    "cosine": (Cosine(), plain_cosine),
    "normalized": (Normalized(L2()), lambda p, o: plain_l2([a / a.norm() for a in p], o)),
    "normalized cosine": (Normalized(Cosine()), plain_cosine),
    "support": (OnSupport(L2()), plain_on_support),
    "wrong signs": (
        WrongSigns(0.01),
        lambda p, o: sum(
            torch.relu(-a * b.sign()).square().sum() + 0.01 * torch.relu(-a * b.sign()).sum()
            for a, b in zip(p, o, strict=True)
        ),
    ),
    "support cosine": (
        OnSupport(Cosine()),
        lambda p, o: plain_cosine([a * (b != 0) for a, b in zip(p, o, strict=True)], o),
    ),
}


def truth(model, batch) -> tuple[Tensor, Tensor, Tensor]:
    """Return the guess that is the truth: word vectors, mask, labels, for one candidate."""
    labels = batch.labels
    if labels is None:
        labels = torch.nn.functional.one_hot(batch.ids, model.vocabulary_size).to(model.word_vectors())
    return model.word_vectors()[batch.ids][None], batch.mask, labels[None]


@pytest.mark.parametrize("name", DISTANCES)
def test_distances_and_slopes_equal_autograd(name):
    distance, plain = DISTANCES[name]
    rng = torch.Generator().manual_seed(0)
    shapes = [(3, 4), (5,), (2, 3, 2)]
    observed = [torch.randn(s, generator=rng, dtype=torch.float64) for s in shapes]
    if "support" in name:
        observed = [torch.where(o > 0, o, 0.0) for o in observed]
    guessed = [torch.randn((4, *s), generator=rng, dtype=torch.float64) for s in shapes]
    value = summed(distance, guessed, observed)
    for n in range(4):
        one = [p[n].clone().requires_grad_() for p in guessed]
        expected = plain(one, observed)
        torch.testing.assert_close(value[n], expected.detach())
        for p, o, wanted in zip(guessed, observed, torch.autograd.grad(expected, one), strict=True):
            q = p - o if distance.differs else p.clone()
            _, slope = distance.each(q.flatten(1)[:, None], o.reshape(1, -1), True)
            assert slope is not None
            torch.testing.assert_close(slope[n].reshape(wanted.shape) * distance.share(len(shapes)), wanted)


def test_cosine_of_a_zero_tensor_is_1_and_pushes_nowhere():
    rng = torch.Generator().manual_seed(0)
    some, zero = torch.randn((1, 4), generator=rng), torch.zeros((1, 4))
    for predicted, observed in ((zero, some[0]), (some, zero[0]), (zero, zero[0])):
        value, slope = Cosine().each(predicted.clone()[:, None], observed[None], True)
        assert value.item() == 1.0
        assert slope is not None
        assert torch.equal(slope, torch.zeros_like(slope))


@pytest.mark.parametrize("noise", [0.0, 1e-3])
def test_what_is_rounding_alone_does_not_count_in_a_cosine(load, noise):
    """A key's bias shifts what softmax does not see: its gradient is rounding, and the result as if it were not shared.

    With noise added by the client the observed tensor is large, and the guess's still rounding.
    """
    model = load("bert")
    batch = batch_of(model, sentences((6,), 1), [1])
    seen = seen_of(Client(model), batch)
    rng = torch.Generator().manual_seed(0)
    seen = replace(seen, tensors={n: v + noise * torch.randn(v.shape, generator=rng) for n, v in seen.tensors.items()})
    silent = [n for n in seen.tensors if n.endswith("key.bias")]
    heard = [n for n in seen.tensors if n not in silent]
    unshared = replace(seen, tensors={n: seen.tensors[n] for n in heard}, views={n: seen.views[n] for n in heard})
    guess = model.word_vectors()[batch.ids.flip(1)][None].clone().requires_grad_()
    whole, part = Objective(seen, Cosine()), Objective(unshared, Cosine())
    count = whole.details()["matched_tensors"]
    found = []
    for objective in (whole, part):
        value = objective(guess, batch.mask, batch.labels[None]).sum() * objective.details()["matched_tensors"]
        found.append((value.detach(), torch.autograd.grad(value, guess)[0]))
    assert part.details()["matched_tensors"] == count - len(silent) < count
    torch.testing.assert_close(found[0][0], found[1][0] + len(silent), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found[0][1], found[1][1], rtol=1e-4, atol=1e-5)
    counted = Objective(seen, Cosine(silent=0.0))(guess, batch.mask, batch.labels[None]).sum() * count
    assert float((torch.autograd.grad(counted, guess)[0] - found[1][1]).norm()) > 1e-3 * float(found[1][1].norm())


@pytest.mark.parametrize("selection", ["all", "0:q,k 1:*", "2:v,f head"])
@pytest.mark.parametrize(("family", "task"), EVERY_SETTING)
def test_the_truth_predicts_the_observation(load, family, task, selection):
    """The oracle is the client's own gradient: autograd of the whole loss, without factors."""
    model = load(family, task)
    batch = batch_of(model, sentences((4, 6), 1))
    seen = seen_of(Client(model), batch, selection)
    objective = Objective(seen, SquaredL2())
    shared = [n for n in seen.views if "relative_attention_bias" in n]
    assert set(objective.left_out) == {*word_gradient_hidden(seen), *shared}
    vectors, mask, labels = truth(model, batch)
    made = made_by(objective, vectors[0], mask, labels[0])
    assert made.keys() == set(seen.views) - set(objective.left_out)
    for name, p in made.items():
        sent = seen.tensors[name]
        if p.shape != sent.shape or not torch.allclose(p, sent, rtol=1e-4, atol=1e-5):
            sent = sent.T  # GPT-2 stores its matrices [in, out]
        torch.testing.assert_close(p, sent, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: n + m)
    assert float(objective(vectors, mask, labels)[0].detach()) < 1e-6
    assert float(objective(vectors.flip(2), mask, labels)[0].detach()) > 1e-2


@pytest.mark.parametrize("distance", ["squared", "l2", "cosine", "normalized"])
@pytest.mark.parametrize(("family", "task"), SETTINGS)
def test_the_objective_s_slope_equals_finite_differences(load, family, task, distance):
    """Away from the truth, for vectors and masks; at the truth a smooth distance is stationary."""
    model, measure = doubled(load(family, task)), DISTANCES[distance][0]
    batch = batch_of(model, sentences((3, 5), 1))
    seen = seen_of(Client(model), batch, "0-1:v,o 1:f head")
    objective = Objective(seen, measure)
    vectors, mask, labels = truth(model, batch)
    rng = torch.Generator().manual_seed(0)
    away, direction = (torch.randn(vectors.shape, generator=rng, dtype=torch.float64) for _ in range(2))

    def slope(at: Tensor) -> Tensor:
        at = at.clone().requires_grad_()
        return torch.autograd.grad(objective(at, mask, labels).sum(), at)[0]

    if distance in ("squared", "cosine"):
        assert float(slope(vectors).abs().max()) < 1e-6
    at = vectors + 0.3 * away
    # transformers' RMSNorm computes in float32 whatever it is given, so its differences need a longer step
    step, tolerance = (1e-3, 2e-2) if family == "llama" else (1e-6, 1e-4)
    with torch.no_grad():
        up, down = (objective(at + s * direction, mask, labels) for s in (step, -step))
    expected = float(up - down) / (2 * step)
    assert float((slope(at) * direction).sum()) == pytest.approx(expected, rel=tolerance, abs=1e-7)


@pytest.mark.parametrize(("family", "task"), SETTINGS)
def test_many_candidates_at_once_equal_one_by_one(load, family, task):
    model = load(family, task)
    batch = batch_of(model, sentences((4, 6), 1))
    seen = seen_of(Client(model), batch, "0:* 2:q,p head")
    vectors, mask, labels = truth(model, batch)
    rng = torch.Generator().manual_seed(0)
    many = vectors + torch.randn((3, *vectors.shape[1:]), generator=rng)
    classes = torch.tensor([[0, 0], [0, 1], [1, 1]]) if task == "classification" else labels.expand(3, -1, -1, -1)
    objective = Objective(seen, L2())
    with torch.no_grad():
        together = objective(many, mask, classes)
        alone = torch.cat([objective(many[n : n + 1], mask, classes[n : n + 1]) for n in range(3)])
    torch.testing.assert_close(together, alone, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("family", "task"), SETTINGS)
def test_one_sentence_anew_on_the_others_base_equals_the_whole_batch(load, family, task):
    model = load(family, task)
    batch = batch_of(model, sentences((4, 6, 5), 1), [0, 1, 0])
    seen = seen_of(Client(model), batch, "all")
    vectors, mask, labels = truth(model, batch)
    other = vectors + torch.randn(vectors.shape, generator=torch.Generator().manual_seed(0))
    mixed = torch.cat([vectors[:, :1], other[:, 1:2], vectors[:, 2:]], 1)
    size = 3 if task == "classification" else int(mask[:, 1:].sum())
    objective = Objective(seen, L2())
    for masks in (None, Masks(3, torch.Generator().manual_seed(1))):
        if masks is not None and model.dropout_rate() == 0:
            continue  # Llama drops nothing out
        with torch.no_grad():
            whole = objective(mixed, mask, labels, masks)
            rest, changed = torch.tensor([0, 2]), torch.tensor([1])
            parts = (None, None) if masks is None else (masks.only(rest), masks.only(changed))
            base = objective.base(vectors[0, rest], mask[rest], labels[0, rest], parts[0], size)
            anew = objective.beside(
                mixed[:, changed], mask[changed], labels[:, changed], [parts[1]], [(base, torch.tensor([0]))]
            )
        torch.testing.assert_close(anew, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet", "gpt2"])
def test_the_client_s_own_masks_make_the_guess_exact(load, family):
    """Dropout on: with the masks that the client drew, at every site, the truth explains the update."""
    model = load(family)
    batch = batch_of(model, sentences((4, 6), 1))
    size, drawn = len(batch.ids), {}

    def note(site: int, inner: Tensor, rate: float) -> Tensor:
        rng = torch.Generator().manual_seed(site)
        drawn[site] = (torch.rand(inner.shape, generator=rng) >= rate).to(inner)
        return inner * drawn[site] / (1 - rate)

    seen = seen_of(Client(model), batch, "0-2:* head", given=Given(dropout=True))
    vectors, mask, labels = truth(model, batch)
    names = {v.parameter for v in seen.views.values()}
    moving = {n: p for n, p in model.parameters().items() if n in names}
    traced = model.traced(embeddings=vectors[0], mask=mask, labels=labels[0], watch=(), dropout=note)
    gradients = torch.autograd.grad(traced.losses.mean(), list(moving.values()))
    tensors = {
        n: v(g) for n, v in seen.views.items() for m, g in zip(moving, gradients, strict=True) if m == v.parameter
    }
    seen = replace(seen, tensors=tensors)
    masks = Masks(size, torch.Generator().manual_seed(9))
    objective = Objective(seen, SquaredL2())
    with torch.no_grad():
        strange = objective(vectors, mask, labels, masks)
        assert len(masks.variables()) == len(drawn) > 3 * model.depth
        for site, value in drawn.items():
            masks.variables()[site].copy_(value)
        assert float(objective(vectors, mask, labels, masks)) < 1e-6
        assert float(strange) > 1e-2
        assert float(objective(vectors, mask, labels)) > 1e-2


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_masks_are_learned_by_their_own_slope(load, family):
    model = doubled(load(family))
    batch = batch_of(model, sentences((4,), 1))
    objective = Objective(seen_of(Client(model), batch, "0-1:*"), SquaredL2())
    vectors, mask, labels = truth(model, batch)
    masks = Masks(1, torch.Generator().manual_seed(0))
    value = objective(vectors, mask, labels, masks)
    slopes = torch.autograd.grad(objective(vectors, mask, labels, masks).sum(), masks.variables(), allow_unused=True)
    slope = slopes[1]
    assert slope is not None
    direction = torch.randn(slope.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    values = []
    for step in (1e-6, -2e-6):
        with torch.no_grad():
            masks.variables()[1].add_(step * direction)
            values.append(float(objective(vectors, mask, labels, masks)))
    assert float(value.detach()) > 0
    assert float((slope * direction).sum()) == pytest.approx((values[0] - values[1]) / 2e-6, rel=1e-4)


def run_minimize(model, batch, **changed):
    seen = seen_of(Client(model), batch, "0-2:* head")
    vectors, mask, labels = truth(model, batch)
    fixed = torch.zeros_like(mask)
    fixed[:, 0] = True
    rng = torch.Generator().manual_seed(3)
    start = vectors + 0.5 * torch.randn((2, *vectors.shape[1:]), generator=rng)
    settings = {
        "start": start, "labels": labels.expand(2, *labels.shape[1:]),
        "learn": None, "steps": 12, "learning_rate": 0.02, "keep_best": False,
    }  # fmt: skip
    settings |= changed
    fixed = settings.pop("fixed", fixed)
    objective = Objective(seen, SquaredL2())
    steps = settings["steps"]
    descent = Descent(
        settings["start"], fixed | ~mask, settings["labels"], settings["learn"],
        Schedule(steps, settings["learning_rate"]),
    )  # fmt: skip
    found = minimize(descent, lambda v, y: objective(v, mask, y), steps, keep_best=settings["keep_best"], what="test")
    return found, settings | {"fixed": fixed, "mask": mask}, objective(found.embeddings, mask, found.labels).detach()


@pytest.mark.parametrize("family", FAMILIES)
def test_minimize_moves_only_free_slots_and_comes_nearer(load, family):
    model = load(family)
    batch = batch_of(model, sentences((4, 6), 1))
    found, how, again = run_minimize(model, batch)
    repeat, _, _ = run_minimize(model, batch)
    _, _, begin = run_minimize(model, batch, steps=0)
    assert torch.equal(found.embeddings, repeat.embeddings)
    still = how["fixed"] | ~how["mask"]
    assert torch.equal(found.embeddings[:, still], how["start"][:, still])
    assert bool((found.embeddings[:, ~still] != how["start"][:, ~still]).any(-1).all())
    torch.testing.assert_close(found.loss, again, rtol=1e-3, atol=1e-5)
    assert bool((found.loss < begin).all())
    assert found.evaluations == 26


def test_minimize_keeps_the_best_iterate_of_each_candidate(load):
    """One candidate starts at the truth, which Adam leaves at once; the other starts away and comes nearer."""
    model = load("bert")
    batch = batch_of(model, sentences((4, 6), 1))
    vectors = truth(model, batch)[0]
    noise = torch.randn(vectors.shape, generator=torch.Generator().manual_seed(0))
    how = {"start": torch.cat([vectors, vectors + 0.5 * noise]), "learning_rate": 0.02}
    iterates = torch.stack([run_minimize(model, batch, steps=n, **how)[0].loss for n in range(13)])
    best, _, again = run_minimize(model, batch, keep_best=True, **how)
    assert iterates.argmin(0).tolist() == [0, 12]
    torch.testing.assert_close(best.loss, iterates.min(0).values, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(best.loss, again, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(best.embeddings[:1], vectors)


@pytest.mark.parametrize("keep_best", [False, True])
def test_minimize_learns_labels_as_distributions(load, keep_best):
    model = load("bert", labels=3)
    batch = batch_of(model, sentences((4, 6), 1), [2, 0])
    rng = torch.Generator().manual_seed(0)
    start = truth(model, batch)[0].expand(2, -1, -1, -1)
    found, _, again = run_minimize(
        model, batch, start=start, fixed=batch.mask, labels=torch.randn(2, 2, 3, generator=rng), learn="softmax",
        steps=80, learning_rate=0.2, keep_best=keep_best,
    )  # fmt: skip
    torch.testing.assert_close(found.labels.sum(-1), torch.ones(2, 2))
    torch.testing.assert_close(found.loss, again, rtol=1e-3, atol=1e-5)
    assert found.labels.argmax(-1).tolist() == [[2, 0], [2, 0]]


@pytest.mark.parametrize("family", FAMILIES)
def test_sgd_change_is_read_as_a_gradient_and_others_are_refused(load, family):
    model = load(family)
    batch = batch_of(model, sentences((4, 6), 1))
    gradient = seen_of(Client(model), batch)
    seen = seen_of(Client(model, LocalTraining("sgd", 0.5)), batch)
    for name, value in as_gradient(seen).items():
        torch.testing.assert_close(value, gradient.tensors[name], rtol=1e-3, atol=1e-5)
    slow = seen_of(Client(doubled(model), LocalTraining("sgd", 1e-9, epochs=3, minibatch=1)), batch)
    for name, value in as_gradient(slow).items():  # 6 steps, each of one of the two sentences
        torch.testing.assert_close(value.float(), gradient.tensors[name], rtol=1e-3, atol=1e-5)
    for training, given in (
        (LocalTraining("adamw"), Given()),
        (LocalTraining("sgd"), Given(training=False)),
        (LocalTraining("sgd"), Given(batch_size=False)),
    ):
        with pytest.raises(NotSupportedError, match="that the client used plain SGD; steps of AdamW"):
            as_gradient(seen_of(Client(model, training), batch, given=given))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_word_table_is_left_out_and_nothing_else(load, family):
    model = load(family)
    seen = seen_of(Client(model), batch_of(model, sentences((4,), 1)))
    hidden = word_gradient_hidden(seen)
    assert hidden == model.group("word")
    with pytest.raises(NotSupportedError, match="nothing to match"):
        Objective(seen_of(Client(model), batch_of(model, ["river"]), "word"), SquaredL2())


@pytest.mark.parametrize("attack", ["tag", "dlg"])
@pytest.mark.parametrize(("start", "times"), [(1.0, 1.0), (0.25, 0.25), (0.0, None)])
def test_a_guess_starts_as_wide_as_it_is_told(load, monkeypatch, attack, start, times):
    model = load("bert")
    seen = seen_of(Client(model), batch_of(model, sentences((9, 9), 3)), given=Given(lengths=True))
    starts = []

    class Noted(Descent):
        def __init__(self, start, *rest):
            starts.append(start)
            super().__init__(start, *rest)

    monkeypatch.setattr(harness, "Descent", Noted)
    build("attack", attack, {"steps": 1, "start": start})(seen, stream(0, "attack"))
    free = starts[0][0, :, 1:-1]
    expected = float(model.word_vectors().std()) if times is None else times
    assert float(free.std()) == pytest.approx(expected, rel=0.1)


def test_nearest_tokens_are_by_angle_and_never_forbidden(load):
    table = load("bert").word_vectors()
    ids = torch.tensor([[5, 9, 30], [2, 2, 60]])
    scaled = table[ids] * torch.tensor([0.01, 1.0, 50.0])[None, :, None]
    assert torch.equal(nearest_tokens(scaled, table), ids)
    assert not set(nearest_tokens(scaled, table, [2, 9]).flatten().tolist()) & {2, 9}


@pytest.mark.parametrize("family", FAMILIES)
def test_layout_shows_what_is_known(load, family):
    model = load(family)
    batch = batch_of(model, sentences((3, 6), 1))
    seen = seen_of(Client(model), batch, given=Given(lengths=True))
    known = layout(seen, assumed_length=9)
    assert torch.equal(known.mask, batch.mask)
    assert torch.equal(known.ids[known.fixed], batch.ids[known.fixed])
    assert int(known.fixed.sum()) == 2 * len(model.special.prefix + model.special.suffix)
    assert list(map(list, known.sequences(batch.ids))) == batch.sequences()
    blind = seen_of(Client(model), batch)
    longest = int(batch.mask.sum(1).max()) if family != "llama" else None
    assert longest_position(blind) == longest, "the position table's gradient ends at the longest sentence"
    assert layout(blind, assumed_length=9).mask.sum(1).tolist() == [longest or 9] * 2
    hidden = replace(blind, tensors={"0.q": blind.role(0, "q")[0]}, views={})
    assert layout(hidden, assumed_length=9).mask.sum(1).tolist() == [9, 9]
    told = replace(hidden, knowledge=replace(hidden.knowledge, longest=7))
    assert layout(told, assumed_length=9).mask.sum(1).tolist() == [7, 7]
    both = replace(blind, knowledge=replace(blind.knowledge, longest=11))
    assert layout(both, assumed_length=9).mask.sum(1).tolist() == [11, 11], "what was given is surer than what is read"
    assert int(layout(hidden, assumed_length=9).fixed.sum()) == 2 * len(model.special.prefix)


def test_the_last_word_of_next_word_training_has_a_position_too(load):
    model = load("gpt2", "causal-lm")
    batch = batch_of(model, sentences((4, 6), 0))
    assert longest_position(seen_of(Client(model), batch)) == int(batch.mask.sum(1).max())


def test_noise_on_every_position_row_tells_no_length(load):
    model = load("bert")
    batch = batch_of(model, sentences((4, 6), 0))
    assert longest_position(seen_of(Client(model), batch)) == 8
    noisy = Client(model, defenses=(build("defense", "gaussian", {"sigma": 1e-6}),))
    assert longest_position(seen_of(noisy, batch)) is None
