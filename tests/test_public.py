"""[public] text and windows: what the attacker has is apart from what is audited, and is said."""

from __future__ import annotations

import csv
import itertools
import json
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from gradaudit.audit import estimate as estimating
from gradaudit.audit.fitting import INVERTERS
from gradaudit.audit.prepare import Prepared, pick_device, prepare, private_batch
from gradaudit.case import Case, parse_case
from gradaudit.cli import app
from gradaudit.client.simulate_text import ClientSimulation
from gradaudit.data.frequencies import drawn_texts
from gradaudit.data.windows import apart, windows
from gradaudit.errors import BadInputError
from gradaudit.files import read_lines
from gradaudit.learned import training
from gradaudit.learned.manifest import MANIFEST
from gradaudit.learned.public import Public
from gradaudit.record import Record
from gradaudit.registry import build
from made_data import rows_of
from tiny_models import MADE_UP, sentences

LTI = {"name": "lti", "share": 0.2, "bottleneck": 16, "width": 8, "epochs": 1, "learning_rate": 1e-3}


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "private.txt").write_text("\n".join(sentences([9] * 12, 1, distinct=False)))
    (tmp_path / "public.txt").write_text("\n".join(sentences([9] * 60, 2, distinct=False)))
    return tmp_path


def case(folders, **more) -> Case:
    return parse_case({
        "model": f"random:{folders['gpt2']}", "task": "causal-lm", "client": {"freeze": ["word"]},
        "data": {"path": "private.txt", "window": 4, "batches": 2}, "public": {"path": "public.txt"}, "attack": LTI,
    } | more)  # fmt: skip


def prepared(folders, files: Path, **more) -> Prepared:
    return prepare(case(folders, **more), files, pick_device("cpu"))


def test_windows_are_the_rows_tokens_in_their_order(load):
    model = load("bert")
    words = MADE_UP[:10]
    rows = rows_of(" ".join(words[:3]), "  ", " ".join(words[3:10]))
    found = windows(rows, model, 4, whole=True)
    assert found.ids is not None
    flat = [i for row in found.ids for i in row]
    assert model.decode(flat).split() == words[:8], "what is left over at the end is dropped"
    assert not set(flat) & model.special.ids, "no special tokens"
    assert list(found.texts) == [" ".join(words[:4]), " ".join(words[4:8])]
    strange = rows_of(" ".join([*words[:2], "unheard-of", *words[2:7]]))
    assert windows(strange, model, 4, whole=False).ids is not None
    kept = windows(strange, model, 4, whole=True).ids
    assert kept is not None
    assert all(model.unknown not in row for row in kept)
    assert len(kept) < len(windows(strange, model, 4, whole=False).texts)
    with pytest.raises(BadInputError, match="longer than the model takes"):
        windows(rows, model, 10_000, whole=True)
    with pytest.raises(BadInputError, match="no window of 11 tokens"):
        windows(rows, model, 11, whole=True)


def test_public_rows_share_nothing_with_audited_ones(load):
    model = load("gpt2")
    private = rows_of("a b  c", "d e", "f g")
    assert apart(rows_of("a b c", "D e.", "d e", " ", "x"), private, [0, 1]) == [4], "the same words to most tokenizers"
    whole = rows_of("It's a long and winding road to the old house.", "two words")
    part = "it 's a long and winding road to"
    others = rows_of(part, f"they say {part} nowhere at all", "a long and winding", "to the old house of Usher", "two")
    assert apart(others, whole, [0]) == [2, 3, 4], "parts of four words and less are shared by chance"
    assert apart(others, whole, [1]) == [0, 1, 2, 3, 4]
    words = MADE_UP[:12]
    audited = windows(rows_of(" ".join(words[:8])), model, 4, whole=True)
    shifted = windows(rows_of(" ".join([MADE_UP[20], *words])), model, 4, whole=False)
    assert shifted.ids is not None
    kept = apart(shifted, audited, [0])
    assert audited.ids is not None
    runs = {audited.ids[0][n : n + 2] for n in range(3)}
    assert kept == [1, 2], "another start of the cut brings nothing back; the second private window is not audited"
    assert all(shifted.ids[n][k : k + 2] not in runs for n in kept for k in range(3))


def test_the_case_s_public_text_is_apart_and_drawn_as_asked(folders, files):
    (files / "public.txt").write_text((files / "public.txt").read_text() + "\n" + (files / "private.txt").read_text())
    ready = prepared(folders, files)
    assert ready.public is not None
    private = {tuple(row) for n in range(2) for row in private_batch(ready, n).sequences()}
    public = {tuple(row.tolist()) for row in ready.public.ids}
    assert len(private) == 2
    assert not private & public
    assert all(len(row) == 4 for row in private | public)
    few = prepared(folders, files, public={"path": "public.txt", "rows": 10, "shuffle_seed": 1}).public
    assert few is not None
    assert len(few) == 10
    assert {tuple(row.tolist()) for row in few.ids} <= public
    with pytest.raises(BadInputError, match="no row that is in no audited batch"):
        whole = {"data": {"path": "private.txt", "window": 4, "batches": 27}, "public": {"path": "private.txt"}}
        prepared(folders, files, **whole)


def test_cases_that_make_no_sense_are_refused(folders):
    with pytest.raises(BadInputError, match=r"add a \[public\] table"):
        case(folders, public=None)
    with pytest.raises(BadInputError, match='needs task = "causal-lm"'):
        case(folders, task="classification")
    with pytest.raises(BadInputError, match="did you mean 'rows'"):
        case(folders, public={"path": "public.txt", "row": 3})
    plain = case(folders, attack={"name": "blind"}, public=None)
    assert "public" not in plain.model_dump(exclude_none=True)
    assert case(folders).content_hash() != case(folders, public={"path": "public.txt", "rows": 9}).content_hash()


def run(*words: object) -> str:
    result = CliRunner().invoke(app, [str(word) for word in words], catch_exceptions=False)
    assert result.exit_code in (0, 3), result.output
    return result.output


def toml_of(folders, files: Path, axes: str = "", attack: str = "") -> Path:
    path = files / "case.toml"
    fields = "\n".join(f"{key} = {json.dumps(value)}" for key, value in LTI.items())
    path.write_text(f"""
model = "random:{folders["gpt2"]}"
task = "causal-lm"
[data]
path = "private.txt"
window = 4
batches = 2
[public]
path = "public.txt"
[client]
freeze = ["word"]
[attack]
{attack or fields}
{axes}
""")
    return path


def test_run_fits_once_and_says_what_the_attacker_had(folders, files):
    path, out = toml_of(folders, files), files / "out"
    run("run", path, "--out", out)
    records = list(read_lines(out / "records.jsonl", Record))
    rows = prepared(folders, files).public
    assert rows is not None
    assert [r.knowledge["public"]["rows"] for r in records] == [len(rows)] * 2
    assert all("public.txt" in r.knowledge["public"]["path"] and r.error is None for r in records)
    assert "public.txt" in (out / "report.html").read_text()
    (place,) = (out / INVERTERS).iterdir()
    made = (place / MANIFEST).stat().st_mtime_ns
    (out / "records.jsonl").write_text("")
    run("run", path, "--out", out)
    assert (place / MANIFEST).stat().st_mtime_ns == made, "what was learned is read, not learned again"


def test_a_sweep_over_defenses_fits_each(folders, files):
    axes = '[axes]\ndefense = [[], [{name = "sign"}]]\n"data.skip" = [0, 2]'
    out = files / "sweep"
    run("sweep", toml_of(folders, files, axes), "--out", out)
    with open(out / "sweep.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["error"] for row in rows] == [""] * 4
    kept = [json.loads((place / MANIFEST).read_text()) for place in (out / INVERTERS).iterdir()]
    assert sorted(len(m["target"]["defenses"]) for m in kept) in ([0, 1], [0, 0, 1, 1]), "one a defense and public text"


def test_fit_makes_what_run_and_attack_take(folders, files, monkeypatch):
    path, inverter = toml_of(folders, files), files / "inverter"

    def stopped(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as inside:
        inside.setattr(training, "progressed", stopped)
        assert "run the same command again" in " ".join(run("fit", path, "--out", inverter).split())
    assert not (inverter / MANIFEST).exists()
    assert "accuracy" in run("fit", path, "--out", inverter)
    told = json.loads(run("fit", path, "--out", inverter, "--json"))
    assert told["texts"] == json.loads((inverter / MANIFEST).read_text())["texts"]
    again = CliRunner().invoke(app, ["fit", str(path), "--out", str(inverter), "--set", "attack.epochs=2"])
    assert isinstance(again.exception, BadInputError)
    assert "what another case learned" in str(again.exception)
    used = toml_of(folders, files, attack=f'name = "lti"\ninverter = "{inverter}"')
    run("run", used, "--out", files / "used")
    records = list(read_lines(files / "used" / "records.jsonl", Record))
    assert [r.error for r in records] == [None, None]
    assert not (files / "used" / INVERTERS).exists()


def test_an_attacker_without_text_draws_words_by_their_frequency(folders, files):
    words = pytest.importorskip("wordfreq")
    public = {"source": "words", "rows": 300}
    ready = prepared(folders, files, public=public)
    assert ready.public is not None
    assert len(ready.public) == 300
    assert ready.public.where == "words drawn by their frequency (wordfreq, en), windows of 4 tokens"
    again, other = (
        prepared(folders, files, public=public),
        prepared(folders, files, public=public | {"shuffle_seed": 1}),
    )
    assert again.public is not None
    assert other.public is not None
    assert torch.equal(again.public.ids, ready.public.ids)
    assert not torch.equal(other.public.ids, ready.public.ids)
    drawn = " ".join(drawn_texts("en", 3000, 0)).split()
    for word in ("the", "of", "people"):
        share = words.word_frequency(word, "en") / 0.955  # of the words that are drawn
        assert drawn.count(word) / len(drawn) == pytest.approx(share, abs=5 * (share / len(drawn)) ** 0.5)


def test_words_get_labels_by_chance_where_a_model_needs_some(folders, files):
    pytest.importorskip("wordfreq")
    ready = prepare(
        parse_case({"model": f"random:{folders['bert']}", "public": {"source": "words", "rows": 400}, "attack": LTI}),
        files,
        pick_device("cpu"),
    )
    assert ready.public is not None
    assert isinstance(ready.public, Public)
    assert ready.public.labels is not None
    assert 150 < int(ready.public.labels.sum()) < 250


def test_public_classes_are_the_private_ones_by_their_names(folders, files):
    rows = sentences([6] * 12, 4, distinct=False)
    private = [f"{text}\t{'abc'[n % 3]}" for n, text in enumerate(rows[:6])]
    public = [f"{text}\t{'cb'[n % 2]}" for n, text in enumerate(rows[6:])]
    (files / "private.tsv").write_text("\n".join(["text\tlabel", *private]) + "\n")
    (files / "public.tsv").write_text("\n".join(["text\tlabel", *public]) + "\n")
    table = {
        "model": f"random:{folders['bert']}", "attack": LTI, "data": {"path": "private.tsv", "label": "label"},
        "public": {"path": "public.tsv", "label": "label"},
    }  # fmt: skip
    ready = prepare(parse_case(table), files, pick_device("cpu"))
    assert isinstance(ready.public, Public)
    assert ready.public.labels is not None
    assert sorted(ready.public.labels.tolist()) == [1, 1, 1, 2, 2, 2], "c is 2 and b is 1, as in the private file"
    (files / "public.tsv").write_text("\n".join(["text\tlabel", *public, "one more\td"]) + "\n")
    with pytest.raises(BadInputError, match=r"\[public\] has a class 'd'"):
        prepare(parse_case(table), files, pick_device("cpu"))


def test_words_are_nobodys_data_and_no_images(folders, files, monkeypatch):
    with pytest.raises(BadInputError, match=r"drawn by chance, nobody's data: it is for \[public\]"):
        case(folders, data={"source": "words"})
    with pytest.raises(BadInputError, match="no words of language 'tlh'; it has ar, bg"):
        prepared(folders, files, public={"source": "words", "language": "tlh"})
    images = {"task": "image-classification", "model": "lenet", "attack": {"name": "ig"}, "public": {"source": "words"}}
    with pytest.raises(BadInputError, match="words are no images"):
        prepare(parse_case(images), files, pick_device("cpu"))
    monkeypatch.setitem(sys.modules, "wordfreq", None)
    with pytest.raises(BadInputError, match=r"pip install 'gradaudit\[words\]'"):
        prepared(folders, files, public={"source": "words"})


def test_ids_of_cases_with_public_text_are_what_they_were(folders):
    assert "language" in case(folders).resolved()["public"]
    with pytest.raises(BadInputError, match='language is for source = "words" only'):
        case(folders, public={"path": "public.txt", "language": "de"})
    drawn = [case(folders, public={"source": "words", "language": code}).content_hash() for code in ("en", "de")]
    assert drawn[0] != drawn[1]


@pytest.mark.parametrize(("fields", "passes"), [({}, 1), ({"pseudo": True, "epochs": 3}, 3)], ids=["public", "drawn"])
def test_check_foresees_what_is_simulated(folders, files, monkeypatch, fields, passes):
    simulated = []

    class Counted(ClientSimulation):
        def __call__(self, ids, mask, labels, rng):
            simulated.append(len(ids))
            return super().__call__(ids, mask, labels, rng)

    monkeypatch.setattr(estimating, "simulation_of", lambda client, selection: Counted(client, selection))
    ticks = iter(range(0, 1000, 16))  # every measured stretch takes 16 seconds
    monkeypatch.setattr(estimating.time, "perf_counter", lambda: next(ticks))
    ready = prepared(folders, files, attack=LTI | fields)
    assert ready.public is not None
    found = estimating.estimate(ready)
    few = min(32, len(ready.public))
    assert simulated == [few, few]
    assert found.learning == pytest.approx(16 / few * len(ready.public) * passes)
    assert estimating.estimate(prepared(folders, files, attack={"name": "blind"}, public=None)).learning == 0


def test_check_foresees_replayed_steps(folders, files, monkeypatch):
    ticks = itertools.count()
    monkeypatch.setattr(estimating.time, "perf_counter", lambda: float(next(ticks)))  # each gradient takes a second

    def seconds(**client) -> float:
        attack = {"name": "tag", "steps": 10, "learning_rate": 0.1}
        table = case(folders, attack=attack, client={"freeze": ["word"]} | client).resolved()
        table.pop("public")
        return estimating.estimate(prepare(parse_case(table), files, pick_device("cpu"))).seconds

    attacked = seconds() / 2 - 4
    assert attacked > 0
    local = {"optimizer": "sgd", "learning_rate": 0.1, "epochs": 3}
    assert seconds(**local) == 2 * (3 * attacked + 3 + 3)
    most = build("attack", "tag", {}).replayed_steps
    assert seconds(**local | {"epochs": most + 1}) == 2 * (attacked + most + 1 + 3), "so many are not replayed"
