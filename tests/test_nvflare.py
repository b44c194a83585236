"""NVIDIA FLARE: two filters record what a round changed, in the real simulator, and nothing breaks by them."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from gradaudit.bundles.bundle import load_bundle
from gradaudit.bundles.gate import Gate
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model

pytest.importorskip("nvflare", reason="NVIDIA FLARE is not installed: pip install 'gradaudit[nvflare]'")

from nvflare.apis.dxo import DXO, DataKind
from nvflare.apis.filter import ContentBlockedException, FilterChainType, FilterContextKey
from nvflare.apis.shareable import Shareable

from gradaudit.integrations.nvflare import AuditFilter, GateFilter


def context(own: str = "site-1", peer: str = "server") -> Any:
    other = SimpleNamespace(get_identity_name=lambda: peer)
    return SimpleNamespace(
        get_peer_context=lambda: other, get_identity_name=lambda: own, get_job_id=lambda: "job", get_engine=lambda: None
    )


def through(recorder: AuditFilter, chain: str, kind: str, data: Any, round_: int = 0) -> Any:
    recorder.set_prop(FilterContextKey.CHAIN_TYPE, chain)
    shareable = Shareable()
    shareable.set_header("current_round", round_)
    return recorder.process_dxo(DXO(kind, data), shareable, context())


@pytest.fixture
def training(folders, tmp_path) -> tuple[Path, dict[str, Any], dict[str, Any]]:
    """The folder of a model, its weights, and what a client makes of them."""
    made = load_model(ModelSpec(f"random:{folders['bert']}"))
    made.module.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    before = {name: value.numpy().copy() for name, value in made.module.state_dict().items()}
    return tmp_path / "model", before, {name: (value * 1.001).astype("float32") for name, value in before.items()}


@pytest.mark.parametrize("kind", [DataKind.WEIGHTS, DataKind.WEIGHT_DIFF])
def test_two_filters_record_what_a_round_changed_and_filter_nothing(training, tmp_path, kind):
    folder, before, after = training
    coming, going = (AuditFilter(str(tmp_path / "up"), str(folder), sentences=3) for _ in range(2))
    assert through(coming, FilterChainType.TASK_DATA_CHAIN, DataKind.WEIGHTS, before, 4) is None
    change = {name: value - before[name] for name, value in after.items() if name != "classifier.bias"}
    sent = after if kind == DataKind.WEIGHTS else change
    assert through(going, FilterChainType.TASK_RESULT_CHAIN, kind, sent, 4) is None
    found = load_bundle(tmp_path / "up" / "round-5" / "site-1")
    assert found.manifest.knowledge["batch_size"] == 3
    for name, value in found.tensors.items():
        assert torch.equal(value, torch.from_numpy(after[name] - before[name])), name
    assert set(found.tensors) >= {name for name in change if change[name].any()}


@pytest.mark.parametrize("fault", ["nothing came", "weights for a change", "a change came", "a bug"])
def test_nothing_breaks_and_the_log_says_why(training, tmp_path, caplog, monkeypatch, fault):
    folder, before, after = training
    recorder = AuditFilter(str(tmp_path / "up"), str(folder))
    monkeypatch.setattr("gradaudit.integrations.nvflare._BEFORE", {})
    if fault == "a bug":
        monkeypatch.setattr("gradaudit.integrations.recording.bundle", lambda *_, **__: 1 / 0)
    came = DataKind.WEIGHT_DIFF if fault == "a change came" else DataKind.WEIGHTS
    sent = DataKind.WEIGHT_DIFF if fault == "weights for a change" else DataKind.WEIGHTS
    with caplog.at_level(logging.WARNING, "gradaudit"):
        if fault != "nothing came":
            assert through(recorder, FilterChainType.TASK_DATA_CHAIN, came, before) is None
        assert through(recorder, FilterChainType.TASK_RESULT_CHAIN, sent, after) is None
    said = {
        "nothing came": "weights before are not known",
        "a change came": "weights are needed",
        "weights for a change": "weights were given where a change was expected",
        "a bug": "division by zero",
    }
    assert said[fault] in caplog.text
    assert not list(tmp_path.glob("up/**/manifest.json"))


@pytest.mark.parametrize(("counts", "blocked"), [({"proven": 1}, True), ({"proven": 0}, False), (None, True)])
def test_a_gate_blocks_what_is_read_or_not_decided(training, monkeypatch, counts, blocked):
    folder, before, after = training
    crossed = ("proven>0",) if counts and counts["proven"] else ()
    monkeypatch.setattr("gradaudit.integrations.gatekeeper.gate", lambda *_: Gate("decode", counts, crossed, 1.0))
    recorder = GateFilter(str(folder))
    through(recorder, FilterChainType.TASK_DATA_CHAIN, DataKind.WEIGHTS, before)
    if blocked:
        with pytest.raises(ContentBlockedException, match="did not let the update out"):
            through(recorder, FilterChainType.TASK_RESULT_CHAIN, DataKind.WEIGHTS, after)
    else:
        assert through(recorder, FilterChainType.TASK_RESULT_CHAIN, DataKind.WEIGHTS, after) is None


CLIENT = """
import nvflare.client as flare
import torch
flare.init()
while flare.is_running():
    got = flare.receive()
    moved = 0.01 if flare.get_site_name() == "site-1" else 0.02
    params = {name: torch.as_tensor(value) + moved for name, value in got.params.items()}
    flare.send(flare.FLModel(params=params, meta={"NUM_STEPS_CURRENT_ROUND": 1}))
"""
JOB = """
import torch
from nvflare.app_opt.pt.recipes.fedavg import FedAvgRecipe
from nvflare.recipe import SimEnv
from transformers import AutoModelForSequenceClassification
from gradaudit.integrations.nvflare import AuditFilter
model = AutoModelForSequenceClassification.from_pretrained(HERE + "/model")
torch.save(model.state_dict(), HERE + "/start.pt")  # NVFlare writes the configuration alone into the job's
model.config.dtype = None  # of which it knows no types of torch
recipe = FedAvgRecipe(name="job", model=model, initial_ckpt=HERE + "/start.pt", min_clients=2, num_rounds=1,
                      train_script=HERE + "/client.py")
for side, add in (("client", recipe.add_client_input_filter), ("client", recipe.add_client_output_filter),
                  ("server", recipe.add_server_output_filter), ("server", recipe.add_server_input_filter)):
    add(AuditFilter(HERE + "/" + side, HERE + "/model"), tasks=["train"])
recipe.execute(SimEnv(num_clients=2, workspace_root=HERE + "/work"))
"""


def test_the_simulator_s_rounds_are_recorded_at_the_clients_and_at_the_server(training, tmp_path):
    _, before, _ = training
    (tmp_path / "client.py").write_text(CLIENT, encoding="utf8")
    (tmp_path / "job.py").write_text(f"HERE = {str(tmp_path)!r}\n" + JOB, encoding="utf8")
    told = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    command = [sys.executable, str(tmp_path / "job.py")]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    for side in ("client", "server"):
        made = sorted((tmp_path / side / "round-1").iterdir())
        assert [path.name for path in made] == ["site-1", "site-2"], done.stdout[-3000:]
        for path, moved in zip(made, (0.01, 0.02), strict=True):
            found = load_bundle(path)
            assert set(found.tensors) == set(before)
            assert all(torch.equal(v, torch.from_numpy(before[n])) for n, v in found.model.parameters().items())
            assert all(torch.allclose(v, torch.full_like(v, moved), atol=1e-6) for v in found.tensors.values())
