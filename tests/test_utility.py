"""Utility: a task that can be learned is learned, noise costs it, and what is tested on is never trained on."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import gradaudit.data.text
import gradaudit.sweeps.utility
from gradaudit.accounting.epsilon import gaussian_epsilon, sampled_epsilons
from gradaudit.audit.prepare import prepare
from gradaudit.case import parse_case
from gradaudit.cli import app
from gradaudit.client.client import Client
from gradaudit.data.draw import draw
from gradaudit.data.rows import bind
from gradaudit.errors import BadInputError, NotSupportedError
from gradaudit.models.state import fingerprint_of
from gradaudit.sweeps.sweep import load_sweep, run_sweep
from gradaudit.sweeps.utility import Utility, UtilityTable, kept_utility, utility

CPU = torch.device("cpu")
SHORT = UtilityTable(steps=80, batch_size=8, learning_rate=3e-3, test_rows=60)


_ENDS = "maria peter london paris seven twelve ninety monday friday horse rabbit eagle spider mouse tiger whale".split()
TAILS = [f"{one} {other}" for one in _ENDS for other in _ENDS]
"""So that no sentence is another's, or a part of it."""


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """240 sentences; those of class 1 have the word "cold", the others "warm"."""
    draw, words = random.Random(0), "river stone cloud garden window letter doctor teacher".split()
    lines = ["text,label"]
    for n in range(240):
        some = draw.choices(words, k=4)
        some.insert(draw.randrange(4), "cold" if n % 2 else "warm")
        lines.append(f"{' '.join(some)} {TAILS[n]},{n % 2}")
    path = tmp_path / "rows.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def measured(folders: Any, rows: Path, how: UtilityTable = SHORT, **over: Any) -> Utility:
    return utility(*given(folders, rows, how, **over))


def given(folders: Any, rows: Path, how: UtilityTable = SHORT, **over: Any) -> tuple[Any, ...]:
    data = {
        "model": f"random:{folders['bert']}",
        "data": {"path": str(rows), "label": "label"},
        "attack": {"name": "blind"},
    }
    ready = prepare(parse_case(data | over), Path.cwd(), CPU)
    return ready.case, how, ready.model, ready.rows


def test_a_task_is_learned_and_noise_costs_it(folders, rows):
    plain = measured(folders, rows)
    assert plain.before < 75
    assert plain.accuracy > 90
    assert plain.mcc > 80
    assert plain.epsilon is None
    assert (plain.train_rows, plain.test_rows) == (180, 60)
    noisy = measured(folders, rows, defense=[{"name": "gaussian", "sigma": 100.0}])
    assert noisy.accuracy < plain.accuracy - 20
    assert measured(folders, rows).accuracy == plain.accuracy


def test_adapters_are_trained_in_place_of_the_model(folders, rows, monkeypatch):
    pytest.importorskip("peft")
    sent: list[set[str]] = []
    original = gradaudit.sweeps.utility.mean_update

    def seen(client: Any, *given: Any) -> Any:
        update = original(client, *given)
        sent.append({n for n in update.tensors if "lora_" not in n})
        return update

    monkeypatch.setattr(gradaudit.sweeps.utility, "mean_update", seen)
    how = SHORT.model_copy(update={"learning_rate": 1e-2})
    tuned = measured(folders, rows, how, lora={"rank": 8, "modules": "all-linear"})
    assert tuned.before < 75
    assert tuned.accuracy > 90
    assert len(sent) == SHORT.steps
    assert all(0 < len(names) <= 4 for names in sent), "beside adapters only the head"


def test_rows_that_adapters_were_warmed_up_on_are_neither_trained_nor_tested_on(folders, rows):
    pytest.importorskip("peft")
    case, how, model, data = given(folders, rows, lora={"rank": 2, "modules": "all-linear", "warmup": 5})
    used = gradaudit.sweeps.utility._seen_before(case, data)
    assert len(used) == 40
    assert not used & {number for batch in draw(case.data, data.source) for number in batch}
    train, test = gradaudit.sweeps.utility._split(case, how, bind(model, data.source), used)
    assert not used & {*train, *test}
    assert len(train) == 240 - 40 - 60


def test_each_round_begins_with_what_the_last_one_held_back(folders, rows, monkeypatch):
    before: list[Any] = []
    original = gradaudit.sweeps.utility.feedback_round

    def seen(client: Any, batch: Any, clients: int, held: Any, rng: Any) -> Any:
        before.append(held)
        return original(client, batch, clients, held, rng)

    monkeypatch.setattr(gradaudit.sweeps.utility, "feedback_round", seen)
    all_sent = measured(folders, rows, defense=[{"name": "error-feedback"}, {"name": "topk", "keep": 1.0}])
    assert all_sent.accuracy > 90
    assert len(before) == SHORT.steps
    assert before[0] is None
    assert all(float(value.abs().max()) == 0 for held in before[1:] for value in held.values())
    before.clear()
    measured(folders, rows, defense=[{"name": "error-feedback"}, {"name": "topk", "keep": 0.1}])
    assert before[0] is None
    assert all(any(float(value.abs().max()) > 0 for value in held.values()) for held in before[1:])


def test_weight_changes_are_added(folders, rows):
    local = {"optimizer": "adamw", "learning_rate": 3e-3}
    assert measured(folders, rows, client=local).accuracy > 90
    still = measured(folders, rows, client=local | {"learning_rate": 1e-12})
    assert still.accuracy == still.before


def test_clipped_and_noised_gradients_of_examples_cost_too_and_their_epsilon_is_said(folders, rows):
    loose = measured(folders, rows, defense=[{"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 0.01}])
    assert loose.accuracy > 90
    tight = measured(folders, rows, defense=[{"name": "dp-sgd", "clip": 1.0, "noise_multiplier": 20.0}])
    assert tight.accuracy < loose.accuracy - 20
    expected = sampled_epsilons(20.0, 8 / 180, 80, 0.1 / 180)
    assert tight.delta == 0.1 / 180
    assert tight.epsilon == min(e for e in expected.values() if e is not None)
    assert loose.epsilon is not None
    assert loose.epsilon > 1000 * tight.epsilon
    assert measured(folders, rows, defense=[{"name": "dp-sgd", "noise_multiplier": 0.0}]).epsilon is None


def test_what_is_tested_on_is_never_trained_on_and_every_row_is_one_or_the_other(folders, rows, monkeypatch):
    trained: set[str] = set()
    real = Client.update
    monkeypatch.setattr(
        Client, "update", lambda self, batch, *a, **k: trained.update(batch.texts) or real(self, batch, *a, **k)
    )
    tested: list[set[str]] = []
    said = gradaudit.data.text.Sentences.said
    monkeypatch.setattr(
        gradaudit.data.text.Sentences,
        "said",
        lambda self, chosen: tested.append({self.source.texts[i] for i in chosen}) or said(self, chosen),
    )
    measured(folders, rows)
    held = tested[0]
    assert len(held) == 60
    assert not held & trained
    assert len(trained) == 180, "640 draws without replacement pass over all"


def test_sampling_draws_each_row_by_chance_and_divides_by_the_expected_batch(folders, rows, monkeypatch):
    seen: list[tuple[int, float]] = []
    real = Client.update

    def update(self, batch, rng, expected=None):
        seen.append((len(batch.ids), expected))
        return real(self, batch, rng, expected)

    monkeypatch.setattr(Client, "update", update)
    measured(folders, rows, UtilityTable(steps=60, batch_size=4, test_rows=60), defense=[{"name": "dp-sgd"}])
    sizes = torch.tensor([float(n) for n, _ in seen])
    assert {e for _, e in seen} == {4.0}
    assert float(sizes.mean()) == pytest.approx(4.0, abs=4 * (4 / 60) ** 0.5)
    assert len(set(sizes.tolist())) > 3


def test_the_model_is_left_as_it_was(folders, rows):
    case, how, model, data = given(folders, rows)
    before, changed = fingerprint_of(model.parameters()), model.remember()
    utility(case, how, model, data)
    assert not changed()
    assert fingerprint_of(model.parameters()) == before


def test_it_is_measured_once_and_again_where_the_file_was_cut(folders, rows, tmp_path, monkeypatch):
    asked = given(folders, rows, UtilityTable(steps=2, batch_size=4, test_rows=60))
    first = kept_utility(tmp_path / "kept", *asked)
    (path,) = (tmp_path / "kept").iterdir()
    monkeypatch.setattr(gradaudit.sweeps.utility, "utility", lambda *_: pytest.fail("measured again"))
    assert kept_utility(tmp_path / "kept", *asked) == first
    monkeypatch.undo()
    path.write_text(path.read_text()[:20])
    assert kept_utility(tmp_path / "kept", *asked).accuracy == first.accuracy
    other = given(folders, rows, UtilityTable(steps=3, batch_size=4, test_rows=60))
    kept_utility(tmp_path / "kept", *other)
    assert len(list((tmp_path / "kept").iterdir())) == 2


def test_what_cannot_be_measured_says_why(folders, rows, monkeypatch):
    with pytest.raises(BadInputError, match="rows are left to train on"):
        measured(folders, rows, UtilityTable(test_rows=239))
    with pytest.raises(NotSupportedError, match="classification"):
        measured(folders, rows, model=f"random:{folders['gpt2']}", task="causal-lm")
    monkeypatch.setitem(sys.modules, "torchmetrics.functional", None)
    with pytest.raises(BadInputError, match=r"gradaudit\[utility\]"):
        measured(folders, rows)


def test_a_sweep_measures_each_client_once_and_writes_what_it_costs(folders, rows, tmp_path, monkeypatch):
    path = tmp_path / "sweep.toml"
    path.write_text(
        f'model = "random:{folders["bert"]}"\n[data]\npath = "rows.csv"\nlabel = "label"\n'
        "[utility]\nsteps = 3\nbatch_size = 4\ntest_rows = 60\n"
        '[axes]\nattack = [{name = "blind"}, {name = "dager"}]\ndefense = [[], [{name = "dp-sgd"}]]\n'
    )
    calls = []
    real = gradaudit.sweeps.utility.utility
    monkeypatch.setattr(gradaudit.sweeps.utility, "utility", lambda *a: calls.append(1) or real(*a))
    results = list(run_sweep(load_sweep(path), tmp_path, tmp_path / "out", CPU))
    assert len(calls) == 2
    assert [r.utility.epsilon is None for r in results if r.utility] == [True, False, True]
    assert [r.unsupported for r in results] == [False, False, False, True], "dager has no counter to dp-sgd here"
    told = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    assert len(calls) == 2
    assert "mcc" in told.stdout
    page = tmp_path / "out" / "frontier.html"
    assert "What was read best" in page.read_text()
    words = set(rows.read_text().replace(",", " ").split()) - {"text", "label", "the", "0", "1"}
    body = page.read_text().split("</style>")[1].lower()
    assert not [word for word in words if f">{word}<" in body], "private words without being asked for"
    shown = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / "out"), "--show-text"])
    assert shown.exit_code == 0, shown.output
    body = page.read_text().split("</style>")[1].lower()
    assert [word for word in words if f">{word}<" in body]
    assert page.stat().st_mode & 0o077 == 0, "others may read the private text"
    header, first = (tmp_path / "out" / "sweep.csv").read_text().splitlines()[:2]
    assert dict(zip(header.split(","), first.split(","), strict=True))["accuracy"] != ""


@pytest.mark.parametrize(("line", "said"), [("stps = 3", "did you mean 'steps'"), ("steps = 0", "utility.steps")])
def test_a_utility_table_that_is_none_is_refused(tmp_path, line, said):
    path = tmp_path / "sweep.toml"
    path.write_text(f'[attack]\nname = "blind"\n[utility]\n{line}\n[axes]\nseed = [1, 2]\n')
    with pytest.raises(BadInputError) as refused:
        load_sweep(path)
    assert said in str(refused.value)


def test_the_page_has_every_key_with_its_meaning():
    text = (Path(__file__).resolve().parent.parent / "docs" / "cli.md").read_text(encoding="utf8")
    for key, field in UtilityTable.model_fields.items():
        assert f"| `{key}` |" in text
        assert str(field.description) in text


def test_rows_that_are_parts_of_tested_rows_are_not_trained_on(folders, rows):
    lines = rows.read_text().splitlines()
    body = [line.rsplit(",", 1) for line in lines[1:]]
    parts = [f"{' '.join(text.split()[1:])},{label}" for text, label in body]
    rows.write_text("\n".join([*lines, *parts, "The " + lines[1]]) + "\n")
    case, how, model, data = given(folders, rows)
    train, test = gradaudit.sweeps.utility._split(case, how, bind(model, data.source), frozenset())
    assert len(test) == 60
    for one in train:
        for other in test:
            a, b = data.source.texts[one].lower(), data.source.texts[other].lower()
            assert a not in b
            assert b not in a
    assert 480 - 60 - 61 <= len(train) < 480 - 60


def test_what_is_trained_with_is_of_the_size_that_is_attacked(folders, rows, monkeypatch):
    made: list[tuple[int, int]] = []
    real = gradaudit.sweeps.utility.mean_update
    monkeypatch.setattr(
        gradaudit.sweeps.utility, "mean_update", lambda c, b, n, r: made.append((n, len(b.ids))) or real(c, b, n, r)
    )
    how = UtilityTable(steps=1, batch_size=8, test_rows=60)
    for size in (1, 2, 3, 16):
        data = {"path": str(rows), "label": "label", "batch_size": size}
        found = measured(folders, rows, how, data=data)
        assert found.clients == made[-1][0]
    assert made == [(8, 8), (4, 8), (3, 9), (1, 16)]


def test_noise_of_several_clients_has_the_size_of_their_mean(folders, rows, monkeypatch):
    """Eight clients of one sentence each: noise of sigma C on every one, divided by the root of eight in their mean."""
    sent: list[float] = []
    real = Client.update

    def update(self, *a, **k):
        found = real(self, *a, **k)
        sent.append(float(torch.cat([t.flatten() for t in found.tensors.values()]).std()))
        return found

    monkeypatch.setattr(Client, "update", update)
    for poisson in (True, False):
        defense = [{"name": "dp-sgd", "clip": 1e-3, "noise_multiplier": 50.0, "poisson": poisson}]
        measured(folders, rows, UtilityTable(steps=1, batch_size=8, test_rows=60), defense=defense)
    assert sent == pytest.approx([50e-3 / 8**0.5] * 2, rel=0.05)


def test_a_draw_of_nobody_still_sends_noise(folders, rows, monkeypatch):
    calls: list[float] = []
    real = Client.silent
    monkeypatch.setattr(
        Client, "silent", lambda self, rng, expected: calls.append(expected) or real(self, rng, expected)
    )
    how = UtilityTable(steps=40, batch_size=1, test_rows=60)
    measured(folders, rows, how, defense=[{"name": "dp-sgd", "noise_multiplier": 1.0}])
    assert 5 <= len(calls) <= 25, "37% of the draws"
    assert set(calls) == {1}
    model = given(folders, rows)[2]
    with pytest.raises(BadInputError, match="sends nothing"):
        Client(model).silent(torch.Generator(), 1.0)


def test_a_sweep_keeps_what_was_attacked_where_utility_cannot_be_measured(folders, rows, tmp_path):
    path = tmp_path / "sweep.toml"
    path.write_text(
        f'model = "random:{folders["bert"]}"\n[attack]\nname = "dager"\n[data]\npath = "rows.csv"\nlabel = "label"\n'
        "[utility]\ntest_rows = 239\n[axes]\ndefense = [[]]\n"
    )
    told = CliRunner().invoke(app, ["sweep", str(path), "--out", str(tmp_path / "out")])
    assert told.exit_code == 0, told.output
    (result,) = run_sweep(load_sweep(path), tmp_path, tmp_path / "out", CPU)
    assert result.summary is not None
    assert result.utility is None
    assert "left to train on" in str(result.no_utility)
    assert "left to train on" in (tmp_path / "out" / "frontier.html").read_text()


def test_everything_that_decides_it_is_in_its_name(folders, rows, tmp_path):
    base = given(folders, rows)
    others = [
        given(folders, rows, client={"dropout": True}),
        given(folders, rows, defense=[{"name": "sign"}]),
        given(folders, rows, data={"path": str(rows), "label": "label", "batch_size": 3}),
        given(folders, rows, data={"path": str(rows), "label": "label", "batch_size": 2}, defense=[{"name": "sign"}]),
        given(folders, rows, UtilityTable(steps=81, batch_size=8, learning_rate=3e-3, test_rows=60)),
        given(folders, rows, seed=1),
    ]
    rows.write_text(rows.read_text() + "one more,1\n")
    others.append(given(folders, rows))
    same = given(folders, rows, data={"path": str(rows), "label": "label", "batch_size": 2})
    assert gradaudit.sweeps.utility._identity(*same) == gradaudit.sweeps.utility._identity(*others[-1]), (
        "a round's mean is the same"
    )
    names = {gradaudit.sweeps.utility._identity(*one) for one in (base, *others)}
    assert len(names) == 1 + len(others)


def test_epsilon_is_of_the_sampling_that_was_done_and_of_single_gradients_only(folders, rows):
    how = UtilityTable(steps=30, batch_size=8, test_rows=60)
    shuffled = {"name": "dp-sgd", "noise_multiplier": 5.0, "poisson": False}
    found = measured(folders, rows, how, defense=[shuffled])
    # 22 full batches of 8 in 180 rows: a row may be in two of 30 steps, and another takes its place
    assert found.epsilon == pytest.approx(gaussian_epsilon(5.0, 2.0, 0.1 / 180, 2))
    local = {"optimizer": "sgd", "learning_rate": 1e-3}
    assert measured(folders, rows, how, defense=[shuffled], client=local).epsilon is None
    with pytest.raises(NotSupportedError, match="poisson = false"):
        measured(folders, rows, how, defense=[{"name": "dp-sgd"}], client=local)


def test_f1_is_of_class_1(folders, rows):
    """A model that never says 1: most rows right where most are 0, F1 of class 1 nothing."""
    lines = rows.read_text().splitlines()
    rows.write_text(
        "\n".join([lines[0], *(line for line in lines[1:] if line.endswith(",0") or "maria" in line)]) + "\n"
    )
    data = prepare(
        parse_case(
            {
                "model": f"random:{folders['bert']}",
                "data": {"path": str(rows), "label": "label"},
                "attack": {"name": "blind"},
            }
        ),
        Path.cwd(),
        CPU,
    )
    with torch.no_grad():
        for name, p in data.model.parameters().items():
            if name.startswith("classifier"):
                p.zero_()
                if name.endswith("bias"):
                    p[0] = 1.0
    rows_of = bind(data.model, data.rows.source)
    found = gradaudit.sweeps.utility._scores(rows_of, list(range(len(rows_of))), 2)
    assert found["accuracy"] > 80
    assert found["f1"] == 0.0
    assert found["mcc"] == 0.0
