"""A few broken inputs of every kind: each ends in a sentence, a documented exit code, and soon."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings

from fuzz.corpus import make_corpus
from fuzz.inputs import Input, every_kind
from fuzz.program import ended, placed

EXAMPLES, SECONDS = 4, 60
KINDS = ("case", "sweep", "claims", "options", "data", "bundle", "update", "config", "tokenizer", "adapters", "records",
         "inverter", "checkpoint")  # fmt: skip


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    for package in ("peft", "pyarrow"):
        pytest.importorskip(package)
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.mark.parametrize("kind", KINDS)
def test_a_broken_input_ends_in_a_sentence(corpus: Path, kind: str):
    every = every_kind(corpus)
    assert set(every) == set(KINDS)

    @settings(max_examples=EXAMPLES, deadline=None, derandomize=True, database=None,
              suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(every[kind])
    def tried(one):
        with placed(one, corpus) as folder:
            signal.alarm(SECONDS)
            try:
                outcome = ended(one, folder)
            finally:
                signal.alarm(0)
        assert not outcome.fault(one), outcome.said[-2000:]

    tried()


@pytest.mark.parametrize("arguments", [
    ("check", "again.toml"), ("claims", "claims.toml"), ("attack", "bundle"), ("attack", "adapted"), ("report", "run"),
    ("run", "lti.toml", "--out", "out"), ("sweep", "sweep.toml", "--out", "out"), ("check", "parquet.toml"),
])  # fmt: skip
def test_what_is_broken_was_good(corpus: Path, arguments: tuple[str, ...]):
    """The fuzz would find nothing in inputs that the program refuses anyway."""
    one = Input("good", arguments)
    with placed(one, corpus) as folder:
        outcome = ended(one, folder)
    assert outcome.code == (1 if arguments[0] == "claims" else 0), outcome.said


def test_the_fuzz_would_notice(corpus: Path, monkeypatch):
    def broken(*_, **__):
        raise IndexError("a bug")

    monkeypatch.setattr("gradaudit.accounting.claim.load_claims", broken)
    one = Input("claims", ("claims", "again.toml"))
    with placed(one, corpus) as folder:
        assert ended(one, folder).fault(one) == "traceback"
