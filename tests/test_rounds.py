"""Several updates of one client: joined without repetition, and one round's sentences help to read a crowded one."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import gradaudit.bundles.examine
from gradaudit.attacks import auto
from gradaudit.attacks.auto import Auto
from gradaudit.attacks.dager import Dager
from gradaudit.attacks.decode import Decode
from gradaudit.bundles import bundle
from gradaudit.bundles.examine import Examination, examine
from gradaudit.bundles.rounds import examine_rounds, joined
from gradaudit.cli import app
from gradaudit.client.client import Client
from gradaudit.client.observation import knowledge_of
from gradaudit.errors import BadInputError
from gradaudit.leakage.matching.descent import Descent
from gradaudit.progress import StoppedError
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Given, Knowledge
from tiny_models import batch_of, seen_of, sentences

CPU = torch.device("cpu")
RUN = CliRunner()


def sent(model, folder: Path, texts: list[str]) -> Path:
    client, batch = Client(model), batch_of(model, texts)
    model.module.save_pretrained(folder / "model")
    model.tokenizer.save_pretrained(folder / "model")
    update = client.update(batch, stream(0, "client"))
    bundle.save_bundle(folder, model, update, knowledge_of(batch, update, Given()), inside=True)
    return folder


@pytest.fixture
def two_rounds(load, tmp_path: Path):
    """The model moves on between the rounds; two sentences are sent in both."""
    texts = sentences([4, 3, 5, 4], 3)
    return texts, [
        sent(load("gpt2", seed=0), tmp_path / "first", texts[:3]),
        sent(load("gpt2", seed=1), tmp_path / "second", texts[1:]),
    ]


def read(ids, texts, batch_size: int, taken: int | None = None) -> Examination:
    details = {} if taken is None else {"taken_out": taken}
    return Examination("dager", "m", Knowledge(batch_size), texts, ids, None, None, (), details, (), 0.0)


def test_every_sentence_is_there_once_with_its_rounds(two_rounds):
    texts, folders = two_rounds
    found = examine_rounds(folders, lambda f, known: examine(f, "dager", [], "all", None, 0, CPU, known=known))
    assert {s.text: s.rounds for s in found.sentences} == {
        texts[0]: (1,), texts[1]: (1, 2), texts[2]: (1, 2), texts[3]: (2,)
    }  # fmt: skip
    assert [len(s.rounds) for s in found.sentences] == [2, 2, 1, 1]


def test_what_the_attacker_was_given_of_other_rounds_is_told(two_rounds):
    _, folders = two_rounds
    told = examine(folders[0], "dager", [], "all", None, 0, CPU, known=((4, 5), (6,)))
    assert any("2 sentences read from other rounds were given" in note for note in told.notes)
    assert not any("other rounds" in note for note in examine(folders[0], "dager", [], "all", None, 0, CPU).notes)


def test_a_sentence_twice_in_one_round_counts_that_round_once():
    assert [s.rounds for s in joined([read(((4,), (4,)), ("a", "a"), 2), read(((4,),), ("a",), 1)])] == [(1, 2)]


def test_equal_ids_of_two_tokenizers_are_two_sentences():
    assert len(joined([read(((4,),), ("a",), 1), read(((4,),), ("b",), 1)])) == 2


def test_only_a_round_that_was_not_read_whole_is_tried_again_and_only_a_better_answer_counts():
    asked: list[tuple[str, tuple]] = []
    whole, part = read(((4,), (5,)), ("a", "b"), 2), read(((6,),), ("c",), 2, taken=1)
    better, worse = read(((6,), (4,)), ("c", "a"), 2, taken=2), read(((7,),), ("d",), 2, taken=0)
    for again, expected in ((better, better), (worse, part)):
        asked.clear()

        def one(folder: Path, known, again=again) -> Examination:
            asked.append((folder.name, known))
            return whole if folder.name == "whole" else again if known else part

        found = examine_rounds([Path("whole"), Path("part")], one)
        assert asked == [("whole", ()), ("part", ()), ("part", ((4,), (5,)))]
        assert found.rounds == (whole, expected)


def test_a_round_that_cannot_be_attacked_does_not_stop_the_others():
    def one(folder: Path, known) -> Examination:
        if folder.name == "broken":
            raise BadInputError("cut short")
        return read(((4,),), ("a",), 1)

    found = examine_rounds([Path("broken"), Path("good")], one)
    assert found.failed
    assert [s.rounds for s in found.sentences] == [(2,)]
    assert found.as_json()["rounds"][0]["error"] == "cut short"


@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_known_sentences_are_taken_out_of_a_crowded_batch_and_others_are_not(load, family):
    """With no beam to search by, what is known is all that can be found: right ones are, wrong ones are not."""
    model = load(family)
    lengths = [3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4, 5, 3, 4, 5, 3]
    batch = batch_of(model, sentences(lengths, 4, distinct=False))
    rows = [tuple(s) for s in batch.sequences()]
    wrong = (*rows[0][:-1], (rows[0][-1] + 1) % model.vocabulary_size)
    seen = seen_of(Client(model), batch)
    known = (wrong, *rows[:10], wrong[:1], (10**6, 4))  # the last of another tokenizer
    attack = build("attack", "dager", {"max_length": 1})
    alone, told = (attack(one, stream(0, "a")) for one in (seen, type(seen)(**(vars(seen) | {"known": known}))))
    assert told.details["taken_out"] >= 10 > alone.details["taken_out"]
    assert set(rows[:10]) <= set(told.sequences)
    assert wrong not in told.sequences


def test_where_no_round_can_be_attacked_nothing_is_printed_that_reads_as_safe(two_rounds):
    _, folders = two_rounds
    for more in (["--attack", "dagger"], ["--set", "ranks=1"]):
        told = RUN.invoke(app, ["attack", *map(str, folders), *more])
        assert isinstance(told.exception, BadInputError)
        assert "0 sentences" not in told.output


def test_the_command_joins_rounds_and_says_which_one_is_broken(two_rounds):
    texts, folders = two_rounds
    good = RUN.invoke(app, ["attack", *map(str, folders), "--json"])
    assert good.exit_code == 0, good.output
    answer = json.loads(good.stdout)
    assert {s["text"]: s["rounds"] for s in answer["joined"]}[texts[1]] == [1, 2]
    assert len(answer["rounds"]) == 2
    (folders[0] / bundle.TENSORS).write_bytes(b"cut")
    broken = RUN.invoke(app, ["attack", *map(str, folders)])
    assert broken.exit_code == 2
    assert "round 1" in broken.stderr
    assert texts[3] in broken.stdout
    assert "Traceback" not in broken.output


def test_what_was_read_before_a_stop_is_kept():
    part = read(((4,),), ("a",), 2, taken=1)

    def one(stops: str, folder: Path, known) -> Examination:
        if (folder.name, bool(known)) == (stops.removesuffix(" again"), stops.endswith("again")):
            raise KeyboardInterrupt
        return part if folder.name == "b" else read(((5,),), ("b",), 1)

    folders = [Path("a"), Path("b")]
    with pytest.raises(KeyboardInterrupt):
        examine_rounds(folders, partial(one, "a"))
    for stops, texts in (("b", {"b"}), ("b again", {"a", "b"})):
        found = examine_rounds(folders, partial(one, stops))
        assert found.interrupted
        assert {s.text for s in found.sentences} == texts
        assert len(found.rounds) == 2
    assert not examine_rounds(folders, partial(one, "nowhere")).interrupted


@pytest.mark.parametrize("at", [0, 1])
def test_what_a_stopped_round_had_read_is_kept(at: int):
    folders = [Path("a"), Path("b")]

    def one(folder: Path, known) -> Examination:
        if folder == folders[at]:
            raise StoppedError(read(((7,),), ("c",), 1))
        return read(((5,),), ("b",), 1)

    found = examine_rounds(folders, one)
    assert found.interrupted
    assert {s.text for s in found.sentences} == ({"c"} if at == 0 else {"b", "c"})
    assert len(found.rounds) == 2


def test_ctrl_c_prints_what_auto_had_read_and_is_inconclusive(two_rounds, monkeypatch):
    texts, folders = two_rounds

    def stopped(self, seen, rng):
        raise KeyboardInterrupt

    monkeypatch.setattr(Decode, "run", stopped)
    alone = RUN.invoke(app, ["attack", str(folders[0])])
    assert alone.exit_code == 3
    assert "nothing is known" in alone.stderr
    monkeypatch.setattr(Auto, "_ordered", lambda self, seen: [Dager(), Decode()])
    monkeypatch.setattr(auto, "_is_whole", lambda seen, answers: False)
    told = RUN.invoke(app, ["attack", str(folders[0])])
    assert told.exit_code == 3
    assert "decode (stopped with Ctrl-C)" in " ".join(told.stdout.split())
    assert "interrupted; above is what was read until then" in told.stderr
    assert all(text in told.stdout for text in texts[:3])


def test_ctrl_c_prints_the_guess_that_a_descent_had_come_to(two_rounds, monkeypatch):
    _, folders = two_rounds
    real = Descent.step

    def stopped(self, *rest, **more):
        if self.done == 3:
            raise KeyboardInterrupt
        return real(self, *rest, **more)

    monkeypatch.setattr(Descent, "step", stopped)
    told = RUN.invoke(app, ["attack", str(folders[0]), "--attack", "tag", "--json"])
    assert told.exit_code == 3
    answer = json.loads(told.stdout)
    assert len(answer["texts"]) == 3
    assert answer["notes"][0] == "stopped with Ctrl-C: what was read until then"
    assert "interrupted; above is what was read until then" in told.stderr


def test_the_command_prints_what_was_read_before_a_stop_and_is_inconclusive(two_rounds, monkeypatch):
    texts, folders = two_rounds
    real = gradaudit.bundles.examine.examine

    def stopped(folder: Path, *rest, **more) -> Examination:
        if folder == folders[1]:
            raise KeyboardInterrupt
        return real(folder, *rest, **more)

    monkeypatch.setattr(gradaudit.bundles.examine, "examine", stopped)
    told = RUN.invoke(app, ["attack", *map(str, folders)])
    assert told.exit_code == 3
    assert texts[0] in told.stdout
    assert "stopped with Ctrl-C" in told.stderr
    assert "Traceback" not in told.output
