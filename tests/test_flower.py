"""Flower: what its clients change is recorded at the server and at the client, and no round breaks by it.

The real engine runs where Flower is installed (extra `flower`); elsewhere its messages are stood in for, by what the
recorders take of them.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gradaudit.bundles.bundle import load_bundle, read_manifest
from gradaudit.bundles.examine import examine
from gradaudit.bundles.gate import Gate
from gradaudit.errors import BadInputError
from gradaudit.integrations import flower
from gradaudit.integrations.flower import AuditGrid, audit_mod, gate_mod
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from gradaudit.types import LocalTraining

EXAMPLE = Path(__file__).parent.parent / "examples" / "flower"
REAL = pytest.mark.skipif(
    importlib.util.find_spec("flwr") is None or importlib.util.find_spec("ray") is None,
    reason="Flower's simulation engine is not installed: pip install 'gradaudit[flower]'",
)


def stored(value: np.ndarray) -> Any:
    """What the recorders take of Flower's Array."""
    file = BytesIO()
    np.save(file, value, allow_pickle=False)
    return SimpleNamespace(stype="numpy.ndarray", data=file.getvalue(), numpy=value.copy)


def message(arrays: Any, kind: str = "train", node: int = 7, round_: int | None = 1, failed: bool = False) -> Any:
    records = {} if arrays is None else {"arrays": {name: stored(value) for name, value in arrays.items()}}
    config = {} if round_ is None else {"config": {"server-round": round_}}
    return SimpleNamespace(
        metadata=SimpleNamespace(message_type=kind, dst_node_id=node, src_node_id=node),
        content=SimpleNamespace(array_records=records, config_records=config),
        has_error=lambda: failed,
        error=SimpleNamespace(reason="no memory"),
    )


@pytest.fixture
def training(folders):
    """A model, its tokenizer, its state as Flower sends it, and what a client makes of that state."""
    made = load_model(ModelSpec(f"random:{folders['bert']}"))
    before = {name: value.numpy().copy() for name, value in made.module.state_dict().items()}
    rng = np.random.default_rng(0)
    after = {name: value + rng.normal(0, 1e-3, value.shape).astype(np.float32) for name, value in before.items()}
    return made, before, after


ARRAYS = {
    "rows first": np.arange(6, dtype=np.float32).reshape(2, 3),
    "columns first": np.asfortranarray(np.arange(6, dtype=np.float32).reshape(2, 3)),
    "one number": np.array(7),
    "half": np.ones((2, 2), np.float16),
    "empty": np.zeros((0, 4), np.float32),
    "another version": np.zeros(1, [("\u0436", "<f4")]),
}


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("real", [False, pytest.param(True, marks=REAL)])
def test_arrays_are_read_as_flower_stores_them(name, real):
    value = ARRAYS[name]
    if real:
        from flwr.app import Array

        array = Array(value)
    else:
        array = stored(value)
    read = flower._viewed(array)
    np.testing.assert_array_equal(read, value)
    assert (read.dtype, read.shape) == (value.dtype, value.shape)
    if name == "columns first":
        assert not read.flags.owndata


def test_an_array_stored_in_another_way_is_asked_of_flower():
    array = SimpleNamespace(stype="other", data=b"?", numpy=lambda: np.ones(2))
    np.testing.assert_array_equal(flower._viewed(array), np.ones(2))


class Grid:
    """A grid whose clients answer with what is given."""

    def __init__(self, *replies: Any) -> None:
        self.replies, self.run = replies, "a run"

    def send_and_receive(self, messages: Any, *, timeout: float | None = None) -> Any:
        self.sent, self.timeout = list(messages), timeout
        return iter(self.replies)


@pytest.mark.parametrize("numbered", [False, True])
def test_the_grid_records_what_each_client_changed_and_hands_the_replies_on(training, tmp_path, numbered):
    made, before, after = training
    if numbered:  # arrays without names, in order
        before, after = ({str(n): v for n, v in enumerate(each.values())} for each in (before, after))
    replies = [message(after, node=1), message(before, node=2), message(after, node=3)]
    grid = Grid(*replies)
    how = LocalTraining("sgd", 0.1)
    audit = AuditGrid(grid, tmp_path, model=made.module, tokenizer=made.tokenizer, training=how, sentences=2)
    sent = [message(before, node=n) for n in (3, 1, 2)]
    assert audit.send_and_receive(iter(sent), timeout=5) == replies
    assert (grid.sent, grid.timeout, audit.run) == (sent, 5, "a run")
    assert sorted(path.name for path in (tmp_path / "round-1").iterdir()) == ["node-1", "node-3"], "2 changed nothing"
    found = load_bundle(tmp_path / "round-1" / "node-3")
    assert found.manifest.knowledge["batch_size"] == 2
    assert found.manifest.knowledge["dropout"] is None
    for (name, value), a, b in zip(made.module.state_dict().items(), before.values(), after.values(), strict=True):
        assert torch.equal(found.tensors[name], torch.from_numpy(b - a)), name
        assert torch.equal(found.model.parameters()[name], value)


def test_a_mod_records_what_passes_through_it(training, tmp_path):
    made, before, after = training
    mod = audit_mod(tmp_path, model=made.module, tokenizer=made.tokenizer)

    def app(asked: Any, context: Any) -> Any:
        record = asked.content.array_records["arrays"]
        for name in list(record):  # an app may put other arrays in the place of what it was sent, or take them out
            record[name] = stored(np.zeros(3))
        return message(after)

    asked = message(before, round_=4)
    assert mod(asked, "context", app).content.array_records["arrays"] is not None
    found = load_bundle(tmp_path / "round-4" / "node-7")
    name = "classifier.weight"
    assert torch.equal(found.tensors[name], torch.from_numpy(after[name] - before[name]))


@pytest.mark.parametrize("model", ["folder", "module"])
def test_every_and_most_limit_what_is_written(training, tmp_path, caplog, model):
    made, before, after = training
    made.module.save_pretrained(tmp_path / "m")
    made.tokenizer.save_pretrained(tmp_path / "m")
    how = {"model": tmp_path / "m"} if model == "folder" else {"model": made.module, "tokenizer": made.tokenizer}
    audit = AuditGrid(Grid(message(after)), tmp_path / "up", every=2, most=2, **how)
    for number in range(1, 8):
        audit.send_and_receive([message(before, kind="evaluate")])
        audit.send_and_receive([message(before, round_=None if model == "folder" else number)])
    assert sorted(path.name for path in (tmp_path / "up").iterdir()) == ["round-1", "round-3"]
    assert caplog.text.count("holds 2 bundles, and most = 2: no more are recorded") == 1


@pytest.mark.parametrize("model", ["folder", "module", "adapters"])
def test_a_training_draws_the_same_numbers_with_and_without_a_recorder(training, tmp_path, model):
    made, before, after = training
    made.module.save_pretrained(tmp_path / "m")
    made.tokenizer.save_pretrained(tmp_path / "m")
    how = {"model": tmp_path / "m"} if model == "folder" else {"model": made.module, "tokenizer": made.tokenizer}
    if model == "adapters":
        peft = pytest.importorskip("peft")
        told = peft.LoraConfig(task_type="SEQ_CLS", r=2, target_modules=["query"])
        how["model"] = peft.get_peft_model(made.module, told)
        before = {name: value.numpy() for name, value in peft.get_peft_model_state_dict(how["model"]).items()}
        after = {name: value + np.float32(1e-3) for name, value in before.items()}
    mod = audit_mod(tmp_path / "up", **how)
    state = torch.get_rng_state()
    mod(message(before), None, lambda *_: message(after))
    assert torch.equal(torch.get_rng_state(), state)
    assert load_bundle(tmp_path / "up" / "round-1" / "node-7").tensors


@pytest.mark.parametrize(
    ("fault", "said"),
    [("empty", "0 records of arrays"), ("error", "no memory"), ("a change", "a change was given"),
     ("another model", "is of another model"), ("a bug", "Traceback"), ("nothing", "are the same")],
)  # fmt: skip
def test_no_round_breaks_and_the_log_says_why(training, tmp_path, caplog, monkeypatch, fault, said):
    made, before, after = training
    reply = message(after, failed=fault == "error")
    if fault == "empty":
        reply = message(None)
    if fault == "a change":
        reply = message({name: value - before[name] for name, value in after.items()})
    if fault == "another model":
        reply = message({name: value[..., :-1] for name, value in after.items()})
    if fault == "nothing":
        reply = message(before)
    if fault == "a bug":
        monkeypatch.setattr("gradaudit.integrations.recording.bundle", lambda *_, **__: 1 / 0)
    audit = AuditGrid(Grid(reply), tmp_path / "up", model=made.module, tokenizer=made.tokenizer)
    mod = audit_mod(tmp_path / "up", model=made.module, tokenizer=made.tokenizer)
    with caplog.at_level(logging.WARNING, "gradaudit"):
        assert audit.send_and_receive([message(before)]) == [reply]
        assert mod(message(before), None, lambda *_: reply) is reply
    assert caplog.text.count(said) >= 2
    assert "round 1, node 7 is not recorded" in caplog.text
    assert not list((tmp_path / "up").glob("**/manifest.json"))


@pytest.mark.parametrize(
    ("found", "said"),
    [(Gate("decode", {"proven": 1}, ("proven>0",), 1.0), "closed"), (Gate("decode", {"proven": 0}, (), 1.0), None),
     (Gate("decode", None, (), 60.0), "not decided"), (BadInputError("no room"), "not decided: no room"),
     (ZeroDivisionError("a bug"), "the gate failed")],
)  # fmt: skip
def test_a_gate_holds_back_what_is_read_or_not_decided(training, monkeypatch, found, said):
    made, before, after = training

    def judged(*_: Any) -> Gate:
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr("gradaudit.integrations.gatekeeper.gate", judged)
    monkeypatch.setattr("gradaudit.integrations.flower._refused", lambda asked, why: (asked, why))
    mod = gate_mod(model=made.module, tokenizer=made.tokenizer)
    asked, reply = message(before), message(after)
    answer = mod(asked, None, lambda *_: reply)
    if said is None:
        assert answer is reply
    else:
        assert answer[0] is asked
        assert said in answer[1]
    assert mod(message(before, kind="evaluate"), None, lambda *_: reply) is reply
    empty = mod(asked, None, lambda *_: message(None))
    assert "0 records of arrays" in empty[1], "what cannot be judged is not sent"


def simulate(where: Path, program: str) -> None:
    """Run a program with the simulation engine in a process of its own, whose workers find the example."""
    paths = [str(EXAMPLE), str(where), *sys.path]
    told = {"PYTHONPATH": os.pathsep.join(p for p in paths if p), "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0"}
    (where / "program.py").write_text(program, encoding="utf8")
    command = [sys.executable, str(where / "program.py")]
    done = subprocess.run(command, cwd=where, env=os.environ | told, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


RUN = """
from flwr.simulation import run_simulation
run_simulation(server, client, 2, backend_config={"client_resources": {"num_cpus": 1, "num_gpus": 0.0}})
"""


@REAL
@pytest.mark.minilm
def test_the_example_s_updates_are_read_at_the_server(tmp_path):
    simulate(
        tmp_path,
        "from audited.client_app import app as client\nfrom audited.server_app import app as server\n" + RUN,
    )
    assert sorted(path.name for path in (tmp_path / "updates").iterdir()) == ["round-1", "round-2"]
    (first, second) = sorted((tmp_path / "updates" / "round-1").iterdir())
    assert read_manifest(first).model.fingerprint == read_manifest(second).model.fingerprint
    found = examine(first, None, [], "all", None, 0, torch.device("cpu"))
    assert (found.attack, found.by) == ("auto", "decode")
    messages = ("clara berg refused insulin on 14 march.", "please wire tobias 900 euros before friday.")
    assert found.texts in [(text,) for text in messages]
    assert found.certificates == ("proven",)


BEHIND = """
from flwr.app import ArrayRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.clientapp.mod import LocalDpMod
from flwr.serverapp import ServerApp
from flwr.serverapp.strategy import FedAvg
from transformers import AutoModelForSequenceClassification
from gradaudit.errors import BadInputError
from gradaudit.integrations import flower
from gradaudit.integrations.flower import audit_mod


def record(folder):
    return audit_mod(HERE + "/" + folder, model=HERE + "/model")


client, server = ClientApp(mods=[record("sent")]), ServerApp()


@client.train(mods=[GATE, LocalDpMod(1.0, 1e-4, 10.0, 1e-5), record("trained")])
def fit(message, context):
    state = {name: value + 0.1 for name, value in message.content["arrays"].to_torch_state_dict().items()}
    content = RecordDict({"arrays": ArrayRecord(state), "metrics": MetricRecord({"num-examples": 1})})
    return Message(content=content, reply_to=message)


@server.main()
def main(grid, context):
    model = AutoModelForSequenceClassification.from_pretrained(HERE + "/model")
    strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=2)
    strategy.start(grid=grid, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=1)
"""


@REAL
def test_two_mods_measure_what_a_defense_between_them_does(folders, tmp_path):
    made = load_model(ModelSpec(f"random:{folders['bert']}"))
    made.module.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    simulate(tmp_path, f"HERE = {str(tmp_path)!r}\n" + BEHIND.replace("GATE, ", "") + RUN)
    norms = {}
    for side in ("sent", "trained"):
        made_ = sorted((tmp_path / side / "round-1").iterdir())
        assert len(made_) == 2
        tensors = load_file(made_[0] / "update.safetensors")
        norms[side] = sum(float(value.square().sum()) for value in tensors.values()) ** 0.5
    count = sum(p.numel() for p in made.module.parameters())
    assert norms["trained"] == pytest.approx(0.1 * count**0.5, rel=1e-3)
    assert norms["sent"] == pytest.approx(1.0, rel=1e-2), "clipped to 1, and the noise is small"


@REAL
def test_a_closed_gate_sends_an_error_in_the_place_of_the_update(folders, tmp_path):
    made = load_model(ModelSpec(f"random:{folders['bert']}"))
    made.module.save_pretrained(tmp_path / "model")
    made.tokenizer.save_pretrained(tmp_path / "model")
    gate = "gate_mod(model=HERE + '/model', fail_on=['sentences>=0'], within=100, attack='blind', sentences=1), "
    program = BEHIND.replace("GATE, ", gate).replace("import audit_mod", "import audit_mod, gate_mod")
    simulate(tmp_path, f"HERE = {str(tmp_path)!r}\n" + program + RUN)
    assert len(list((tmp_path / "trained" / "round-1").iterdir())) == 2
    assert not (tmp_path / "sent").exists(), "what was trained was not sent"
