"""Models against transformers itself: losses, role views, block inputs, text; closed forms where there are some."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn

from gradaudit.client.client import Client
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models.families import REFUSED
from gradaudit.models.spec import ModelSpec
from gradaudit.models.views import ROLES
from gradaudit.models.zoo import load_model
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Batch
from tiny_models import (
    DEPTH,
    EVERY,
    EVERY_SETTING,
    LONGEST,
    NEWER_DECODERS,
    WIDTH,
    WORDS,
    batch_of,
    hidden_states,
    make_folder,
    seen_of,
    sentences,
    tiny,
)

PATHS = {
    "bert": ("bert.encoder.layer.{}", "attention.self.query attention.self.key attention.self.value "
             "attention.output.dense intermediate.dense output.dense"),
    "roberta": ("roberta.encoder.layer.{}", "attention.self.query attention.self.key attention.self.value "
                "attention.output.dense intermediate.dense output.dense"),
    "mpnet": ("mpnet.encoder.layer.{}", "attention.attn.q attention.attn.k attention.attn.v attention.attn.o "
              "intermediate.dense output.dense"),
    "gpt2": ("transformer.h.{}", "attn.c_attn attn.c_attn attn.c_attn attn.c_proj mlp.c_fc mlp.c_proj"),
    "llama": ("model.layers.{}", "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
              "mlp.gate_proj+mlp.up_proj mlp.down_proj"),
    "electra": ("electra.encoder.layer.{}", "attention.self.query attention.self.key attention.self.value "
                "attention.output.dense intermediate.dense output.dense"),
    "distilbert": ("distilbert.transformer.layer.{}", "attention.q_lin attention.k_lin attention.v_lin "
                   "attention.out_lin ffn.lin1 ffn.lin2"),
    "qwen2": ("model.layers.{}", "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
              "mlp.gate_proj+mlp.up_proj mlp.down_proj"),
    "mistral": ("model.layers.{}", "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj "
                "mlp.gate_proj+mlp.up_proj mlp.down_proj"),
    "phi": ("model.layers.{}", "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.dense mlp.fc1 mlp.fc2"),
    "phi3": ("model.layers.{}", "self_attn.qkv_proj self_attn.qkv_proj self_attn.qkv_proj self_attn.o_proj "
             "mlp.gate_up_proj mlp.down_proj"),
}  # fmt: skip
PATHS |= dict.fromkeys(("qwen3", "gemma", "gemma2", "gemma3_text"), PATHS["llama"])
FUSED = {"gpt2": {"qkv": (WIDTH, WIDTH, WIDTH)}, "phi3": {"qkv": (WIDTH, WIDTH // 2, WIDTH // 2), "f": (48, 48)}}
"""Outputs of the roles, or of gate and up, that lie in one matrix."""
"""The test's own table of where transformers keeps each role's module."""


def arguments(batch: Batch) -> dict[str, Tensor]:
    return {"ids": batch.ids, "mask": batch.mask, "labels": batch.ids if batch.labels is None else batch.labels}


def gradients(model, batch: Batch, **changed) -> dict[str, Tensor]:
    names, values = zip(*model.parameters().items(), strict=True)
    found = torch.autograd.grad(
        model.loss(**arguments(batch) | changed), values, allow_unused=True, materialize_grads=True
    )
    return dict(zip(names, found, strict=True))


@pytest.mark.parametrize("sizes", [(5,), (4, 4), (3, 6, 1)], ids=["one", "even", "padded"])
@pytest.mark.parametrize(("family", "task"), EVERY_SETTING)
def test_loss_is_transformers_own(load, family, task, sizes):
    if task == "causal-lm":
        sizes = tuple(n + 1 for n in sizes)
    model = load(family, task, labels=3)
    batch = batch_of(model, sentences(sizes, 1))
    labels = batch.labels if batch.labels is not None else batch.ids.masked_fill(~batch.mask, -100)
    theirs = model.module(input_ids=batch.ids, attention_mask=batch.mask.long(), labels=labels).loss
    ours = model.loss(**arguments(batch))
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
    vectors = model.word_vectors()[batch.ids]
    given = arguments(batch) | {"ids": None, "embeddings": vectors}
    assert model.loss(**given).item() == pytest.approx(theirs.item(), rel=1e-5), "word vectors in place of ids"
    size = model.spec.labels if batch.labels is not None else model.vocabulary_size
    certain = torch.nn.functional.one_hot(given["labels"], size).float()
    assert model.loss(**given | {"labels": certain}).item() == pytest.approx(theirs.item(), rel=1e-5), "distributions"


@pytest.mark.parametrize(("family", "task"), EVERY_SETTING)
def test_padding_changes_nothing(load, family, task):
    model = load(family, task)
    batch = batch_of(model, sentences((4, 4), 2))
    expected_loss, expected = model.loss(**arguments(batch)), gradients(model, batch)
    more = 5
    for filler in (model.special.pad, 40):  # whatever stands in the padded slots
        ids = torch.nn.functional.pad(batch.ids, (0, more), value=filler)
        padded = Batch(ids, torch.nn.functional.pad(batch.mask, (0, more)), batch.labels, batch.texts)
        assert model.loss(**arguments(padded)).item() == pytest.approx(expected_loss.item(), rel=1e-5)
        for name, value in gradients(model, padded).items():
            torch.testing.assert_close(value, expected[name], rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize(("family", "task"), EVERY_SETTING)
def test_views_are_the_products_of_errors_and_inputs(load, family, task):
    """Every role's gradient, [out, in], is the sum over tokens of delta x^T, with both caught in transformers."""
    model = load(family, task)
    batch = batch_of(model, sentences((3, 6), 3))
    caught: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = {}
    handles, inputs = [], {}

    def watch(layer: int, role: str, path: str) -> None:
        module = model.module.get_submodule(f"{PATHS[family][0].format(layer)}.{path}")

        def before(module, given):
            inputs[layer, role, path] = given[0].detach()

        def after(module, _, error):
            x, d = inputs[layer, role, path].flatten(0, 1), error[0].flatten(0, 1)
            parts = (d,)
            for fused, sizes in FUSED.get(family, {}).items():
                if role in fused:  # as transformers splits the output
                    parts = d.split(sizes, 1)
                    parts = parts if len(fused) == 1 else (parts[fused.index(role)],)
            caught.setdefault((layer, role), []).extend((x, part) for part in parts)

        handles.extend([module.register_forward_pre_hook(before), module.register_full_backward_hook(after)])

    for layer in range(DEPTH):
        for role, paths in zip(ROLES, PATHS[family][1].split(), strict=True):
            for path in paths.split("+"):
                watch(layer, role, path)
    try:
        gradient = gradients(model, batch)
    finally:
        for handle in handles:
            handle.remove()
    for layer in range(DEPTH):
        for role in ROLES:
            views = model.views(layer, role)
            found = [view(gradient[view.parameter]) for view in views]
            expected = [d.T @ x for x, d in caught[layer, role]]
            assert len(found) == len(expected) >= len(PATHS[family][1].split()[ROLES.index(role)].split("+"))
            for one in expected:  # backward hooks fire in any order
                assert any(f.shape == one.shape and torch.allclose(f, one, rtol=1e-3, atol=1e-5) for f in found)
            assert all(view.name.startswith(f"{layer}.{role}") for view in views)
            assert any(float(f.abs().max()) > 1e-6 for f in found), "a zero gradient would prove nothing"


class Unfused(nn.Module):
    """A matrix of several parts as so many linear layers."""

    def __init__(self, weight: Tensor, bias: Tensor | None, sizes: tuple[int, ...]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(weight.shape[1], size, bias is not None) for size in sizes)
        with torch.no_grad():
            for part, w in zip(self.parts, weight.split(sizes), strict=True):
                part.weight.copy_(w)
            for part, b in zip(self.parts, () if bias is None else bias.split(sizes), strict=bias is not None):
                part.bias.copy_(b)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)


@pytest.mark.parametrize("task", ["classification", "causal-lm"])
@pytest.mark.parametrize(
    ("family", "place", "roles"),
    [("gpt2", "transformer.h.{}.attn.c_attn", "qkv"), ("phi3", "model.layers.{}.self_attn.qkv_proj", "qkv"),
     ("phi3", "model.layers.{}.mlp.gate_up_proj", "f")],
)  # fmt: skip
def test_views_of_a_matrix_of_parts_equal_autograd_on_an_unfused_twin(load, folders, family, place, roles, task):
    model, twin = load(family, task), tiny(folders[family], task)
    batch = batch_of(model, sentences((4, 5), 4))
    gradient, apart = gradients(model, batch), []
    for layer in range(DEPTH):
        old = twin.module.get_submodule(place.format(layer))
        weight = old.weight.detach().T if family == "gpt2" else old.weight.detach()
        apart.append(Unfused(weight, old.bias, FUSED[family][roles]))
        twin.module.set_submodule(place.format(layer), apart[-1])
    weights = [part.weight for parts in apart for part in parts.parts]
    expected = iter(torch.autograd.grad(twin.loss(**arguments(batch)), weights))
    for layer in range(DEPTH):
        for view in [view for role in roles for view in model.views(layer, role)]:
            torch.testing.assert_close(view(gradient[view.parameter]), next(expected), rtol=1e-4, atol=1e-6)
    assert next(expected, None) is None


def test_two_token_sentence_tells_query_key_and_value_apart(load):
    """The first token has no query gradient, and keys see a difference only: rows x1, x0 - x1, and both."""
    model = load("gpt2")
    batch = batch_of(model, ["river garden"], [1])
    x = model.attention_inputs(0, batch.ids)[0]
    seen = {r: v(gradients(model, batch)[v.parameter]) for r in "qkv" for v in model.views(0, r)}
    for role, direction in (("q", x[1]), ("k", x[0] - x[1])):
        cosine = torch.nn.functional.cosine_similarity(seen[role], direction[None], dim=1).abs()
        norms = seen[role].norm(dim=1)
        torch.testing.assert_close(cosine[norms > 0.01 * norms.max()].min(), torch.tensor(1.0))
    values = torch.linalg.svdvals(seen["v"])
    assert values[1] > 1e-3 * values[0]
    assert values[2] < 1e-5 * values[0]


@pytest.mark.parametrize("layer", range(DEPTH))
@pytest.mark.parametrize("family", EVERY)
def test_attention_inputs_are_the_whole_models_hidden_states(load, family, layer):
    model = load(family)
    ids = torch.randint(4, 90, (3, 7), generator=torch.Generator().manual_seed(layer))
    torch.testing.assert_close(model.attention_inputs(layer, ids), hidden_states(model, ids, layer))


@pytest.mark.parametrize("family", EVERY)
def test_first_inputs_and_their_parts_are_the_block_0_inputs(load, family):
    model = load(family)
    ids = torch.arange(model.vocabulary_size)
    parts = model.first_input_parts()
    assert model.max_length == LONGEST
    assert len(parts.positions) == (LONGEST if model.absolute_positions else 1)
    for position in range(LONGEST):
        expected = model.attention_inputs(0, ids[:, None].expand(-1, position + 1))[:, position]
        torch.testing.assert_close(model.first_inputs(position), expected)
        torch.testing.assert_close(model.first_inputs(position, ids[5:9]), expected[5:9])
        x = (parts.words + parts.positions[min(position, len(parts.positions) - 1)]).double()
        x = x - x.mean(1, keepdim=True) if parts.centered else x
        x = x / (x.square().mean(1, keepdim=True) + parts.eps).sqrt()
        torch.testing.assert_close((parts.weight * x + parts.bias).float(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("family", EVERY)
def test_a_model_in_bfloat16_enters_what_its_parts_round_to(folders, family):
    model = load_model(ModelSpec(f"random:{folders[family]}", weights="bfloat16"))
    rng = stream(0, "norms")
    with torch.no_grad():
        for p in model.parameters().values():
            if p.dim() == 1:  # what a norm of ones ends with is rounded once, wherever it rounds
                p.copy_((1 + 0.2 * torch.randn(p.shape, generator=rng)).bfloat16())
    parts, ids = model.first_input_parts(), torch.arange(model.vocabulary_size)
    rounded = [parts.low(position, ids, torch.bfloat16) for position in (0, 3)]
    if model.absolute_positions or parts.unit_rounded or parts.scale != 1:
        assert not torch.equal(rounded[1], model.first_inputs(3).bfloat16()), "steps on the way round, too"
    model.module.to(torch.bfloat16)
    for position, found in zip((0, 3), rounded, strict=True):
        own = model.first_inputs(position)
        assert own.dtype == found.dtype == torch.bfloat16
        assert float((own != found).double().mean()) < 1e-3, "float32 may round either way where bfloat16 ends"


@pytest.mark.parametrize("family", [f for f in EVERY if f != "qwen2"])  # it has one tokenizer, its own
def test_text_goes_there_and_back(load, family):
    model = load(family)
    text = "the river walks . maria reads seven letter"
    ids, cut = model.encode(text)
    frame = 0 if model.causal else 2
    assert not cut
    assert len(ids) == len(text.split()) + frame
    assert model.decode(ids).replace(" .", ".") == text.replace(" .", ".")
    assert model.content(ids) == (ids[1:-1] if frame else ids)
    expected = ((ids[0],), (ids[-1],)) if frame else ((), ())
    assert (model.special.prefix, model.special.suffix) == expected
    assert model.pieces(model.content(ids)) == text.split()
    unknown = model.encode("the zzz")[0]
    assert len(model.content(unknown)) == 2, "an unknown word is text"
    assert set(model.encode(" ".join(WORDS[:20]))[0][1:-1]).isdisjoint(model.special.ids)


@pytest.mark.parametrize("family", [f for f in EVERY if f != "qwen2"])  # it has one tokenizer, its own
def test_truncation_keeps_the_end_of_the_frame(load, family):
    model = load(family)
    frame = 0 if model.causal else 2
    just = " ".join(WORDS[: LONGEST - frame])
    assert model.encode(just) == (model.encode(just)[0], False)
    ids, cut = model.encode(just + " river")
    assert cut
    assert len(ids) == LONGEST
    assert ids == model.encode(just)[0], "the overlong word alone is lost"
    model.loss(ids=torch.tensor([ids]), mask=torch.ones(1, len(ids)), labels=torch.tensor([0]))


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_a_family_that_is_not_there_is_refused_with_the_reason(folders, tmp_path, gradaudit, kind):
    other = make_folder("llama", tmp_path / "model")
    (other / "config.json").write_text(json.dumps({"model_type": kind}))
    (tmp_path / "case.toml").write_text(
        f'model = "random:{other}"\n[data]\nsource = "sample"\n[attack]\nname = "dager"\n'
    )
    code, _, err = gradaudit("check", tmp_path / "case.toml")
    assert code == 2
    assert REFUSED[kind] in err
    assert len(err.strip().splitlines()) == 1


def test_the_small_electra_is_refused(folders, tmp_path):
    config = json.loads((folders["electra"] / "config.json").read_text()) | {"embedding_size": 16}
    other = make_folder("electra", tmp_path / "model")
    (other / "config.json").write_text(json.dumps(config))
    with pytest.raises(NotSupportedError, match="projected to another width"):
        load_model(ModelSpec(f"random:{other}"))


@pytest.mark.parametrize("attack", ["decode", "dager"])
@pytest.mark.parametrize("task", ["classification", "causal-lm"])
def test_other_decoders_are_read(load, task, attack):
    for family in NEWER_DECODERS:
        model = load(family, task)
        ids = torch.tensor([[11, 25, 40, 33, 60], [52, 17, 71, 29, 83]])
        labels = torch.tensor([0, 1]) if task == "classification" else None
        batch = Batch(ids, torch.ones_like(ids, dtype=torch.bool), labels, ("", ""))
        found = build("attack", attack, {})(seen_of(Client(model), batch), stream(0, "attack"))
        kept = ids if task == "classification" else ids[:, :-1]  # the last word of all enters no gradient
        assert sorted(row[: kept.shape[1]] for row in found.sequences) == sorted(map(tuple, kept.tolist())), family


@pytest.mark.parametrize("family", EVERY)
def test_slopes_at_queries_and_keys_go_back_through_the_norms_of_heads(load, family):
    """Against autograd through transformers' own norm, and the norm takes as many directions away as a family says."""
    model = load(family)
    paths = {"qwen3": "self_attn.{}_norm", "gemma3_text": "self_attn.{}_norm"}
    for role in "qk":
        sent = model.project(1, role, model.attention_inputs(1, torch.tensor([[11, 25, 40]]))[0])
        every = torch.eye(sent.shape[-1]).expand(*sent.shape, -1)
        found = model.family.returned(1, role, sent, every)
        assert set(torch.linalg.matrix_rank(found, rtol=1e-4).flatten().tolist()) == {
            sent.shape[-1] - model.family.lost
        }
        if family not in paths:
            assert torch.equal(found, every)
            assert torch.equal(model.family.compared(1, role, sent), sent)
            continue
        norm = model.family.blocks[1].get_submodule(paths[family].format(role))
        for n, head in ((0, 0), (2, 1)):
            torch.testing.assert_close(model.family.compared(1, role, sent)[n, head], norm(sent[n, head]))
            expected = torch.autograd.functional.jacobian(norm, sent[n, head])
            torch.testing.assert_close(found[n, head], expected, rtol=1e-4, atol=1e-5)


def test_phi_is_read_with_norms_of_heads_and_refused_with_dropout_of_its_words(folders, tmp_path):
    config = json.loads((folders["phi"] / "config.json").read_text())
    other = make_folder("phi", tmp_path / "model")
    (other / "config.json").write_text(json.dumps(config | {"qk_layernorm": True}))
    model = tiny(other)
    sent = 100 * model.project(0, "q", model.first_inputs(0)[:3])  # far above the eps of the norm
    every = torch.eye(sent.shape[-1]).expand(*sent.shape, -1)
    left = torch.linalg.matrix_rank(model.family.returned(0, "q", sent, every), rtol=1e-4)
    assert set(left.flatten().tolist()) == {sent.shape[-1] - model.family.lost}
    (other / "config.json").write_text(json.dumps(config | {"embd_pdrop": 0.1}))
    with pytest.raises(NotSupportedError, match="dropout of its word vectors"):
        load_model(ModelSpec(f"random:{other}"))


def test_a_gemma_that_sees_both_sides_is_refused(folders, tmp_path):
    config = json.loads((folders["gemma3_text"] / "config.json").read_text())
    other = make_folder("gemma3_text", tmp_path / "model")
    (other / "config.json").write_text(json.dumps(config | {"use_bidirectional_attention": True}))
    with pytest.raises(NotSupportedError, match="sees what comes after"):
        load_model(ModelSpec(f"random:{other}"))


def test_gpt2_groups_and_unknown_names(load):
    model = load("gpt2")
    assert model.group("embeddings") == ["transformer.wte.weight", "transformer.wpe.weight"]
    assert model.group("head") == ["score.weight"]
    assert load("gpt2", "causal-lm").group("head") == [], "tied to the word table"
    assert load("llama", "causal-lm").group("head") == ["lm_head.weight"]
    assert load("llama").group("position") == []
    with pytest.raises(BadInputError, match="unknown parameter group 'heads'; did you mean 'head'"):
        model.group("heads")
    with pytest.raises(BadInputError, match="unknown role 'x'"):
        model.views(0, "x")
    with pytest.raises(BadInputError, match="layer 3 is not there"):
        model.views(3, "q")


def test_loading_is_reproducible_and_refuses_in_a_sentence(load, folders, tmp_path):
    first, again = load("llama"), tiny(folders["llama"])
    assert first.fingerprint() == again.fingerprint()
    assert load("llama", seed=1).fingerprint() != first.fingerprint()
    assert first.spec.random_weights
    assert "(random weights)" in first.spec.title
    assert load_model(ModelSpec(f"random:{folders['llama']}", layers=1)).depth == 1
    state = torch.random.get_rng_state()
    load_model(ModelSpec(f"random:{folders['bert']}"))
    assert torch.equal(state, torch.random.get_rng_state()), "the global generator was moved"
    first.module.save_pretrained(tmp_path / "saved")
    first.tokenizer.save_pretrained(tmp_path / "saved")
    saved = load_model(ModelSpec(str(tmp_path / "saved")))
    assert saved.fingerprint() == first.fingerprint()
    assert not saved.spec.random_weights
    with pytest.raises(BadInputError, match="encoder"):
        load_model(ModelSpec(f"random:{folders['bert']}", "causal-lm"))
    with pytest.raises(BadInputError, match="unknown model 'minilmm'; did you mean 'minilm'"):
        load_model(ModelSpec("minilmm"))
    other = make_folder("bert", tmp_path / "other")
    (other / "config.json").write_text('{"model_type": "t5"}')
    with pytest.raises(NotSupportedError, match="is of type 't5'; supported: bert, distilbert"):
        load_model(ModelSpec(f"random:{other}"))
