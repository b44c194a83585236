"""An encoder's products: every sentence once, and a first row that equals the model's own."""

from __future__ import annotations

import itertools

import pytest
import torch

from gradaudit.errors import NotSupportedError
from gradaudit.leakage.products import Products


@pytest.mark.parametrize("family", ["bert", "roberta", "mpnet"])
def test_a_first_row_is_what_a_whole_pass_puts_there(load, family):
    model = load(family, seed=3)
    columns = [[model.special.prefix[0], 9], [11, 12, 13], [14], [15, 16], list(model.special.suffix)]
    products = Products(model, columns)
    picks = products.picks(0, products.count)
    ids = products.ids(picks)
    assert [tuple(row) for row in ids.tolist()] == list(itertools.product(*columns))
    whole = model.attention_inputs(1, ids)[:, 0]
    torch.testing.assert_close(products.first_rows(picks), whole, rtol=1e-4, atol=2e-6)
    assert float((whole[0] - whole[1]).norm()) > 1e-3, "another word makes another row"
    torch.testing.assert_close(products.picks(5, 4), picks[5:9])
    drawn = products.drawn(50, torch.Generator().manual_seed(0))
    assert {tuple(row) for row in products.ids(drawn).tolist()} <= set(itertools.product(*columns))


def test_a_decoder_has_no_row_that_is_finished_alone(load):
    model = load("gpt2")
    with pytest.raises(NotSupportedError, match="encoder"):
        model.after_attention(0, torch.zeros(1, model.width), torch.zeros(1, model.width))
