"""`gradaudit gate`: closed where something was read, open where not, undecided where time is over."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import gradaudit as package
from gradaudit.audit.thresholds import parse
from gradaudit.bundles.examine import examine
from gradaudit.bundles.gate import COUNTS, USUAL, gate, judged
from gradaudit.errors import BadInputError
from gradaudit.models.spec import ModelSpec
from gradaudit.models.zoo import load_model
from tiny_models import sentences

TEXTS = sentences([4, 3], seed=1)


@pytest.fixture(scope="module")
def update(folders, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A captured gradient of a tiny decoder."""
    made = load_model(ModelSpec(f"random:{folders['llama']}"))
    batch = made.tokenizer(TEXTS, padding=True, return_tensors="pt")
    folder = tmp_path_factory.mktemp("sent") / "up"
    with package.capture(made.module, folder, tokenizer=made.tokenizer):
        made.module(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"],
                    labels=torch.tensor([1, 0])).loss.backward()  # fmt: skip
    return folder


def test_an_update_that_is_read_closes_the_gate_and_nothing_of_it_is_printed(update, gradaudit):
    code, out, err = gradaudit("gate", update, "--attack", "decode", "--json", "--within", "100")
    assert code == 1, err
    found = json.loads(out)
    assert found["counts"]["proven"] == found["counts"]["sentences"] == 2
    assert list(found["counts"]) == list(COUNTS)
    assert found["crossed"] == ["proven>0"]
    assert not any(word in out + err for text in TEXTS for word in text.split())


def test_what_is_read_without_proof_leaves_it_open_and_is_not_called_safe(update):
    found = examine(update, "blind", [], "all", None, 0, torch.device("cpu"))
    opened = judged(found.as_json(), "blind", parse(USUAL, tuple(COUNTS)), 1.0)
    assert not opened.crossed
    assert opened.sentence.startswith("open: 'blind' read sentences 2")
    assert "no sign of safety" in opened.sentence


def test_time_that_is_over_is_no_pass(update, gradaudit):
    code, out, _ = gradaudit("gate", update, "--within", "0.2", "--fail-on", "sentences>0")
    assert code == 3
    assert "not decided" in out


@pytest.mark.parametrize(
    ("given", "said"),
    [(["--fail-on", "exact>0"], "unknown score 'exact'"), (["--fail-on", "proven"], "proven>0 or certain_words>0"),
     (["--within", "0"], "time above 0"), (["--attack", "tag", "--set", "stps=1"], "did you mean 'steps'")],
)  # fmt: skip
def test_bad_input_is_one_sentence(update, gradaudit, given, said):
    code, _, err = gradaudit("gate", update, *given)
    assert code == 2
    assert said in err
    assert len(err.strip().splitlines()) == 1


def test_what_is_no_bundle_is_said_before_a_process_starts(tmp_path):
    with pytest.raises(BadInputError, match="no such bundle"):
        gate(tmp_path / "none")
