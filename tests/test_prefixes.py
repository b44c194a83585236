"""Growing prefixes: many candidates run as leaves of one tree must equal each one run alone."""

from __future__ import annotations

import pytest
import torch

from gradaudit.leakage.prefixes import extension_residuals, prefix_residuals
from gradaudit.leakage.subspace import Span
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
        found = extension_residuals(model, span, prefixes, candidates)
        assert found.shape == (3, 270)
        for row, prefix in enumerate(prefixes):
            ids = torch.cat([prefix.expand(270, -1), candidates[:, None]], 1)
            expected = span.residual(hidden_states(model, ids, layer)[:, -1])
            torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-5)
    sentence = [5, 9, 9, 30, 2]
    for end, residual in enumerate(prefix_residuals(model, span, sentence), 1):
        alone = hidden_states(model, torch.tensor([sentence[:end]]), layer)[:, -1]
        torch.testing.assert_close(residual, span.residual(alone)[0], rtol=1e-4, atol=1e-5)
