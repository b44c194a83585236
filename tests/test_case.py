"""Cases: what a TOML file may say, what each mistake is answered with, and what the hash covers."""

from __future__ import annotations

from pathlib import Path

import pytest

from gradaudit.case import load_case, parse_case
from gradaudit.catalog import EXAMPLE
from gradaudit.errors import BadInputError
from gradaudit.registry import identity

CONTRACT = """
model = "minilm"
task = "classification"
seed = 0
[data]
path = "in_domain_train.tsv"
header = false
text = 3
label = 1
shuffle_seed = 101
batch_size = 4
batches = 10
[client]
dropout = true
freeze = ["embeddings"]
[knowledge]
labels = false
lengths = false
[attack]
name = "dager"
"""


@pytest.fixture
def write(tmp_path: Path):
    def writer(text: str) -> Path:
        path = tmp_path / "case.toml"
        path.write_text(text, encoding="utf8")
        return path

    return writer


def test_the_contract_case_is_read(write):
    case = load_case(write(CONTRACT))
    assert case.data.text == 3
    assert case.data.batch_size == 4
    assert case.client.dropout
    assert case.client.freeze == ("embeddings",)
    assert case.build_attack().name == "dager"


def test_the_printed_example_is_a_case(write):
    assert load_case(write(EXAMPLE)).build_attack().name == "auto"


def test_defaults_need_nothing():
    case = parse_case({})
    assert case.attack == {"name": "auto"}
    assert case.model == "minilm"
    assert case.data.source == "sample"


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("modle = 'minilm'\n" + CONTRACT, "unknown key 'modle'; did you mean 'model'?"),
        (
            CONTRACT.replace("dropout = true", "dropuot = true"),
            "unknown key in [client] 'dropuot'; did you mean 'dropout'?",
        ),
        (
            CONTRACT.replace("labels = false", "lables = false"),
            "unknown key in [knowledge] 'lables'; did you mean 'labels'?",
        ),
        (CONTRACT.replace('"dager"', '"dagger"'), "unknown attack 'dagger'; did you mean 'dager'?"),
        (CONTRACT + "stps = 3\n", "unknown field of attack 'dager' 'stps'"),
        (CONTRACT + 'max_candidates = "many"\n', "attack 'dager': max_candidates"),
        (CONTRACT.replace("batch_size = 4", "batch_size = 0"), "data.batch_size"),
        (CONTRACT.replace("classification", "clasification"), "task"),
        (CONTRACT + '[selection]\ntensors = "0:z"\n', "names role 'z'"),
        (CONTRACT + '[metrics]\npublished = ["max"]\n', "unknown published scoring 'max'"),
        (CONTRACT + '[[defense]]\nname = "gausian"\n', "unknown defense 'gausian'; did you mean 'gaussian'?"),
        (CONTRACT + '[[defense]]\nname = "gaussian"\nsigma = 0.0\n', "sigma must be above 0"),
        (CONTRACT + '[[defense]]\nname = "gaussian"\nsigma = inf\n', "sigma must be above 0 and finite"),
        (CONTRACT.replace("dropout = true", "dropout = false\ndropout_rate = 0.2", 1), "needs dropout = true"),
        (
            CONTRACT.replace("dropout = true", 'dropout = true\nprecision = "bf16-weights"', 1) + "[lora]\nrank = 4\n",
            "adapters are kept in float32",
        ),
        ("", "is empty"),
        ("model = ", "is not TOML"),
    ],
)
def test_each_mistake_gets_its_sentence(write, change: str, said: str):
    with pytest.raises(BadInputError) as caught:
        load_case(write(change))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_no_such_file(tmp_path: Path):
    with pytest.raises(BadInputError, match="no such case file"):
        load_case(tmp_path / "none.toml")


def test_set_overrides_and_reads_toml_values(write):
    path = write(CONTRACT)
    case = load_case(path, ["attack.max_candidates=100", "data.batches=2", "model=mpnet", "client.freeze=[]"])
    assert case.attack["max_candidates"] == 100
    assert case.data.batches == 2
    assert case.model == "mpnet"
    assert case.client.freeze == ()


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("attack", "key=value"),
        ("=3", "key=value"),
        ("model.name=3", "is a value, not a table"),
        ("attack.stps=3", "stps"),
    ],
)
def test_a_wrong_override_is_refused(write, setting: str, said: str):
    with pytest.raises(BadInputError, match=said):
        load_case(write(CONTRACT), [setting])


def test_the_hash_changes_with_what_changes_results_and_only_then(write):
    base = load_case(write(CONTRACT)).content_hash()
    assert load_case(write("# a comment\n" + CONTRACT)).content_hash() == base
    assert load_case(write(CONTRACT + "max_candidates = 10000000\n")).content_hash() == base  # the default, spelled out
    changes = (
        "seed=1",
        "attack.max_candidates=5",
        "knowledge.lengths=true",
        "data.batch_size=2",
        "client.dropout_rate=0.2",
    )
    for setting in changes:
        assert load_case(write(CONTRACT), [setting]).content_hash() != base, setting


def test_a_field_that_came_later_changes_the_hash_only_where_it_is_set(write):
    """Or every record of before would be of another case."""
    case = {"attack": {"name": "lamp"}}
    assert "norm" not in identity(parse_case(case).build_attack(), True)
    local = case | {"client": {"optimizer": "sgd", "epochs": 2}}
    for of, acts in ((case, False), (local, True)):
        other = of | {"attack": {"name": "lamp", "replayed_steps": 0}}
        assert (parse_case(other).content_hash() != parse_case(of).content_hash()) == acts
    base = parse_case(case).content_hash()
    assert parse_case(case | {"knowledge": {"longest": False}}).content_hash() == base
    assert parse_case(case | {"knowledge": {"longest": True}}).content_hash() != base
    assert parse_case({"attack": {"name": "lamp", "norm": 1.4}}).content_hash() == base
    assert parse_case({"attack": {"name": "lamp", "norm": 1.0}}).content_hash() != base


def test_the_resolved_case_is_the_same_case(write):
    case = load_case(write(CONTRACT))
    assert parse_case(case.resolved()).content_hash() == case.content_hash()


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ({"attack": {"name": "lti"}, "public": {"path": "x.txt"}}, "7360bb6b33af1365"),
        ({"attack": {"name": "decode"}, "defense": [{"name": "topk"}, {"name": "clip"}]}, "80b55a0ef1264ea5"),
        (
            {"attack": {"name": "lti", "share": 0.01}, "task": "causal-lm", "data": {"window": 16},
             "public": {"hub": "x", "rows": 9}},
            "10c286f1be031c2e",
        ),
    ],
)  # fmt: skip
def test_keys_that_came_later_leave_the_ids_of_older_cases_as_they_were(case, expected):
    """Made by commit 839dae4, before `learner = "layers"`, `language`, `whole` and `lpips` came."""
    assert parse_case(case).content_hash() == expected


def test_data_in_the_place_of_a_case_is_told_how_to_become_one(tmp_path):
    path = tmp_path / "my.csv"
    path.write_text("body,topic\nhello,a\n")
    with pytest.raises(BadInputError, match="gradaudit init"):
        load_case(path)
