"""Growing prefixes: many candidates run as leaves of one tree must equal each one run alone."""

from __future__ import annotations

import pytest
import torch

from gradaudit.leakage.rowspace import prefixes as prefixes_module
from gradaudit.leakage.rowspace.prefixes import Attended, blocks_for, leaf_values
from gradaudit.leakage.rowspace.subspace import Span
from tiny_models import DECODERS, hidden_states


@pytest.mark.parametrize("layer", [1, 2])
@pytest.mark.parametrize("family", DECODERS)
def test_tree_of_candidates_equals_one_run_for_each(load, family, layer):
    model = load(family)
    rng = torch.Generator().manual_seed(layer)
    basis = torch.linalg.qr(torch.randn(model.width, 12, generator=rng, dtype=torch.float64)).Q
    span = Span(basis, torch.ones(12), 12, 1.0, layer, ("q",))
    candidates = torch.randint(1, model.vocabulary_size, (270,), generator=rng)  # more than one run's leaves
    for done in (0, 1, 4):
        prefixes = torch.randint(1, model.vocabulary_size, (3, done), generator=rng)
        found = leaf_values(Attended(model, layer), prefixes, candidates, [((layer, "q"), span.residual)])[0]
        assert found.shape == (3, 270)
        for row, prefix in enumerate(prefixes):
            ids = torch.cat([prefix.expand(270, -1), candidates[:, None]], 1)
            expected = span.residual(hidden_states(model, ids, layer)[:, -1])
            torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("start", [0, 2])
@pytest.mark.parametrize("family", DECODERS)
def test_what_earlier_positions_left_changes_nothing(load, family, start, monkeypatch):
    """Prefixes that grow, branch, end and come back must be measured as if each were run from its first token."""
    model = load(family)
    rng = torch.Generator().manual_seed(start)
    measures = [((0, "p"), lambda x: x[..., 3]), ((1, "q"), lambda x: x[..., 1]), ((2, "q"), lambda x: x[..., 2])]
    candidates = torch.randint(1, model.vocabulary_size, (5, 9), generator=rng)
    blocks = blocks_for(key for key, _ in measures)
    attended = Attended(model, blocks, start)
    runs = []
    run = model.attended
    monkeypatch.setattr(model, "attended", lambda *given: runs.append(given[1].shape) or run(*given))
    prefixes = torch.randint(1, model.vocabulary_size, (5, 1), generator=rng)
    for parents in ([0, 0, 1, 4, 2], [4, 3, 3, 0, 1], [2, 2, 2, 2, 2]):
        for some in (prefixes[:2], prefixes):
            found = leaf_values(attended, some, candidates[: len(some)], measures)
            anew = leaf_values(Attended(model, blocks, start), some, candidates[: len(some)], measures)
            torch.testing.assert_close(found, anew, rtol=1e-4, atol=1e-5)
        others = torch.randint(1, model.vocabulary_size, (5, 1), generator=rng)
        prefixes = torch.cat([prefixes[parents], others], 1)
    kept = [shape for shape in runs[2:] if shape[1] == 1]
    assert len(kept) >= 4, "later positions are run by their last tokens alone"
    stranger = torch.randint(1, model.vocabulary_size, (2, 3), generator=rng)
    found = leaf_values(attended, stranger, candidates[:2], measures)
    anew = leaf_values(Attended(model, blocks, start), stranger, candidates[:2], measures)
    torch.testing.assert_close(found, anew, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", DECODERS)
def test_what_enters_block_0_is_measured_at_its_position_though_no_block_runs(load, family):
    model = load(family)
    ids, measures = torch.tensor([[5, 9, 7]]), [((0, "q"), lambda x: x[..., 1])]
    found = leaf_values(Attended(model, 1), ids[:, :2], ids[:, 2:], measures)
    torch.testing.assert_close(found[0, 0, 0], hidden_states(model, ids, 0)[0, 2, 1])
    torch.testing.assert_close(leaf_values(Attended(model, 0), ids[:, :2], ids[:, 2:], measures), found)


def test_too_many_keys_and_values_are_not_kept(load, monkeypatch):
    model = load("gpt2")
    monkeypatch.setattr(prefixes_module, "_REMEMBERED", 1)
    attended = Attended(model, 1)
    assert attended.of(torch.tensor([[5, 9]])) is None
    measures = [((1, "q"), lambda x: x[..., 1])]
    ids, candidates = torch.tensor([[5, 9], [7, 3]]), torch.tensor([[4, 6], [8, 2]])
    found = leaf_values(attended, ids, candidates, measures)
    monkeypatch.undo()
    torch.testing.assert_close(found, leaf_values(Attended(model, 1), ids, candidates, measures))
