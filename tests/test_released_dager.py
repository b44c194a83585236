"""DAGER by its released rules: the query's matrix alone, one rank of all blocks, fixed tolerances."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer

from gradaudit.client.client import Client
from gradaudit.leakage.rowspace.subspace import published_rank, stack
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Reconstruction
from tiny_models import batch_of, make_folder, seen_of, sentences, tiny

RELEASED = {
    "roles": ("q",), "rank": "paper", "threshold": "paper", "remove_used": "always", "embedding_rows": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def framed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama whose tokenizer puts a token first, as Llama's own does."""
    folder = make_folder("llama", tmp_path_factory.mktemp("framed") / "llama")
    told = json.loads((folder / "tokenizer.json").read_text())
    told["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "[UNK]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"[UNK]": {"id": "[UNK]", "ids": [1], "tokens": ["[UNK]"]}},
    }
    (folder / "tokenizer.json").write_text(json.dumps(told))
    assert AutoTokenizer.from_pretrained(folder)("kulo")["input_ids"][0] == 1
    return folder


def read(folder: Path, sizes: list[int], **how: object) -> tuple[Reconstruction, set[tuple[int, ...]]]:
    model = tiny(folder)
    batch = batch_of(model, sentences(sizes, 3))
    found = build("attack", "dager", RELEASED | how)(seen_of(Client(model), batch), stream(0, "attack"))
    return found, {tuple(row) for row in batch.sequences()}


@pytest.mark.parametrize("sizes", [[5], [3, 4], [3, 2, 3, 2]])
def test_queries_alone_read_a_decoder_whose_sentences_begin_with_a_known_token(framed, sizes):
    found, true = read(framed, sizes)
    assert set(found.sequences) == true


def test_without_such_a_token_queries_alone_miss_the_first_word(folders):
    """A causal model's first token attends to itself alone: no slope of its query is there to be read."""
    found, true = read(folders["llama"], [5])
    assert not set(found.sequences) & true
    found, true = read(folders["llama"], [5], roles=("q", "k", "v"))
    assert set(found.sequences) == true


def test_a_matrix_that_holds_keys_and_values_too_is_read_whole(folders):
    found, true = read(folders["gpt2"], [4, 3])
    assert set(found.sequences) == true


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_the_rank_of_all_blocks_is_the_largest_of_one_and_leaves_twenty_directions(folders, family):
    model = tiny(folders[family])
    seen = seen_of(Client(model), batch_of(model, sentences([3, 2], 3)))
    several = [int(torch.linalg.matrix_rank(stack(seen, at, ("q",))[0].float())) for at in range(model.depth)]
    assert published_rank(seen, ("q",)) == min(max(several), model.width - 20)
