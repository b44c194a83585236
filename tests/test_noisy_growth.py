"""Decoders under noise: all matrices of the first blocks together, and what no row space can tell by itself."""

from dataclasses import replace

import pytest
import torch

from gradaudit.client.client import Client
from gradaudit.leakage.rowspace.joint import joint, joint_residuals
from gradaudit.leakage.rowspace.noisy_growth import _chosen, _free, _limit, _lost_its_way
from gradaudit.leakage.rowspace.prefixes import Attended, leaf_values
from gradaudit.registry import build
from gradaudit.streams import stream
from tiny_models import DECODERS, batch_of, seen_of, sentences


def noisy(seen, rng, loud, quiet):
    """Noise on every gradient, in multiples of its root mean square: `loud` on q, k and v, `quiet` on the others."""
    ears = {view.parameter for layer in range(seen.model.depth) for r in "qkv" for view in seen.model.views(layer, r)}

    def one(name, value):
        size = loud if name in ears or seen.views[name].parameter in ears else quiet
        return value + size * value.square().mean().sqrt() * torch.randn(value.shape, generator=rng)

    return replace(seen, tensors={name: one(name, value) for name, value in seen.tensors.items()})


@pytest.mark.parametrize("sizes", [(5,), (4, 3)])
@pytest.mark.parametrize("family", DECODERS)
def test_a_decoder_is_read_though_q_k_and_v_are_all_noise(load, family, sizes):
    """The words too: block 0's q, k and v are what else tells them."""
    model = load(family, seed=1)
    batch = batch_of(model, sentences(sizes, 1))
    seen = noisy(seen_of(Client(model), batch), torch.Generator().manual_seed(0), 30.0, 1e-5)
    found = build("attack", "dager", {})(seen, stream(0, "attack"))
    assert sorted(found.sequences) == sorted(tuple(s) for s in batch.sequences())


@pytest.mark.parametrize("family", DECODERS)
def test_noise_alone_gives_no_word_of_the_batch_more_than_chance(load, family):
    model = load(family)
    batch = batch_of(model, sentences((6, 5), 1))
    seen = seen_of(Client(model), batch)
    rng = torch.Generator().manual_seed(0)
    nothing = replace(seen, tensors={n: 1e-3 * torch.randn(v.shape, generator=rng) for n, v in seen.tensors.items()})
    found = build("attack", "dager", {})(nothing, stream(0, "attack"))
    assert not set(found.sequences) & {tuple(s) for s in batch.sequences()}
    right = sum(
        a == b for s, t in zip(batch.sequences(), found.sequences, strict=False) for a, b in zip(s, t, strict=False)
    )
    assert right <= 2


@pytest.mark.parametrize("family", DECODERS)
def test_the_joint_residual_is_the_geometric_mean_and_odd_ranks_are_left_out(load, family):
    model = load(family)
    batch = batch_of(model, sentences((5, 4), 2))
    seen = noisy(seen_of(Client(model), batch), torch.Generator().manual_seed(0), 1e-5, 1e-5)
    both = joint(seen)
    assert both.words is not None
    assert abs(both.rank - batch.tokens) <= 1
    prefixes, words = torch.tensor([batch.sequences()[0][:2], batch.sequences()[1][:2]]), torch.arange(20)
    attended = Attended(model, 2)
    found = joint_residuals(attended, both.spans, prefixes, words)
    each = [leaf_values(attended, prefixes, words, [((s.layer, s.roles[0]), s.residual)])[0] for s in both.spans]
    wanted = torch.stack(each).double().clamp_min(1e-7).prod(0) ** (1 / len(each))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-7)
    loud = joint(noisy(seen, torch.Generator().manual_seed(1), 30.0, 0.0))
    assert {s.roles for s in loud.spans} <= {("o",), ("f",), ("p",)}


@pytest.mark.parametrize("family", DECODERS)
def test_a_matrix_of_far_more_directions_than_the_others_is_left_out(load, family):
    """As integers of one scale leave them: few large entries, no noise's spectrum, and directions that no row made."""
    model = load(family)
    whole = seen_of(Client(model), batch_of(model, sentences((5, 4), 2)))
    seen = noisy(whole, torch.Generator().manual_seed(0), 1e-5, 1e-5)
    rng = torch.Generator().manual_seed(1)
    ears = {view.parameter for layer in range(model.depth) for r in "qkv" for view in model.views(layer, r)}

    basis = torch.randn((3 * model.width // 4, model.width), generator=rng)

    def full(value):
        turned = family == "gpt2"  # its matrices are [in, out]
        made = torch.randn((value.shape[turned], len(basis)), generator=rng) @ basis
        made += 1e-4 * torch.randn(made.shape, generator=rng)
        return made.T if turned else made

    made = {n: full(v) for n, v in seen.tensors.items() if v.ndim == 2 and seen.views[n].parameter in ears}
    odd = replace(seen, tensors={**seen.tensors, **made})
    assert {s.roles for s in joint(seen).spans} > {("o",), ("f",), ("p",)}
    found = joint(odd)
    assert found.words is None
    assert {s.roles for s in found.spans} == {("o",), ("f",), ("p",)}


def test_a_prefix_that_speaks_against_itself_for_six_rows_has_ended():
    true, doubtful = [2.0] * 6, [0.5] * 6
    below = torch.tensor([[*true, *doubtful], [*true, *true]])
    along = 0.1 * (-below).exp()
    along[0, 6:] = 0.02  # not three times as far as true rows: distances alone would not tell
    assert _lost_its_way(along, below).tolist() == [True, False]
    assert _lost_its_way(along[:, :-1], below[:, :-1]).tolist() == [False, False]


def test_the_limit_is_in_the_last_clear_gap_and_above_all_where_none_is():
    wrong = torch.linspace(0.2, 0.9, 60)
    limit, most = _limit(torch.cat([torch.tensor([1e-4, 9e-3, 1e-2]), wrong]), 3)
    assert 1e-2 < limit < 0.2, "true rows a hundred times apart are all true"
    assert most > limit
    limit, most = _limit(torch.cat([torch.tensor([1e-3, 5e-3, 0.05, 0.1]), wrong]), 3)
    assert limit == most, "a gap between true rows alone ends no sentence"
    limit, most = _limit(torch.cat([torch.tensor([0.12, 0.13]), wrong]), 2)
    assert limit == most > 0.13, "no gap: the nearest few go on, and what follows them tells"


def test_sentences_are_chosen_by_what_they_alone_explain():
    long, branch, short = tuple(range(9)), (*range(8), 77, 78), (50, 51, 52)
    margins = {long: [2.0] * 9, branch: [2.0] * 8 + [0.8, 0.9], short: [1.5] * 3}
    paths = {s: [0.01] * len(s) for s in margins}
    assert _chosen(paths, margins, 2) == [long, short], "the branch is longer than the short one, and not its own"
    assert _chosen(paths, margins, 1) == [long]
    weak = {(90, 91): [0.2, 0.3]}
    assert _chosen(paths | weak, margins | weak, 9) == [long, short, branch], "what wrong rows reach too is no sentence"


def test_first_and_last_tokens_again_tell_nothing_without_positions(load):
    prefixes, words = torch.tensor([[5, 6], [7, 7]]), torch.tensor([5, 6, 7])
    assert _free(load("llama"), prefixes, words).tolist() == [[True, True, False], [False, False, True]]
    assert not bool(_free(load("gpt2"), prefixes, words).any())
    assert not bool(_free(load("llama"), prefixes[:, :0], words).any())
