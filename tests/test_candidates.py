"""Discrete search of the matching family: against plain loops over whole-batch gradients, and the truth."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import save_file

from gradaudit.attacks import lamp
from gradaudit.attacks.grab import Grab
from gradaudit.attacks.lamp import Lamp, edit, surprises
from gradaudit.client.client import Client
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.leakage.matching.beams import BeamSearch, ended, moves
from gradaudit.leakage.matching.candidates import Candidates, permutations, reordered
from gradaudit.leakage.matching.descent import Descent
from gradaudit.leakage.matching.distances import L2, Cosine, Normalized, OnSupport, SquaredL2
from gradaudit.leakage.matching.factored import Observed, Product, gradient, of_products, rank_of_products
from gradaudit.leakage.matching.layout import Layout, layout
from gradaudit.leakage.matching.masks import Masks
from gradaudit.leakage.matching.objective import Objective
from gradaudit.leakage.matching.screening import Heat
from gradaudit.leakage.matching.start import frame_of
from gradaudit.models.taps import _tap
from gradaudit.progress import TimeIsOverError, within
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Given
from gradaudit.workspace import keep, kept, kept_in, learned, learned_in
from tiny_models import batch_of, doubled, made_by, seen_of, sentences, summed

KNOWN = Given(labels=True, lengths=True)


def scene(load, family: str = "bert", sizes: tuple[int, ...] = (4, 5), **how):
    model = load(family)
    batch = batch_of(model, sentences(sizes, 1), [0, 1, 0][: len(sizes)])
    seen = seen_of(Client(model), batch, given=KNOWN)
    frame = layout(seen, 16)
    assert batch.labels is not None
    return model, batch, seen, Candidates(Objective(seen, L2()), frame, batch.labels, **how)


def test_orders_are_permutations_of_the_free_slots_alone(load):
    _, _, _, of = scene(load)
    still = of.frame.fixed | ~of.frame.mask
    order = permutations(still, 50, torch.Generator().manual_seed(0))
    places = torch.arange(still.shape[1])
    assert torch.equal(order.sort(-1).values, places.expand_as(order))
    assert torch.equal(order[:, still], places.expand_as(still)[still].expand(50, -1))
    assert len(torch.unique(order, dim=0)) > 10
    values = torch.randn(*still.shape, 3)
    moved = reordered(values, order)
    assert torch.equal(moved[7, 1, 2], values[1, order[7, 1, 2]])


def test_the_ranking_of_many_guesses_ends_with_the_time(load):
    model, _, _, of = scene(load)
    vectors = torch.zeros(3, *of.frame.mask.shape, model.width)
    with within(0.0), pytest.raises(TimeIsOverError, match="ranking of guesses"):
        of.best(vectors, 1)
    of.best(vectors, 1)  # and no longer outside
    with within(100.0), within(0.0), pytest.raises(TimeIsOverError):
        of.best(vectors, 1)
    with within(0.0), within(100.0), pytest.raises(TimeIsOverError):
        of.best(vectors, 1)


@pytest.mark.parametrize("screen", [1, 4])
def test_the_best_of_many_is_what_a_plain_loop_finds(load, screen):
    model, batch, seen, of = scene(load, screen=screen)
    table = model.word_vectors()
    rng = torch.Generator().manual_seed(0)
    some = table[batch.ids] + torch.rand(60, 1, 1, 1, generator=rng) * torch.randn(
        (60, *batch.ids.shape, table.shape[1]), generator=rng
    )
    kept, values = of.best(some, 3)
    objective = Objective(seen, L2())
    with torch.no_grad():
        every = torch.stack([objective(one[None], of.frame.mask, of.labels[None])[0] for one in some])
    assert int(kept[0]) == int(every.argmin())
    torch.testing.assert_close(values, every[kept], rtol=1e-4, atol=1e-5)
    assert of.evaluations == 60


def test_under_several_masks_a_guess_counts_the_mean_of_its_distances(load):
    model, batch, _, of = scene(load)
    draws = [Masks(2, torch.Generator().manual_seed(n), learn=False) for n in range(2)]
    of.masks = tuple(draws)
    some = model.word_vectors()[batch.ids] + torch.randn(
        (3, *batch.ids.shape, model.width), generator=torch.Generator()
    )
    found = of.measure(some)
    with torch.no_grad():
        each = [of.objective(some, batch.mask, batch.labels.expand(3, 2), masks) for masks in draws]
    torch.testing.assert_close(found, (each[0] + each[1]) / 2)
    assert float((each[0] - each[1]).abs().min()) > 0
    assert of.evaluations == 6


def test_an_estimate_from_some_rows_is_right_where_rows_repeat():
    """Outer products whose rows come in fours are known from every fourth row."""
    rng = torch.Generator().manual_seed(0)
    slope, read = torch.randn((2, 3, 5), generator=rng).repeat_interleave(4, -1), torch.randn((2, 3, 6), generator=rng)
    target = torch.randn((5, 6), generator=rng).repeat_interleave(4, 0)
    for distance in (L2(), SquaredL2(0.01), Cosine(), Normalized(L2()), OnSupport(L2())):
        offset = -target if distance.differs else None
        observed = Observed(target, offset, target.square().sum())
        whole = of_products([Product(slope, read, observed)], distance)
        some = of_products([Product(slope[..., ::4], read, observed.thinned(4))], distance, 4)
        torch.testing.assert_close(some, whole)


def test_a_padding_row_of_a_table_gets_no_gradient():
    """The oracle is torch's own embedding with a padding index."""
    table = torch.nn.Embedding(5, 3, padding_idx=1)
    table.weight.data.normal_(generator=torch.Generator().manual_seed(0))
    ids = torch.tensor([[1, 4, 2, 4], [0, 1, 1, 3]])
    tap = _tap(table, "weight", ids, written := table(ids), 2)
    weights = torch.randn(written.shape, generator=torch.Generator().manual_seed(1))
    (right,) = torch.autograd.grad((weights * written).sum(), table.weight)
    assert tap is not None
    torch.testing.assert_close(gradient(tap.how, weights, tap.read, table.weight.shape).sum(0), right)
    assert float(right[1].abs().sum()) == 0


@pytest.mark.parametrize("distance", [L2(0.0), SquaredL2(), Cosine()])
@pytest.mark.parametrize("offset", [False, True])
def test_inner_products_of_factors_give_the_distance_of_what_they_make(distance, offset):
    """The oracle writes the matrices out."""
    rng = torch.Generator().manual_seed(0)
    slope, read, target, other = (torch.randn(s, generator=rng) for s in ((4, 3, 5), (4, 3, 6), (5, 6), (5, 6)))
    added = (-target if distance.differs else torch.zeros(5, 6)) + (other if offset else 0)
    shown = slope.mT @ read + (other if offset else 0)
    observed = Observed(target, added if distance.differs or offset else None, target.square().sum())
    found = rank_of_products([Product(slope, read, observed)], distance)
    torch.testing.assert_close(found, summed(distance, [shown], [target]))


class Loop(L2):
    """A distance that has to be measured by entries."""

    def rough(self) -> None:
        return None


@pytest.mark.parametrize("distance", [L2(0.0), L2(), Loop(), Normalized(L2())])
@pytest.mark.parametrize("together", [0, 20])
@pytest.mark.parametrize("alone", [False, True])
@pytest.mark.parametrize("draws", [1, 2])
def test_a_ranking_measures_the_best_in_full_and_no_other(load, distance, together, alone, draws):
    """Guesses at rising distances from the truth: what ranks them, on few rows here, finds one of the nearest four."""
    # guesses this far off differ by less than float32 can tell
    model, batch, seen, of = scene(lambda *how, **more: doubled(load(*how, **more)), sizes=(4, 5), screen=2)
    if isinstance(distance, Normalized):  # it is for clients that did so
        seen = replace(seen, tensors={n: t / t.norm() for n, t in seen.tensors.items()})
    of.objective, of.together = Objective(seen, distance), together
    of.masks = tuple(Masks(2, torch.Generator().manual_seed(n)) for n in range(draws))
    rows = slice(0, 1) if alone else slice(0, 2)
    size = torch.linspace(0.005, 0.1, 40)[torch.randperm(40, generator=stream(0, "order"))].view(-1, 1, 1, 1)
    away = torch.randn(batch.ids.shape + model.word_vectors().shape[1:], generator=stream(0, "guess"))
    some = model.word_vectors()[batch.ids] + size * away
    whole = of.measure(some)  # draws the masks, and is the oracle for guesses of whole batches
    given = {}
    if alone:
        rest = torch.tensor([1])
        others = (model.word_vectors()[batch.ids[rest]], batch.mask[rest], batch.labels[rest])
        base = of.objective.base(*others, of.masks[0].only(rest), 2)
        of.masks = of.masks[:1]  # the others' part is known under one
        given = {"row": 0, "beside": [(base, torch.arange(40))]}
        whole = of.measure(some[:, rows], **given)
    of.evaluations = 0
    found = of.measure(some[:, rows], keep=2, **given)
    assert of.evaluations == 40 * len(of.masks)
    first, *later = torch.arange(40).split(together or 40)
    measured = torch.where(found.isfinite())[0]
    assert int(found[first].isfinite().sum()) == 2
    assert len(measured) <= 2 * (1 + len(later))
    assert set(whole.argsort()[:4].tolist()) & set(measured.tolist())
    torch.testing.assert_close(found[measured], whole[measured])


def test_who_goes_on_is_among_the_best_so_far():
    values = torch.tensor([5.0, 3.0, 9.0, 4.0, 1.0, 6.0, 3.5])
    heat = Heat(2)
    assert not heat.begun
    assert [heat.among(part).tolist() for part in values.split(3)] == [[0, 1], [1], []]  # 5 and 3, 1, none
    assert heat.begun


@pytest.mark.parametrize("together", [0, 7])
@pytest.mark.parametrize("keep", [0, 3])
def test_guesses_beside_different_others_are_measured_together(load, together, keep):
    """The oracle measures each guess's whole batch; what the others add differs from guess to guess."""
    model, batch, seen, of = scene(lambda *how, **more: doubled(load(*how, **more)), sizes=(4, 5), screen=2)
    of.objective, of.together = Objective(seen, L2()), together
    of.masks, table = (Masks(2, torch.Generator().manual_seed(0)),), model.word_vectors()
    rng, counts, rest = torch.Generator().manual_seed(1), (13, 4, 8), torch.tensor([1])
    size = torch.linspace(0.005, 0.1, sum(counts), dtype=table.dtype)[torch.randperm(sum(counts), generator=rng)]
    some = table[batch.ids].repeat(sum(counts), 1, 1, 1)
    some[:, 0] += size.view(-1, 1, 1) * torch.randn(some[0, 0].shape, generator=rng, dtype=table.dtype)
    of.measure(some[:1])  # draws the masks
    beside, start = [], 0
    for count in counts:
        some[start : start + count, 1] += torch.randn(some[0, 1].shape, generator=rng, dtype=table.dtype)
        one = (some[start, rest], batch.mask[rest], batch.labels[rest])
        beside.append((of.objective.base(*one, of.masks[0].only(rest), 2), torch.arange(start, start + count)))
        start += count
    whole = of.measure(some)
    found = of.measure(some[:, :1], row=0, beside=beside, keep=keep)
    measured = found.isfinite()
    torch.testing.assert_close(found[measured], whole[measured])
    if not keep:
        assert bool(measured.all())
        return
    assert keep <= int(measured.sum()) < sum(counts)
    assert int(whole.argmin()) in torch.where(measured)[0].tolist()


@pytest.mark.parametrize("together", [0, 3])
def test_one_sentence_beside_several_others_takes_one_pass(load, together):
    """The oracle measures whole batches; indices may repeat, be scattered, and fall into different passes."""
    model, batch, seen, of = scene(lambda *how, **more: doubled(load(*how, **more)), sizes=(4, 5), screen=1)
    of.objective, of.together, of.masks = Objective(seen, L2()), together, (None,)
    table, rng, rest = model.word_vectors(), torch.Generator().manual_seed(1), torch.tensor([1])
    firsts = table[batch.ids[0]] + 0.05 * torch.randn((5, *batch.ids[0].shape, model.width), generator=rng).to(table)
    others = table[batch.ids[1]] + 0.05 * torch.randn((2, *batch.ids[1].shape, model.width), generator=rng).to(table)
    which = (torch.tensor([0, 1, 2, 3, 4]), torch.tensor([4, 0, 2]))
    beside, pairs = [], []
    for other, some in zip(others, which, strict=True):
        beside.append((of.objective.base(other[None], batch.mask[rest], batch.labels[rest], None, 2), some))
        pairs += [torch.stack([firsts[n], other]) for n in some]
    whole = of.measure(torch.stack(pairs))
    of.evaluations = 0
    found = of.measure(firsts[:, None], row=0, beside=beside)
    torch.testing.assert_close(found, whole)
    assert of.evaluations == 8


def test_what_is_left_out_of_the_last_block_changes_no_gradient(load):
    """The oracle is autograd through the model as it is, over all of its rows."""
    for family in ("bert", "roberta", "mpnet"):
        model, batch, seen, of = scene(load, family)
        made = made_by(of.objective, model.word_vectors()[batch.ids], batch.mask, batch.labels)
        loss = model.loss(ids=batch.ids, mask=batch.mask, labels=batch.labels)
        names = [n for n, view in seen.views.items() if n in made and view.name == view.parameter]
        right = torch.autograd.grad(loss, [model.parameters()[n] for n in names])
        assert len(names) > 20
        for name, gradient_of in zip(names, right, strict=True):
            torch.testing.assert_close(made[name].view_as(gradient_of), gradient_of, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("dropout", [False, True])
@pytest.mark.parametrize("anew", [False, True])
def test_beam_search_finds_the_best_of_all_texts_where_it_keeps_all(load, anew, dropout):
    """A beam as wide as the number of texts is exhaustive: the oracle is a loop over all of them."""
    model, batch, seen, of = scene(load, sizes=(2, 2), screen=1)
    if dropout:
        of.masks = (Masks(2, torch.Generator().manual_seed(0)),)
    pools = [row[1:3].tolist() for row in batch.ids]
    search = BeamSearch(of, model.word_vectors(), model.special, anew=anew)
    start = batch.ids.clone()
    start[:, 1:3] = batch.ids[:, [2, 1]]
    found = search.run([start], pools, 1, 64)
    objective, losses = Objective(seen, L2()), {}
    for words in itertools.product(*(itertools.product(pool, repeat=2) for pool in pools)):
        ids = batch.ids.clone()
        ids[:, 1:3] = torch.tensor(words)
        with torch.no_grad():
            vectors = model.word_vectors()[ids][None]
            losses[words] = float(objective(vectors, of.frame.mask, of.labels[None], of.masks[0])[0])
    best = min(losses, key=lambda w: losses[w])
    assert found.ids[:, 1:3].tolist() == [list(w) for w in best]
    # norms come as differences of squares, so rounding at the truth goes by its root, on every processor another way
    rounding = torch.finfo(torch.float32).eps ** 0.5 * sum(float(g.norm()) for g in seen.tensors.values())
    assert rounding < 0.05 * max(losses.values())
    assert found.loss == pytest.approx(losses[best], rel=1e-3, abs=rounding)
    if not dropout:
        assert torch.equal(found.ids, batch.ids)


def test_a_search_that_computes_one_sentence_anew_is_the_search_that_computes_all(load):
    outcomes = []
    for anew in (False, True):
        model, batch, _, of = scene(load, sizes=(4, 5, 3), screen=1)
        pools = [[*row[1:4].tolist(), 7] for row in batch.ids]
        search = BeamSearch(of, model.word_vectors(), model.special, anew=anew)
        outcomes.append(search.run([batch.ids.flip(1).where(~of.frame.fixed, batch.ids)], pools, 2, 3))
    assert torch.equal(outcomes[0].ids, outcomes[1].ids)
    assert outcomes[0].loss == pytest.approx(outcomes[1].loss, rel=1e-3)


def test_padding_in_a_free_slot_ends_the_sentence(load):
    model, batch, _, of = scene(load, sizes=(5,))
    ids = batch.ids.clone()
    ids[0, 3] = model.special.pad
    assert of.lengths_of(ids, model.special.pad)[0].tolist() == [True] * 3 + [False] * (ids.shape[1] - 3)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_with_unknown_lengths_the_search_finds_where_sentences_end(load, family):
    """From the right words and wrong lengths to the truth: a word for an end, and an end for a word."""
    model = load(family)
    batch = batch_of(model, sentences((5, 3), 1), [0, 1])
    seen = seen_of(Client(model), batch)
    longest = int(batch.mask.sum(1).max())
    frame = layout(seen, longest)
    assert batch.labels is not None
    of = Candidates(Objective(seen, L2()), frame, batch.labels, screen=1)
    special = model.special
    before = len(special.prefix)
    pools = [[*model.content(row[keep].tolist()), special.pad] for row, keep in zip(batch.ids, batch.mask, strict=True)]
    start = frame.ids.clone()
    for row, pool in enumerate(pools):
        words = (pool[:-1] * longest)[: longest - before]
        start[row, before:] = torch.tensor(words)
    start = ended(start, frame, special)
    assert torch.equal(ended(start, frame, special), start)
    found = BeamSearch(of, model.word_vectors(), special, open_ended=True).run([start], pools, 5, 8)
    mask = of.lengths_of(found.ids, special.pad)
    texts = [row[keep].tolist() for row, keep in zip(found.ids, mask, strict=True)]
    right = [row[keep].tolist() for row, keep in zip(batch.ids, batch.mask, strict=True)]
    assert [sorted(t) for t in texts] == [sorted(t) for t in right]  # words and lengths; two words may stay exchanged
    assert texts[0] == right[0]


def test_a_guess_has_one_form_however_it_is_written(load):
    model, batch, _, of = scene(load, sizes=(5,))
    special = model.special
    open_frame = Layout(of.frame.ids, of.frame.mask, of.frame.fixed.clone().index_fill_(1, torch.tensor([6]), False))
    one, other = batch.ids.clone(), batch.ids.clone()
    one[0, 3] = other[0, 3] = special.pad
    other[0, 4:] = 9
    closed = ended(one, open_frame, special)
    assert torch.equal(closed, ended(other, open_frame, special))
    assert closed[0].tolist() == [*batch.ids[0, :3].tolist(), *special.suffix, *[special.pad] * 3]
    whole = ended(batch.ids, open_frame, special)
    assert torch.equal(whole, batch.ids)


@pytest.mark.parametrize("family", ["bert", "gpt2", "llama"])
def test_grab_answers_without_lengths(load, family):
    model = load(family)
    batch = batch_of(model, sentences((4, 3), 3), [1, 0])
    attack = Grab(rounds=2, steps=20, starts=5, permutations=5, passes=2)
    found = attack(seen_of(Client(model), batch), stream(0, "attack"))
    for sentence in found.sequences:
        assert sentence[: len(model.special.prefix)] == model.special.prefix
        if model.special.suffix:
            assert sentence[-1:] == model.special.suffix
        assert model.content(list(sentence))


def test_two_defenses_are_undone_in_their_order(load):
    model = load("bert")
    batch = batch_of(model, sentences((4,), 1))
    noise, pruning = build("defense", "normalized-gaussian", {"sigma": 1e-9}), build("defense", "random-pruning", {})
    for defenses in ((noise, pruning), (pruning, noise)):
        distance = Grab().distance(seen_of(Client(model, defenses=defenses), batch))
        assert isinstance(distance, Normalized)
        assert isinstance(distance.inner, OnSupport)
    with pytest.raises(ValueError, match="before norms are taken"):
        OnSupport(Normalized(L2()))


def test_lamp_s_language_model_reads_words_and_no_special_tokens(load, folders, monkeypatch):
    model = load("bert")
    batch = batch_of(model, sentences((4,), 1), [1])
    read: list[str] = []
    monkeypatch.setattr(lamp, "surprises", lambda prior, texts: read.extend(texts) or torch.zeros(len(texts)))
    monkeypatch.setattr(lamp, "load_model", lambda spec, device: model)
    attack = Lamp(steps=10, starts=2, permutations=2, edits=3, every=5, prior="any")
    attack(seen_of(Client(model), batch, given=KNOWN), stream(0, "attack"))
    assert read
    assert all(len(text.split()) == 4 for text in read)


def test_moves_are_all_exchanges_all_words_put_elsewhere_and_all_turns():
    found = moves([3, 5, 6, 8])
    assert all(sorted(order) == [3, 5, 6, 8] for order in found)
    assert len({tuple(order) for order in found}) == len(found)
    exchanges = [[5, 3, 6, 8], [8, 5, 6, 3]]
    puts = [[5, 6, 8, 3], [8, 3, 5, 6], [5, 6, 3, 8]]
    assert all(order in found for order in [*exchanges, *puts, [6, 8, 3, 5]])
    assert [3, 5, 6, 8] not in found
    assert moves([4]) == moves([]) == []


def test_moves_put_right_words_in_order_where_tokens_alone_cannot(load):
    model, batch, _, of = scene(load, sizes=(5, 4))
    turned = batch.ids.clone()
    turned[0, 1:6] = batch.ids[0, [3, 4, 5, 2, 1]]
    turned[1, 1:5] = batch.ids[1, [2, 1, 3, 4]]
    ends = []
    for by_moves in (False, True):
        search = BeamSearch(of, model.word_vectors(), model.special, moves=by_moves)
        ends.append(search.run([turned], [[], []], 3, 2))
    assert torch.equal(ends[0].ids, turned)
    assert torch.equal(ends[1].ids, batch.ids)


def test_edits_are_orders_and_every_kind_occurs():
    rng, seen = torch.Generator().manual_seed(0), set()
    for _ in range(200):
        order = edit([1, 2, 3, 4], rng)
        assert sorted(order) == [1, 2, 3, 4]
        seen.add(tuple(order))
    assert {(2, 1, 3, 4), (2, 3, 4, 1), (3, 4, 1, 2), (4, 1, 2, 3), (4, 2, 3, 1)} <= seen


@pytest.mark.parametrize(("family", "masks"), [("roberta", False), ("gpt2", False), ("gpt2", True)])
def test_grab_reads_a_short_sentence_and_not_another(load, family, masks):
    """The swap control: an attack on one batch's update does not find another batch's words."""
    model = load(family)
    batch, other = batch_of(model, sentences((3,), 3), [1]), batch_of(model, sentences((3,), 8), [0])
    attack = Grab(rounds=2, steps=300, learning_rate=0.02, starts=40, permutations=20, decay=0.7)
    found = attack(seen_of(Client(model, dropout=masks), batch, given=KNOWN), stream(0, "attack"))
    words, mine = set(model.content(found.sequences[0])), set(model.content(batch.ids[0].tolist()))
    assert len(words & mine) >= (2 if masks else 3)
    assert not words & (set(model.content(other.ids[0].tolist())) - mine)
    assert ("mask_sites" in found.details) == masks
    if not masks:
        assert list(found.sequences[0]) == batch.ids[0].tolist()


class KilledError(Exception):
    pass


@pytest.mark.parametrize(
    ("dropout", "ours"),
    [
        (False, {}),
        (True, {}),
        (True, {"restart_masks": True}),
        (True, {"score_masks": 2}),
        (True, {"refit": 2, "refit_steps": 3, "moves": True}),
    ],
)
def test_a_killed_run_goes_on_from_its_last_round_to_the_same_answer(load, tmp_path, monkeypatch, dropout, ours):
    model = load("roberta")
    batch = batch_of(model, sentences((4, 3), 3), [1, 0])
    seen = seen_of(Client(model, dropout=dropout), batch, given=Given(lengths=True))  # labels are learned on the way
    attack = Grab(rounds=3, steps=25, starts=10, permutations=10, **ours)
    whole = attack(seen, stream(0, "attack"))
    assert whole.details["rounds"] > 1, "the test needs a run of several rounds"
    place = tmp_path / "unfinished" / "0.safetensors"
    steps = 0
    step_of = Descent.step

    def killed(self, loss, **how):
        nonlocal steps
        if self._how.steps == 25:  # not those that fit masks to a text
            steps += 1
        if steps == 35:
            raise KilledError
        return step_of(self, loss, **how)

    monkeypatch.setattr(Descent, "step", killed)
    with pytest.raises(KilledError), kept_in(place):
        attack(seen, stream(0, "attack"))
    assert place.stat().st_mode & 0o077 == 0, "it may hold recovered text"
    monkeypatch.setattr(Descent, "step", step_of)
    with kept_in(place):
        rest = attack(seen, stream(0, "attack"))
    assert rest.sequences == whole.sequences
    assert rest.labels == whole.labels
    assert rest.details == whole.details
    assert rest.notes[0].startswith("taken up again after round 1")
    assert not place.parent.exists()


def test_a_broken_state_is_begun_anew(tmp_path):
    place = tmp_path / "0.safetensors"
    place.write_bytes(b"12345")
    with kept_in(place):
        assert kept() == {}
        keep({"round": torch.tensor(2)})
        found = kept()
        assert found is not None
        assert int(found["round"]) == 2
        whole = place.read_bytes()
        place.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        assert kept() == {}, "one bit is another round"
    assert not place.exists()
    keep({"round": torch.tensor(2)})  # no one asked for it
    assert kept() is None


def test_grab_begins_anew_where_what_it_kept_is_damaged_and_says_so(load, tmp_path):
    model = load("roberta")
    seen = seen_of(Client(model), batch_of(model, sentences((3,), 3), [1]), given=KNOWN)
    attack, place = Grab(rounds=1, steps=2, starts=2, permutations=2), tmp_path / "0.safetensors"
    save_file({"round": torch.tensor(1)}, place)
    with kept_in(place):
        found = attack(seen, stream(0, "attack"))
    assert "damaged" in found.notes[0]
    assert found.sequences == attack(seen, stream(0, "attack")).sequences


def test_a_full_disk_stops_no_attack_that_keeps_its_state(tmp_path, monkeypatch):
    def full(*_, **__):
        raise SafetensorError("I/O error: No space left on device")

    monkeypatch.setattr("gradaudit.workspace.save_file", full)
    with kept_in(tmp_path / "unfinished" / "0.safetensors"):
        keep({"round": torch.tensor(2)})
        assert kept() is None
    with learned_in(tmp_path):
        assert float(learned("a", {"x": ()}, lambda: {"x": torch.tensor(1.0)})["x"]) == 1.0


def test_lamp_reads_a_short_sentence(load):
    model = load("roberta")
    batch = batch_of(model, sentences((3,), 3), [1])
    attack = Lamp(steps=300, learning_rate=0.03, starts=40, permutations=20, edits=10, every=20, decay=0.8)
    found = attack(seen_of(Client(model), batch, given=KNOWN), stream(0, "attack"))
    assert list(found.sequences[0]) == batch.ids[0].tolist()


def test_grab_takes_the_counter_it_was_told_of(load):
    model = load("bert")
    batch = batch_of(model, sentences((3,), 1))
    for name, fields, kind in (
        ("normalized-gaussian", {"sigma": 0.01}, Normalized),
        ("random-pruning", {"rate": 0.5}, OnSupport),
        ("topk", {"keep": 0.5}, OnSupport),
        ("gaussian", {"sigma": 0.01}, L2),
    ):
        seen = seen_of(Client(model, defenses=(build("defense", name, fields),)), batch)
        assert type(Grab().distance(seen)) is kind
        assert type(Grab(counter=False).distance(seen)) is L2
    signed = seen_of(Client(model, defenses=(build("defense", "sign", {}),)), batch)
    with pytest.raises(NotSupportedError, match="no counter to sign"):
        Grab().distance(signed)


@pytest.mark.parametrize(
    ("family", "name", "fields"),
    [("bert", "normalized-gaussian", {"sigma": 1e-9}), ("bert", "random-pruning", {"rate": 0.6})],
)
def test_with_the_counter_the_truth_explains_a_defended_update(load, family, name, fields):
    model = load(family)
    batch = batch_of(model, sentences((4,), 1))
    seen = seen_of(Client(model, defenses=(build("defense", name, fields),)), batch)
    assert batch.labels is not None
    vectors = model.word_vectors()[batch.ids][None]
    for counter, low in ((True, True), (False, False)):
        objective = Objective(seen, Grab(counter=counter).distance(seen))
        with torch.no_grad():
            value = float(objective(vectors, batch.mask, batch.labels[None])[0])
        assert (value < 1e-2) == low


def test_masks_can_start_over(load):
    masks = Masks(1, torch.Generator().manual_seed(0))
    model, batch, seen, _ = scene(load, sizes=(4,))
    assert batch.labels is not None
    with torch.no_grad():
        Objective(seen, L2())(model.word_vectors()[batch.ids][None], batch.mask, batch.labels[None], masks)
    before = [m.detach().clone() for m in masks.variables()]
    masks.restart(0.5)
    assert all(set(m.detach().unique().tolist()) <= {0.0, 1.0} for m in masks.variables())
    assert any(not torch.equal(a, b) for a, b in zip(before, masks.variables(), strict=True))
    assert float(torch.cat([m.detach().flatten() for m in masks.variables()]).mean()) == pytest.approx(0.5, abs=0.1)


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_a_language_model_judges_many_texts_as_it_does_each_alone(load, family):
    model = load(family, "causal-lm")
    texts = sentences((6, 3, 1, 9), 1)
    texts = [texts[0], "", texts[1], texts[0], *texts[2:]]
    found = surprises(model, texts)
    for text, value in zip(texts, found.tolist(), strict=True):
        ids = torch.tensor([model.encode(text)[0]], dtype=torch.long)
        if ids.shape[1] < 2:
            assert value == 0
            continue
        each = F.cross_entropy(model.logits(ids=ids, mask=torch.ones_like(ids))[0, :-1], ids[0, 1:])
        assert value == pytest.approx(float(each.detach()), rel=1e-5)
    assert found[0] == found[3]


def test_lamp_s_language_model_decides_among_orders_that_the_gradient_cannot_tell(load, monkeypatch):
    """With all weight on the prior, the edit whose text it likes best is taken."""
    model = load("bert")
    batch = batch_of(model, sentences((4,), 1), [1])
    right = model.decode(batch.sequences()[0])
    monkeypatch.setattr(
        lamp, "surprises", lambda prior, texts: torch.tensor([0.0 if text == right else 1.0 for text in texts])
    )
    attack = Lamp(steps=1, prior="any", prior_weight=1e6, edits=60)
    seen = seen_of(Client(model), batch, given=KNOWN)
    frame = frame_of(seen, 16)
    of = Candidates(Objective(seen, Cosine()), frame, batch.labels)
    turned = batch.ids.clone()
    turned[0, 1:5] = batch.ids[0, [2, 1, 3, 4]]
    found = attack._edited(of, model.word_vectors()[turned], model, stream(0, "edits"))
    assert torch.equal(found, model.word_vectors()[batch.ids])


def test_lamp_refuses_a_language_model_that_was_never_trained():
    with pytest.raises(BadInputError, match="random weights and knows no language"):
        Lamp(prior="random:gpt2")


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("grab", {"rounds": 0}, "rounds must be at least 1"),
        ("grab", {"pool": "all"}, "pool must be one of"),
        ("grab", {"steps": -1}, "steps must be at least 0"),
        ("lamp", {"distance": "l3"}, "distance must be"),
        ("lamp", {"every": 0}, "every must be at least 1"),
        ("lamp", {"norm": -1.0}, "norm must be at least 0"),
        ("lamp", {"norm": float("nan")}, "norm must be at least 0"),
        ("lamp", {"silent": -1.0}, "silent must be at least 0"),
        ("dlg", {"optimizer": "sgd"}, "optimizer must be one of adam, lbfgs"),
        ("dlg", {"optimizer": "lbfgs", "keep_best": True}, "the last point is returned"),
        ("tag", {"restarts": 0}, "restarts must be at least 1"),
    ],
)
def test_settings_without_sense_are_refused(name, fields, said):
    with pytest.raises(BadInputError, match=said):
        build("attack", name, fields)
