"""The papers' draw, and the padded batch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gradaudit.data.draw import draw
from gradaudit.data.spec import DataSpec
from gradaudit.data.text import make_batch
from gradaudit.errors import BadInputError
from made_data import StubModel, rows_of

# --- the draw


def test_the_draw_is_the_papers_draw():
    rows = rows_of(*["x"] * 8551)
    spec = DataSpec(path="cola.tsv", shuffle_seed=101, batches=3, batch_size=2)
    batches = draw(spec, rows)
    assert batches[0][0] == 2310
    order = list(range(8551))
    np.random.RandomState(101).shuffle(order)
    assert batches == [tuple(order[0:2]), tuple(order[2:4]), tuple(order[4:6])]
    skipped = draw(spec.model_copy(update={"skip": 2, "batches": 2}), rows)
    assert skipped == batches[1:]
    assert draw(spec.model_copy(update={"shuffle_seed": 102}), rows) != batches


def test_without_a_seed_the_order_is_the_file_s():
    assert draw(DataSpec(batch_size=2, batches=2, skip=1), rows_of(*"abcdef")) == [(1, 2), (3, 4)]


def test_a_draw_leaves_numpys_global_generator_alone():
    np.random.seed(5)  # noqa: NPY002
    before = np.random.get_state()[1].copy()  # noqa: NPY002
    draw(DataSpec(shuffle_seed=1), rows_of("a", "b"))
    assert (np.random.get_state()[1] == before).all()  # noqa: NPY002


def test_exactly_enough_rows_are_enough_and_one_fewer_is_not():
    spec = DataSpec(batch_size=2, batches=2, skip=1)
    assert len(draw(spec, rows_of(*"abcde"))) == 2
    with pytest.raises(BadInputError, match=r"larger than the data: somewhere has 4 rows and 5 are needed"):
        draw(spec, rows_of(*"abcd"))


def test_an_empty_text_is_refused_only_when_drawn():
    rows = rows_of("a", " \n", "c")
    assert draw(DataSpec(), rows) == [(0,)]
    assert draw(DataSpec(skip=2), rows) == [(2,)]
    with pytest.raises(BadInputError, match=r"row 1 \(counted from 0\) of somewhere is drawn but holds no text; "):
        draw(DataSpec(batches=2), rows)


# --- the batch


def test_a_batch_is_padded_on_the_right_and_masked():
    batch = make_batch(StubModel(), ["a bbb", "cc", "one two three four"], [1, 0, 1])
    assert batch.ids.tolist() == [[1, 101, 103, 2, 9], [1, 102, 2, 9, 9], [1, 103, 103, 105, 2]]
    assert batch.mask.tolist() == [[True] * 4 + [False], [True] * 3 + [False] * 2, [True] * 5]
    assert (batch.ids.dtype, batch.mask.dtype) == (torch.long, torch.bool)
    assert batch.labels is not None
    assert batch.labels.dtype == torch.long
    assert batch.labels.tolist() == [1, 0, 1]
    assert batch.truncated == 1
    assert batch.texts == ("a bbb", "cc", "one two three four")
    assert batch.sequences() == [[1, 101, 103, 2], [1, 102, 2], [1, 103, 103, 105, 2]]


def test_a_language_model_needs_no_labels_and_gets_none():
    model = StubModel(task="causal-lm")
    assert make_batch(model, ["a"], None).labels is None
    assert make_batch(model, ["a"], [1]).labels is None


@pytest.mark.parametrize(
    ("texts", "labels", "said"),
    [
        (["a"], None, "needs a label for each text and none are there; name the label column with label"),
        (["a"], [2], r"label 2 is outside the model's 2 classes \(0 to 1\); set"),
        (["a"], [-1], "label -1 is outside"),
        (["a", "b"], [1], "2 texts came with 1 labels; give"),
        ([], [], "at least one text"),
    ],
)
def test_a_batch_that_does_not_fit_is_refused(texts, labels, said):
    with pytest.raises(BadInputError, match=said):
        make_batch(StubModel(), texts, labels)
