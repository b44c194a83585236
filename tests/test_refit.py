"""Texts judged under masks of their own, on the real MiniLM with dropout on."""

from __future__ import annotations

import pytest
import torch

from gradaudit.client.client import Client
from gradaudit.leakage.matching.candidates import Candidates
from gradaudit.leakage.matching.distances import L2
from gradaudit.leakage.matching.layout import layout
from gradaudit.leakage.matching.objective import Objective
from gradaudit.leakage.matching.refit import Refit
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.types import Given
from tiny_models import batch_of, seen_of

pytestmark = pytest.mark.minilm


def test_under_masks_of_its_own_the_true_text_is_nearest_and_without_them_it_is_not():
    """Neighbors: two words exchanged, and one in the place of another."""
    model = load_model(ModelSpec("minilm"))
    batch = batch_of(model, ["who has seen my snorkel?"], [1])
    seen = seen_of(Client(model, dropout=True), batch, given=Given(labels=True, lengths=True), seed=1)
    assert batch.labels is not None
    of, table = Candidates(Objective(seen, L2()), layout(seen, 16), batch.labels), model.word_vectors()
    ids = batch.ids[0].tolist()
    exchanged, twice = list(ids), list(ids)
    exchanged[2], exchanged[3] = exchanged[3], exchanged[2]
    twice[2] = ids[4]
    wrong = [torch.tensor([row]) for row in (exchanged, twice)]
    plain = of.measure(table[torch.stack([batch.ids, *wrong])])
    assert float(plain[1]) < 1.001 * float(plain[0]), "dropout hides the order"
    steps = 40
    refit = Refit(of, table, model.special.pad, steps)
    best = refit.best([*wrong, batch.ids])
    assert torch.equal(best.ids, batch.ids)
    assert best.loss < 0.2 * float(plain[0]), "masks explain most of what dropout does"
    nearest = refit.best(wrong)
    assert nearest is best, "what was judged is not forgotten"
    assert refit.spent == 3 * 3 * (steps + 1), "and not judged twice"
    others = min(b.loss for b in refit._known.values() if b is not best)
    assert best.loss < others
    alone = Refit(of, table, model.special.pad, steps).best([batch.ids])
    assert alone.loss == pytest.approx(best.loss, rel=1e-3), "masks start anew, whatever was judged before"
    again = Refit(of, table, model.special.pad, steps)
    again.put_back(refit.state())
    assert torch.equal(again.best(wrong).ids, batch.ids)
    assert again.spent == refit.spent
    again.labels(1 - batch.labels)
    assert again.best([batch.ids]).loss > 1.2 * best.loss, "other labels, other distances"
