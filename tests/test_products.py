"""An encoder's products: every sentence once, and a first row that equals the model's own."""

from __future__ import annotations

import itertools

import pytest
import torch

from gradaudit.client.client import Client
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.leakage.rowspace.products import Products
from gradaudit.registry import build
from gradaudit.streams import stream
from tiny_models import batch_of, seen_of, sentences


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


def test_a_token_that_two_sentences_share_at_a_position_is_found_in_both(load):
    """The paper removes a found sentence's tokens, and with it the other's: its set holds the token once."""
    model = load("bert", seed=1)
    short, middle, long = (text.split() for text in sentences((4, 5, 6), 2))
    middle[1] = short[1]
    batch = batch_of(model, [" ".join(text) for text in (short, middle, long)])
    seen = seen_of(Client(model), batch)
    truth = {tuple(one) for one in batch.sequences()}
    for how, count in (("spare", 3), ("never", 3), ("always", 2)):
        found = build("attack", "dager", {"remove_used": how})(seen, stream(0, "attack"))
        assert len(truth & set(found.sequences)) == count, how
    with pytest.raises(BadInputError, match="remove_used"):
        build("attack", "dager", {"remove_used": "sometimes"})
