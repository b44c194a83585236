"""Text drawn from public text, which LTI-P learns from: its law, its special tokens and its pieces."""

from __future__ import annotations

import pytest
import torch

from gradaudit.learned.public import Public, drawn_like
from gradaudit.streams import stream

FIRST, LAST, PAD = 1, 2, 0
SPECIAL = {FIRST, LAST, PAD}
TEXTS, WORDS = 30, 8


def framed(ids: torch.Tensor) -> Public:
    """Words between two special tokens; every third text is three words shorter, and padded."""
    count = len(ids)
    whole = torch.cat([torch.full((count, 1), FIRST), ids, torch.full((count, 1), LAST)], 1)
    mask = torch.ones_like(whole, dtype=torch.bool)
    whole[::3, -4], whole[::3, -3:], mask[::3, -3:] = LAST, PAD, False
    return Public(whole, mask, torch.arange(count), "made up")


@pytest.fixture
def apart() -> Public:
    """No word stands in two places, so that a drawn one tells its own."""
    return framed(10 + torch.arange(TEXTS * WORDS).view(TEXTS, WORDS))


def pairs(drawn: Public) -> tuple[torch.Tensor, torch.Tensor]:
    """Return neighboring words, and whether they stand side by side in the public text (of `apart`)."""
    left, right = drawn.ids[:, 1:-1], drawn.ids[:, 2:]
    both = (right >= 10) & (left >= 10)
    follows = (right == left + 1) & ((left - 10) % WORDS != WORDS - 1)
    return torch.stack([left[both], right[both]], 1), follows[both]


@pytest.mark.parametrize("piece", [1.0, 4.0, float("inf")])
def test_special_tokens_lengths_and_labels_are_those_of_a_text(apart, piece):
    drawn = drawn_like(apart, 500, SPECIAL, stream(0, "drawn"), piece)
    of = drawn.labels
    assert set(of.tolist()) == set(range(TEXTS))
    assert torch.equal(drawn.mask, apart.mask[of])
    special = torch.isin(apart.ids[of], torch.tensor(sorted(SPECIAL)))
    assert torch.equal(drawn.ids[special], apart.ids[of][special])
    assert set(drawn.ids[~special].tolist()) <= set(apart.ids[apart.ids >= 10].tolist())


def test_words_are_drawn_one_by_one_as_often_as_they_occur():
    rng = stream(0, "texts")
    texts = framed(
        10 + torch.randint(3, (TEXTS, WORDS), generator=rng) * torch.randint(2, (TEXTS, WORDS), generator=rng)
    )
    drawn = drawn_like(texts, 20_000, SPECIAL, stream(0, "drawn"))
    words = texts.ids[texts.ids >= 10]
    shares = torch.stack([(words == 10 + n).float().mean() for n in range(3)])
    for at in (1, 4):
        found = torch.stack([(drawn.ids[:, at] == 10 + n).float().mean() for n in range(3)])
        assert torch.allclose(found, shares, atol=0.015)  # four standard deviations
    together = ((drawn.ids[:, 1] == 10) & (drawn.ids[:, 2] == 10)).float().mean()
    assert float(together) == pytest.approx(float(shares[0]) ** 2, abs=0.015), "a word tells nothing of the next one"


@pytest.mark.parametrize("piece", [1.0, 2.0, 8.0])
def test_pieces_are_as_long_as_asked_in_the_mean(apart, piece):
    drawn = drawn_like(apart, 20_000, SPECIAL, stream(0, "drawn"), piece)
    words, follows = pairs(drawn)
    last = torch.cat([row[row >= 10][-1:] for row in apart.ids])
    could = ~torch.isin(words[:, 0], last)
    # where a word could be followed by its own next one, it is, but for the share of pieces that end
    assert float(follows[could].float().mean()) == pytest.approx(1 - 1 / piece, abs=0.02)
    assert not follows[~could].any()


def test_a_piece_without_end_ends_with_its_text(apart):
    words, follows = pairs(drawn_like(apart, 2000, SPECIAL, stream(0, "drawn"), float("inf")))
    last = torch.cat([row[row >= 10][-1:] for row in apart.ids])
    assert torch.equal(follows, ~torch.isin(words[:, 0], last))


def test_texts_without_a_word_are_drawn_as_they_are():
    empty = Public(torch.tensor([[FIRST, LAST]]), torch.ones(1, 2, dtype=torch.bool), None, "made up")
    assert drawn_like(empty, 3, SPECIAL, stream(0, "drawn")).ids.tolist() == [[FIRST, LAST]] * 3
