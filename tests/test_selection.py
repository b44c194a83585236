"""Selections: what an expression picks, what share of the model that is, and every sentence a wrong one gets."""

from __future__ import annotations

import pytest
import torch

from gradaudit.client.client import Client
from gradaudit.errors import BadInputError
from gradaudit.selection import Selection
from tiny_models import DEPTH, FAMILIES, WIDTH, batch_of, seen_of, sentences


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        ("0:q", ["0.q"]),
        ("0-1:q,v", ["0.q", "0.v", "1.q", "1.v"]),
        ("0,2:k", ["0.k", "2.k"]),
        ("0,1-2:p", ["0.p", "1.p", "2.p"]),
        ("*:o", ["0.o", "1.o", "2.o"]),
        ("2:*", ["2.q", "2.k", "2.v", "2.o", "2.f", "2.p"]),
        ("2:q 0:f", ["2.q", "0.f"]),
        ("0:q;0:q", ["0.q"]),
        ("  1:q ; 2:q ", ["1.q", "2.q"]),
        ("word", ["bert.embeddings.word_embeddings.weight"]),
        ("embeddings", ["bert.embeddings.word_embeddings.weight", "bert.embeddings.position_embeddings.weight"]),
        ("head", ["classifier.weight", "classifier.bias"]),
    ],
)
def test_expressions_pick_these_views_in_their_order(load, expression, names):
    assert list(Selection(expression).views(load("bert"))) == names


def test_gated_feed_forward_is_two_matrices_of_one_role(load):
    assert list(Selection("1:f").views(load("llama"))) == ["1.f.gate", "1.f.up"]


@pytest.mark.parametrize(
    ("expression", "sentence"),
    [
        ("", "selection is empty; use 'all'"),
        (" ; ", "selection is empty; use 'all'"),
        ("0:z", "selection '0:z' names role 'z'; roles are q, k, v, o, f, p"),
        ("everything", "selection 'everything' is not understood; use 'all'"),
        ("0-2", "selection '0-2' is not understood"),
        (":q", "selection ':q' is not understood"),
        ("-1:q", "selection '-1:q' is not understood"),
        ("0:q,,k", "selection '0:q,,k' is not understood"),
        ("0:Q", "selection '0:Q' is not understood"),
        ("2-0:q", "counts layers downward; write the smaller one first"),
        ("99999:q", "names layer 99999, which no model has"),
        ("all 0:z", "names role 'z'"),
    ],
)
def test_wrong_expressions_get_a_sentence(expression, sentence):
    with pytest.raises(BadInputError) as caught:
        Selection(expression)
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_layers_the_model_lacks_are_named(load):
    with pytest.raises(BadInputError, match="selection '1-3:q' names layer 3; the model has layers 0 to 2"):
        Selection("1-3:q").views(load("bert"))


@pytest.mark.parametrize("family", FAMILIES)
def test_all_is_every_parameter(load, family):
    model = load(family)
    seen = seen_of(Client(model), batch_of(model, sentences((4,), 0)))
    assert set(seen.tensors) == set(model.parameters())
    assert Selection("all").share(model, seen.tensors.values()) == 1.0
    for name, parameter in model.parameters().items():
        assert seen.tensors[name].shape == parameter.shape


@pytest.mark.parametrize("family", FAMILIES)
def test_share_of_one_query_is_its_part_of_the_parameters(load, family):
    model = load(family)
    seen = seen_of(Client(model), batch_of(model, sentences((4,), 0)), "0:q")
    every = sum(p.numel() for p in model.module.parameters())
    assert seen.tensors["0.q"].shape == (WIDTH, WIDTH)
    assert Selection("0:q").share(model, seen.tensors.values()) == pytest.approx(WIDTH * WIDTH / every)


def test_gpt2_roles_are_thirds_and_make_up_the_fused_matrix(load):
    model = load("gpt2")
    batch = batch_of(model, sentences((5,), 0))
    seen, roles = seen_of(Client(model), batch), seen_of(Client(model), batch, "*:q,k,v")
    for layer in range(DEPTH):
        whole = seen.tensors[f"transformer.h.{layer}.attn.c_attn.weight"]
        parts = [roles.tensors[f"{layer}.{role}"] for role in "qkv"]
        assert all(3 * part.numel() == whole.numel() for part in parts)
        assert torch.equal(torch.cat(parts).T, whole)
        (inside,) = seen.role(layer, "k")
        assert torch.equal(inside, parts[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_role_is_found_inside_whole_parameters(load, family):
    """An attack that asks for a role gets the same matrix, shared by itself or inside "all"."""
    model = load(family)
    batch = batch_of(model, sentences((5,), 0))
    alone, inside = seen_of(Client(model), batch, "1:q,k,v,o,f,p"), seen_of(Client(model), batch, "all")
    for role in "qkvofp":
        pairs = list(zip(alone.role(1, role), inside.role(1, role), strict=True))
        assert pairs
        assert all(torch.equal(a, b) for a, b in pairs)
        assert alone.role(0, role) == []


@pytest.mark.parametrize("family", ["bert", "gpt2"])
def test_share_counts_no_number_twice(load, family):
    model = load(family)
    seen = seen_of(Client(model), batch_of(model, sentences((4,), 0)), "all *:q")
    assert Selection("all *:q").share(model, seen.tensors.values()) <= 1.0


def test_frozen_parameters_are_not_seen(load):
    model = load("bert")
    client = Client(model, freeze=("0:q", "embeddings"))
    batch = batch_of(model, sentences((4,), 0))
    assert "0.q" not in seen_of(client, batch, "0:q,k").tensors
    with pytest.raises(BadInputError, match="selection '0:q' picks nothing that the update holds"):
        seen_of(client, batch, "0:q")
