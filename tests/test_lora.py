"""LoRA: what is trained, what A's gradient gives away, and up to where."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gradaudit.audit import run as audit
from gradaudit.audit import text as preparing
from gradaudit.audit.prepare import prepare, private_batch
from gradaudit.bundles.bundle import save_bundle
from gradaudit.case import parse_case
from gradaudit.client.client import Client
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.leakage.rowspace.subspace import span
from gradaudit.models.spec import Lora, ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Knowledge, LocalTraining
from tiny_models import DECODERS, ENCODERS, FAMILIES, batch_of, hidden_states, seen_of, sentences


def adapted(folders, family: str, rank: int = 4, trained: bool = True, modules: str = "attention"):
    model = load_model(ModelSpec(f"random:{folders[family]}", lora=Lora(rank, modules=modules)))
    if trained:  # as after some steps
        rng = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, p in model.parameters().items():
                if "lora_B" in name:
                    p.copy_(0.3 * torch.randn(p.shape, generator=rng))
    return model


def attacked(seen):
    return build("attack", "dager", {})(seen, stream(0, "attack"))


@pytest.mark.parametrize("modules", ["attention", "all-linear"])
@pytest.mark.parametrize("family", FAMILIES)
def test_only_adapters_and_head_are_sent(folders, family, modules):
    model = adapted(folders, family, modules=modules)
    update = Client(model).update(batch_of(model, sentences([4, 3], 1)), stream(0, "client"))
    head = set(model.group("head"))
    assert set(update.tensors) == {n for n in model.parameters() if "lora_" in n or n in head}
    paths = {n.split(".lora_")[0] for n in update.tensors if "lora_" in n}
    roles = "qkvo" if modules == "attention" else "qkvofp"
    expected = {v.parameter.removesuffix(".weight") for n in range(3) for r in roles for v in model.family.views(n, r)}
    assert paths == expected


def test_adapters_stand_where_the_case_says_and_drop_out_what_it_says(folders, rows):
    told = parse_case(case(folders, rows, rank=4, modules="q,v", blocks=[0, 2], dropout=0.25))
    model = prepare(told, Path.cwd(), torch.device("cpu")).model
    paths = {n.split(".lora_")[0] for n in model.parameters() if "lora_" in n}
    assert paths == {
        v.parameter.removesuffix(".weight") for b in (0, 2) for r in "qv" for v in model.family.views(b, r)
    }
    dropped = [p.p for n, p in model.module.named_modules() if "lora_dropout" in n and isinstance(p, torch.nn.Dropout)]
    assert dropped == [0.25] * 4
    assert "on q,v of block 0, 2, adapter dropout 0.25" in model.spec.title


@pytest.mark.parametrize(
    ("lora", "said"), [({"blocks": [3]}, "no block 3"), ({"blocks": []}, "blocks"), ({"modules": "q,x"}, "modules")]
)
def test_adapters_nowhere_are_refused(folders, rows, lora, said):
    with pytest.raises(BadInputError, match=said):
        prepare(parse_case(case(folders, rows, **lora)), Path.cwd(), torch.device("cpu"))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_gradient_s_rows_are_inputs_and_q_is_of_the_adapted_matrix(folders, family):
    """A's gradient lies in the span of what the block reads; the oracle is transformers' own forward pass."""
    model = adapted(folders, family)
    batch = batch_of(model, sentences([3], 1))
    seen = seen_of(Client(model), batch)
    ids = torch.tensor(batch.sequences())
    inputs = hidden_states(model, ids, 1)[0].double()
    gradient = seen.role(1, "v")[0].double()
    assert gradient.shape == (4, model.width)
    basis = torch.linalg.qr(inputs.T).Q
    outside = gradient - gradient @ basis @ basis.T
    assert float(outside.norm()) < 1e-5 * float(gradient.norm())
    layer = model.module.get_submodule(model.family.views(1, "q")[0].parameter.removesuffix(".weight"))
    whole = layer(inputs.float()[None])[0, :, : model.width]
    torch.testing.assert_close(model.project(1, "q", inputs.float()).flatten(1), whole, rtol=1e-4, atol=1e-5)


def test_q_k_and_v_together_tell_three_times_the_rank(folders):
    model = adapted(folders, "llama", rank=4)
    batch = batch_of(model, sentences([4, 3, 3], 2))
    assert 2 * 4 < batch.tokens < 3 * 4
    seen = seen_of(Client(model), batch)
    assert span(seen, 1).rank == batch.tokens
    assert Counter(attacked(seen).sequences) == Counter(tuple(s) for s in batch.sequences())
    alone = build("attack", "dager", {"roles": ["v"]})(seen, stream(0, "attack"))
    assert alone.sequences == ()


@pytest.mark.parametrize("family", DECODERS)
def test_more_tokens_than_the_adapters_have_directions_are_not_read(folders, family):
    model = adapted(folders, family)
    found = attacked(seen_of(Client(model), batch_of(model, sentences([5, 5, 5, 5], 2))))
    assert found.sequences == ()
    assert "or of their adapters) have rows" in found.notes[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_first_update_of_fresh_adapters_says_that_it_has_no_signal(folders, family):
    model = adapted(folders, family, trained=False)
    found = attacked(seen_of(Client(model), batch_of(model, sentences([4], 2))))
    assert found.sequences == ()
    assert "B is still zero" in found.notes[0]


@pytest.mark.parametrize("family", [*DECODERS, *ENCODERS])
def test_small_batches_come_back_exactly(folders, family):
    model = adapted(folders, family, rank=8)
    batch = batch_of(model, sentences([4], 3))
    assert attacked(seen_of(Client(model), batch)).sequences == tuple(tuple(s) for s in batch.sequences())


def test_the_rank_of_adapters_after_local_steps_is_that_of_the_tokens(folders):
    """Block 0's inputs do not move; the change of weights is rounded, which adapters' few rows must not hide."""
    model = adapted(folders, "llama", rank=8)
    batch = batch_of(model, sentences([4, 3], 3))
    for rate, epochs in ((1e-3, 3), (1e-1, 1)):
        seen = seen_of(Client(model, LocalTraining("sgd", rate, epochs, 1)), batch)
        assert span(seen, 0, noise=True).rank == batch.tokens


def case(folders, rows: Path, **lora) -> dict:
    return {
        "model": f"random:{folders['llama']}",
        "data": {"path": str(rows), "label": "label", "batch_size": 2, "batches": 2},
        "attack": {"name": "dager"},
        "lora": lora,
    }


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    path = tmp_path / "rows.csv"
    texts = sentences([3, 4, 3, 4, 3, 4], 3, distinct=False)
    path.write_text("text,label\n" + "".join(f"{t},{i % 2}\n" for i, t in enumerate(texts)), encoding="utf8")
    return path


def test_a_case_warms_adapters_up_on_rows_it_does_not_audit(folders, rows, monkeypatch):
    used = []

    def watch(model, batches):
        used.extend(text for batch in batches for text in batch.texts)

    monkeypatch.setattr(preparing, "warm_up", watch)
    ready = prepare(parse_case(case(folders, rows, rank=4, warmup=3)), Path.cwd(), torch.device("cpu"))
    private = {t for n in range(2) for t in private_batch(ready, n).texts}
    assert used
    assert not private & set(used)


def test_warm_up_trains_adapters_alone_and_gives_signal(folders, rows, tmp_path):
    cpu = torch.device("cpu")
    ready = prepare(parse_case(case(folders, rows, rank=4, warmup=3)), Path.cwd(), cpu)
    fresh = prepare(parse_case(case(folders, rows, rank=4)), Path.cwd(), cpu)
    changed = {n for n, p in ready.model.parameters().items() if not torch.equal(p, fresh.model.parameters()[n])}
    assert changed == set(ready.model.parameters()) - set(ready.model.untrained())
    again = prepare(parse_case(case(folders, rows, rank=4, warmup=3)), Path.cwd(), cpu)
    assert again.model.fingerprint() == ready.model.fingerprint() != fresh.model.fingerprint()
    records = list(audit.run(ready, tmp_path / "warm"))
    assert all(r.scores["exact"] == 100 for r in records)
    assert "LoRA r = 4 on attention, after 3 steps" in records[0].setting
    assert all(r.scores["exact"] == 0 for r in audit.run(fresh, tmp_path / "fresh"))


def test_warm_up_without_other_rows_is_refused(folders, rows):
    full = case(folders, rows, rank=4, warmup=1)
    full["data"] |= {"batches": 3}
    with pytest.raises(BadInputError, match="rows that are in no audited batch"):
        prepare(parse_case(full), Path.cwd(), torch.device("cpu"))


def test_cases_without_adapters_keep_their_ids(folders, rows):
    plain = case(folders, rows)
    with_lora = parse_case(plain).content_hash()
    del plain["lora"]
    assert parse_case(plain).content_hash() != with_lora
    assert "lora" in parse_case(plain).resolved()


def test_a_missing_package_names_its_extra(folders, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "peft", None)
    with pytest.raises(BadInputError, match=r"gradaudit\[lora\]"):
        adapted(folders, "llama")


def test_a_bundle_of_adapters_without_their_weights_is_refused(folders, tmp_path):
    model = adapted(folders, "llama")
    update = Client(model).update(batch_of(model, sentences([4], 1)), stream(0, "client"))
    with pytest.raises(NotSupportedError, match="holds its model"):
        save_bundle(tmp_path / "update", model, replace(update), Knowledge())
