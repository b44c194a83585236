"""`auto`: what it tries, what it says of the rest, and that neither time nor another attack takes an answer away."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
import torch

from gradaudit.attacks import auto
from gradaudit.attacks.auto import Auto
from gradaudit.attacks.base import Attack
from gradaudit.audit.batch import audit_batch
from gradaudit.audit.estimate import estimate
from gradaudit.audit.prepare import prepare
from gradaudit.case import parse_case
from gradaudit.client.client import Client
from gradaudit.errors import BadInputError, BrokenDownError, NotSupportedError
from gradaudit.progress import StoppedError, answering, on_time, step, within
from gradaudit.registry import build
from gradaudit.streams import stream
from gradaudit.types import Given, LocalTraining, Reconstruction
from tiny_models import batch_of, seen_of, sentences


@dataclass(frozen=True)
class Drawn(Attack):
    """Guesses a word of its own stream."""

    name: ClassVar[str] = "drawn"
    source: ClassVar[str] = "tests"

    def run(self, seen, rng):
        return Reconstruction(((int(torch.randint(5, 50, (1,), generator=rng)),),))


@dataclass(frozen=True)
class Endless(Attack):
    """Never ends by itself."""

    name: ClassVar[str] = "endless"
    source: ClassVar[str] = "tests"

    def run(self, seen, rng):
        done = 0
        while True:
            step("nothing", done := done + 1)


@dataclass(frozen=True)
class Half(Endless):
    """Never ends by itself, and has something all the while."""

    name: ClassVar[str] = "half"

    def run(self, seen, rng):
        def told(_: Any) -> Reconstruction:
            on_time("what takes long to tell")
            return Reconstruction(((5, 6),))

        with answering(told):
            return super().run(seen, rng)


@dataclass(frozen=True)
class Broken(Attack):
    """Breaks down."""

    name: ClassVar[str] = "broken"
    source: ClassVar[str] = "tests"

    def run(self, seen, rng):
        raise ZeroDivisionError


class PanicException(BaseException):
    """As tokenizers raises it out of Rust."""


@dataclass(frozen=True)
class Panicking(Attack):
    """Breaks down in a library."""

    name: ClassVar[str] = "panicking"
    source: ClassVar[str] = "tests"

    def run(self, seen, rng):
        raise PanicException


@dataclass(frozen=True)
class Knowing(Attack):
    """Wants to be told more than it is."""

    name: ClassVar[str] = "knowing"
    source: ClassVar[str] = "tests"
    needs: ClassVar[tuple[str, ...]] = ("labels",)

    def run(self, seen, rng):
        raise AssertionError


@dataclass(frozen=True)
class Dear(Drawn):
    """Says beforehand that it takes too long."""

    name: ClassVar[str] = "dear"

    def gradient_evaluations(self, batch_size, tokens):
        return 10**9


@dataclass(frozen=True)
class Stopping(Attack):
    """The user presses Ctrl-C while it runs."""

    name: ClassVar[str] = "stopping"
    source: ClassVar[str] = "tests"

    def run(self, seen, rng):
        raise KeyboardInterrupt


@pytest.fixture
def suite(monkeypatch):
    """Put other attacks in the suite's place, and return what makes `auto` of them."""

    def put(*attacks: type[Attack[Any]], **fields: Any) -> Auto:
        monkeypatch.setattr(
            auto, "SUITE", {cls.name: cls for cls in (Drawn, Broken, Panicking, Knowing, Stopping, Dear, Endless, Half)}
        )
        return Auto(suite=tuple(cls.name for cls in attacks), **fields)

    return put


def update(load, texts=(3,), family: str = "bert", given: Given | None = None, **client: Any):
    model = load(family)
    return seen_of(Client(model, **client), batch_of(model, sentences(texts, 1)), given=given or Given())


def notes(found: Reconstruction) -> str:
    return next(note for note in found.notes if note.startswith("auto tried: "))


def test_with_dropout_on_the_attack_that_reads_it_goes_first_and_the_rest_is_not_needed(load):
    seen = update(load, (2, 3), dropout=True)
    found = Auto()(seen, stream(0, "attack"))
    assert found == Auto()(seen, stream(0, "attack")), "the same seed must give the same answer"
    assert (found.by, found.certificates) == ("decode", ("proven", "proven"))
    assert notes(found).startswith("auto tried: decode (2 sentences, 2 proven); grab (not needed)")
    assert "tag (not needed)" in notes(found)


def test_a_weight_change_that_the_first_cannot_read_is_read_by_another(load):
    seen = update(load, training=LocalTraining("sgd", 1e-3, 2, momentum=0.9))
    found = Auto(suite=("decode", "dager"))(seen, stream(0, "attack"))
    assert found.by == "dager"
    assert notes(found).startswith("auto tried: decode (nothing: ")
    alone = build("attack", "dager", {})(seen, stream(0, "attack"))
    assert found.sequences == alone.sequences


def test_time_ends_what_runs_and_loses_nothing_that_was_read(load, suite):
    seen = update(load)
    found = suite(Drawn, Dear, Endless, budget=0.5)(seen, stream(0, "attack"))
    assert notes(found).endswith("dear (not tried: more than the time that was left); endless (ended by the budget)")
    assert found.by == "drawn"
    assert found.sequences == suite(Drawn)(seen, stream(0, "attack")).sequences, "whatever else was tried"


def test_what_an_attack_had_when_its_time_was_over_is_kept(load, suite):
    found = suite(Half, budget=0.2)(update(load), stream(0, "attack"))
    assert found.sequences == ((5, 6),)
    assert found.by == "half"
    assert notes(found) == "auto tried: half (ended by the budget: 1 sentence)"


@pytest.mark.parametrize(("cost", "share"), [(1, 2), (10**9, 4)])
def test_an_answer_at_any_time_leaves_half_of_the_time_to_an_attack_that_fits_there(
    load, suite, monkeypatch, cost, share
):
    shares: list[float] = []

    def noted(seconds: float) -> Any:
        shares.append(seconds)
        return within(seconds)

    monkeypatch.setattr(auto, "within", noted)
    monkeypatch.setattr(Endless, "anytime", True)
    monkeypatch.setattr(Endless, "gradient_evaluations", lambda self, size, tokens: 10**9)
    monkeypatch.setattr(Half, "gradient_evaluations", lambda self, size, tokens: cost)
    found = suite(Drawn, Endless, Half, budget=4)(update(load), stream(0, "attack"))
    assert "endless (ended by the budget)" in notes(found)
    assert shares[1] == pytest.approx(share, abs=0.5)


def test_ctrl_c_leaves_what_was_read_before_it(load, suite):
    seen = update(load)
    before = seen.model.parameters()
    with pytest.raises(KeyboardInterrupt) as stop:
        suite(Drawn, Broken, Stopping, Dear)(seen, stream(0, "attack"))
    assert isinstance(stop.value, StoppedError)
    found = stop.value.found
    assert found.sequences == suite(Drawn)(seen, stream(0, "attack")).sequences
    assert found.by == "drawn"
    assert notes(found).endswith("broken (broke down: ZeroDivisionError); stopping (stopped with Ctrl-C)")
    assert all(torch.equal(before[name], now) for name, now in seen.model.parameters().items())


def test_ctrl_c_before_anything_was_read_is_ctrl_c(load, suite):
    with pytest.raises(KeyboardInterrupt) as stop:
        suite(Broken, Stopping)(update(load), stream(0, "attack"))
    assert not isinstance(stop.value, StoppedError)


def test_the_first_that_can_read_it_is_tried_however_slow_the_machine_seems(load, suite, monkeypatch):
    """On a busy machine `decode` was not: 36 gradients looked longer than two minutes, and nothing was found."""
    monkeypatch.setattr(auto, "_seconds_of_a_gradient", lambda seen: 1e6)
    found = suite(Knowing, Dear)(update(load), stream(0, "attack"))
    assert found.by == "dear"
    assert "dear (not tried" in notes(suite(Drawn, Dear)(update(load), stream(0, "attack")))


def test_what_is_not_run_or_breaks_down_is_named_with_its_reason(load, suite):
    found = suite(Drawn, Broken, Panicking, Knowing)(update(load), stream(0, "attack"))
    assert "broken (broke down: ZeroDivisionError)" in notes(found)
    assert "panicking (broke down: PanicException)" in notes(found)
    assert "knowing (must be given labels)" in notes(found)


def test_a_defense_that_none_can_read_is_a_sentence_that_names_all(load, suite):
    seen = update(load, defenses=(build("defense", "sign", {}),))
    with pytest.raises(NotSupportedError, match=r"none that reads this.*drawn \(cannot read through sign\)"):
        suite(Drawn)(seen, stream(0, "attack"))
    with pytest.raises(BrokenDownError):
        suite(Broken)(update(load), stream(0, "attack"))


def test_answers_are_put_together_the_surest_first():
    def answer(name: str, cosine: float, sequences: Any, *certificates: str) -> auto._Answer:
        return auto._Answer(name, Reconstruction(sequences, certificates=certificates or None), cosine)

    near = answer("near", 0.9, ((1,), (2,), (3,)))
    sure = answer("sure", 0.5, ((4,), (2,)), "proven", "likely")
    found = auto._together([sure, near], 3, "told")
    assert found.by == "near"
    assert dict(zip(found.sequences, found.certificates or (), strict=True)) == {
        (4,): "proven", (2,): "likely", (1,): "guess",
    }  # fmt: skip
    twice = auto._together([answer("one", 0.9, ((1,),)), answer("two", 0.1, ((1,), (1,)))], 2, "told")
    assert twice.sequences == ((1,), (1,))


def test_a_suite_without_attacks_or_time_is_refused():
    with pytest.raises(BadInputError, match="did you mean 'dager'"):
        Auto(suite=("dagr",))
    for fields in ({"suite": ()}, {"budget": 0.0}):
        with pytest.raises(BadInputError, match="budget above 0"):
            Auto(**fields)


def test_a_case_without_an_attack_takes_it_and_flags_are_those_of_what_read(folders, tmp_path):
    rows = tmp_path / "rows.csv"
    rows.write_text("text,label\nriver stone,0\nquiet garden,1\n")
    told = {"model": f"random:{folders['bert']}", "data": {"path": str(rows), "label": "label", "batch_size": 2}}
    ready = prepare(parse_case(told | {"client": {"dropout": True}}), tmp_path, torch.device("cpu"))
    assert ready.attack == Auto()
    assert estimate(ready).seconds < 150
    record, _ = audit_batch(ready, 0)
    assert record.attack == "auto"
    assert (record.details["read_by"], record.scores["exact"]) == ("decode", 100.0)
    assert "dropout-not-modeled" not in record.flags
    attack = {"attack": {"name": "auto", "suite": ["dager"]}}
    ready = prepare(parse_case(told | {"client": {"dropout": True}} | attack), tmp_path, torch.device("cpu"))
    assert ready.case.content_hash() != parse_case(told).content_hash()


def test_the_commands_say_who_read_it(load, folders, tmp_path, gradaudit):
    import gradaudit as package

    model = load("gpt2")
    batch = dict(model.tokenizer(sentences([4, 3], 1), padding=True, return_tensors="pt"))
    with package.capture(model.module, tmp_path / "up", tokenizer=model.tokenizer):
        model.module(**batch, labels=torch.tensor([0, 1])).loss.backward()
    model.module.zero_grad()
    code, out, err = gradaudit("attack", tmp_path / "up", "--budget", "60")
    assert code == 0, err
    assert out.startswith("auto (decode) on ")
    code, _, err = gradaudit("attack", tmp_path / "up", "--attack", "tag", "--budget", "60")
    assert (code, "field of attack 'tag' 'budget'" in err) == (2, True)
