"""What every registered attack owes: valid answers, the same for one seed, an untouched model, clear refusals."""

from __future__ import annotations

import dataclasses
import inspect
import json
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch

from gradaudit import registry
from gradaudit.attacks.base import Attack, no_more_than
from gradaudit.client.client import Client
from gradaudit.errors import AuditError, MissingKnowledgeError, NotSupportedError
from gradaudit.leakage.priors import frequent_tokens, frequent_words
from gradaudit.models.state import digest_of
from gradaudit.registry import build, describe, known
from gradaudit.streams import stream
from gradaudit.types import Given, Knowledge, LocalTraining, Observation, Reconstruction
from tiny_models import DECODERS, ENCODERS, SETTINGS, batch_of, seen_of, sentences, tiny

EVERY = known("attack")
ATTACKS = sorted(
    name
    for name in EVERY
    if name != "auto" and ("classification" in EVERY[name].tasks or "causal-lm" in EVERY[name].tasks)
)
"""Those of text; tests/test_image_attacks.py has the others. `auto` runs these (tests/test_auto.py)."""
EVERYTHING = Given(lengths=True, labels=True)
CLIENTS = {
    "dropout off": {},
    "dropout on": {"dropout": True},
    "local steps": {"training": LocalTraining("sgd", 0.1, 2)},
}


def quick(name: str) -> Attack:
    """Return an attack with its defaults, its longest loops cut short."""
    short = {"steps": 6, "max_candidates": 500, "tries": 2, "starts": 4, "permutations": 4, "rounds": 2, "every": 2}
    short |= {"evaluations": 20, "proposals": 6, "edits": 8, "passes": 2, "beam_width": 2}
    fields = {f.name: f.default for f in dataclasses.fields(known("attack")[name])}
    return build("attack", name, {k: min(v, fields[k]) for k, v in short.items() if k in fields})


def state_of(model) -> dict[str, Any]:
    return {
        "values": {n: p.detach().clone() for n, p in model.module.state_dict().items()},
        "others": [
            [(n, p.requires_grad, p.grad is None, p.dtype) for n, p in model.module.named_parameters()],
            [(n, m.training) for n, m in model.module.named_modules()],
            [(n, len(m._forward_hooks), len(m._forward_pre_hooks), len(m._backward_hooks))
             for n, m in model.module.named_modules()],
        ],
    }  # fmt: skip


def assert_unchanged(model, before: dict[str, Any]) -> None:
    after = state_of(model)
    assert after["others"] == before["others"]
    assert all(torch.equal(value, before["values"][n]) for n, value in after["values"].items())


def assert_valid(found: Reconstruction, seen: Observation) -> None:
    model = seen.model
    for sentence in found.sequences:
        assert sentence
        assert all(type(i) is int and 0 <= i < model.vocabulary_size for i in sentence)
        assert model.special.pad not in sentence
        assert len(sentence) <= model.max_length
    for list_beside in (found.labels, found.certificates):
        assert list_beside is None or len(list_beside) == len(found.sequences)
    assert found.labels is None or all(0 <= y < model.spec.labels for y in found.labels)
    assert set(found.certificates or ()) <= {"proven", "likely", "guess"}
    assert all(note and "\n" not in note for note in found.notes)
    json.dumps(dict(found.details))


@pytest.mark.parametrize("name", sorted(EVERY))
def test_an_attack_is_documented_and_its_fields_too(name):
    cls = known("attack")[name]
    assert issubclass(cls, Attack)
    assert inspect.getdoc(cls)
    assert len(cls.source) > 10
    assert set(cls.needs) <= {f.name for f in dataclasses.fields(Knowledge)}
    assert set(cls.tasks) <= {"classification", "causal-lm", "image-classification"}
    assert cls.tasks
    for field in dataclasses.fields(cls):
        assert field.metadata.get("about"), f"{field.name} says nothing about itself"
        assert field.default is not dataclasses.MISSING
    attack = build("attack", name, {})
    json.dumps(describe(attack))
    assert build("attack", name, {k: v for k, v in describe(attack).items() if k != "name"}) == attack
    assert attack.gradient_evaluations(4, 40) >= 0
    with pytest.raises(dataclasses.FrozenInstanceError):
        attack.name = "other"


@pytest.mark.parametrize("made", CLIENTS)
@pytest.mark.parametrize(("family", "task"), SETTINGS)
@pytest.mark.parametrize("name", ATTACKS)
def test_an_attack_answers_validly_or_refuses_in_a_sentence(load, name, family, task, made):
    model = load(family, task)
    batch = batch_of(model, sentences((2, 3), 1))
    seen = seen_of(Client(model, **CLIENTS[made]), batch, given=EVERYTHING)
    tensors = {n: t.clone() for n, t in seen.tensors.items()}
    attack, before = quick(name), state_of(model)
    answers: list[object] = []
    for elsewhere in (0, 1):
        torch.manual_seed(elsewhere)  # an attack draws from its own stream alone
        try:
            answers.append(attack(seen, stream(0, "attack")))
        except AuditError as refusal:
            answers.append(str(refusal))
    assert answers[0] == answers[1], "the same seed must give the same answer"
    if isinstance(answers[0], Reconstruction):
        assert_valid(answers[0], seen)
    else:
        assert len(str(answers[0])) > 20
        assert "\n" not in str(answers[0])
        assert (name, family in ENCODERS, task, made) in REFUSALS, f"refused: {answers[0]}"
    assert_unchanged(model, before)
    assert all(torch.equal(t, tensors[n]) for n, t in seen.tensors.items())


REFUSALS = {
    *(("decode", False, task, made) for task in ("classification", "causal-lm") for made in CLIENTS),
    ("decode", True, "classification", "local steps"),
    *((name, False, "causal-lm", made) for name in ("grab", "lamp") for made in CLIENTS),
    *(
        ("lti", encoder, task, made)
        for encoder in (False, True)
        for task in ("classification", "causal-lm")
        for made in CLIENTS
    ),
}
"""Settings outside what an attack can do: (attack, on an encoder, task, client). Everything else must be answered.

`lti` answers once it is fitted, which tests/test_lti.py does.
"""


@pytest.mark.parametrize("name", ATTACKS)
def test_missing_knowledge_is_named(load, name):
    model = load("bert")
    batch = batch_of(model, sentences((3,), 1))
    for need in known("attack")[name].needs:
        seen = seen_of(Client(model, dropout=True), batch, given=dataclasses.replace(EVERYTHING, **{need: False}))
        with pytest.raises(MissingKnowledgeError, match=f"attack '{name}' must be given {need}"):
            quick(name)(seen, stream(0, "attack"))
    least = Given(**{f.name: f.name in known("attack")[name].needs for f in dataclasses.fields(Given)})
    seen = seen_of(Client(model, dropout=name == "decode"), batch, given=least)
    if quick(name).unfitted:
        return
    assert_valid(quick(name)(seen, stream(0, "attack")), seen)  # what it says it needs is enough


def test_a_task_it_does_not_take_is_named(load):
    model = load("gpt2", "causal-lm")
    seen = seen_of(Client(model), batch_of(model, sentences((3,), 1)))
    for name in ATTACKS:
        if "causal-lm" not in known("attack")[name].tasks:
            with pytest.raises(NotSupportedError, match=f"attack '{name}' does not support task 'causal-lm'"):
                quick(name)(seen, stream(0, "attack"))


@dataclass(frozen=True)
class Rogue(Attack):
    """An attack of the tests that does something to the model, and may then break down."""

    name: ClassVar[str] = "rogue"
    source: ClassVar[str] = "tests"
    deed: str = ""
    fails: bool = False

    def run(self, seen, rng):
        first = next(iter(seen.model.parameters().values()))
        module = seen.model.module
        ids = torch.tensor([[5, 6, 7]])
        if self.deed == "leaves gradients":
            seen.model.loss(ids=ids, mask=torch.ones_like(ids), labels=torch.tensor([0])).backward()
            assert first.grad is not None
        elif self.deed == "writes":
            with torch.no_grad():
                first.add_(1.0)
        elif self.deed == "writes past autograd":
            first.data.add_(1.0)
        elif self.deed == "swaps rows":
            first.data[[5, 6]] = first.data[[6, 5]]
        elif self.deed == "puts others in their place":
            module.classifier.weight = torch.nn.Parameter(module.classifier.weight + 1)
        elif self.deed == "swaps rows of what it saw":
            seen.tensors["bert.pooler.dense.weight"][[0, 1]] = seen.tensors["bert.pooler.dense.weight"][[1, 0]]
        elif self.deed == "writes into what it saw":
            next(iter(seen.tensors.values())).zero_()
        elif self.deed == "freezes":
            first.requires_grad_(False)
        elif self.deed == "trains":
            module.train()
        elif self.deed == "hooks":
            module.register_forward_hook(lambda *args: None)
        if self.fails:
            raise ZeroDivisionError("broke down")
        return Reconstruction(())


@pytest.fixture
def fresh(folders):
    model = tiny(folders["bert"])
    return model, seen_of(Client(model), batch_of(model, ["river garden stone"]))


@pytest.mark.parametrize("fails", [False, True])
def test_gradients_are_cleared_even_after_an_error(fresh, fails):
    model, seen = fresh
    before = state_of(model)
    if fails:
        with pytest.raises(ZeroDivisionError, match="broke down"):
            Rogue("leaves gradients", fails)(seen, stream(0, "attack"))
    else:
        Rogue("leaves gradients", fails)(seen, stream(0, "attack"))
    assert_unchanged(model, before)


@pytest.mark.parametrize("deed", ["writes", "writes past autograd", "writes into what it saw", "swaps rows",
                                  "swaps rows of what it saw", "puts others in their place", "freezes", "trains",
                                  "hooks"])  # fmt: skip
def test_an_attack_that_changes_the_model_is_caught(fresh, deed):
    _, seen = fresh
    assert Rogue()(seen, stream(0, "attack")) == Reconstruction(())
    with pytest.raises(RuntimeError, match="attack 'rogue' changed the model"):
        Rogue(deed)(seen, stream(0, "attack"))


@pytest.mark.parametrize("deed", ["writes", "writes past autograd", "writes into what it saw"])
def test_a_written_model_is_caught_even_behind_an_error(fresh, deed):
    """The audit records an attack's error and goes on: with a written model, every later batch would be wrong."""
    _, seen = fresh
    with pytest.raises(RuntimeError, match="attack 'rogue' changed the model"):
        Rogue(deed, fails=True)(seen, stream(0, "attack"))


@pytest.mark.parametrize("deed", ["freezes", "trains", "hooks"])
def test_mode_and_flags_and_hooks_come_back_after_an_error(fresh, deed):
    model, seen = fresh
    before = state_of(model)
    with pytest.raises((ZeroDivisionError, RuntimeError)):
        Rogue(deed, fails=True)(seen, stream(0, "attack"))
    assert_unchanged(model, before)


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("sizes", [(5,), (4, 6), (5, 3, 6), (6, 6, 6)])
@pytest.mark.parametrize("distinct", [True, False])
@pytest.mark.parametrize("family", DECODERS)
def test_dager_recovers_decoder_batches_exactly(load, family, distinct, sizes, seed):
    model = load(family, seed=seed)
    batch = batch_of(model, sentences(sizes, seed, distinct=distinct))
    for given, selection in ((Given(), "all"), (Given(batch_size=False, training=False), "*:q,k,v")):
        found = build("attack", "dager", {})(seen_of(Client(model), batch, selection, given), stream(0, "attack"))
        assert sorted(found.sequences) == sorted(tuple(s) for s in batch.sequences())


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("family", DECODERS)
def test_dager_finds_a_sentence_that_another_one_begins_with(load, family, seed):
    """It adds no direction to the first blocks; the last block's queries show where sentences end."""
    model = load(family, seed=seed)
    batch = batch_of(model, ["river stone garden window letter", "river stone", "castle forest"])
    found = build("attack", "dager", {})(seen_of(Client(model), batch), stream(0, "attack"))
    assert sorted(found.sequences) == sorted(tuple(s) for s in batch.sequences())


@pytest.mark.parametrize("sizes", [(5,), (4, 6), (5, 3, 6)])
@pytest.mark.parametrize("family", DECODERS)
def test_dager_recovers_all_but_each_last_token_of_a_language_model(load, family, sizes):
    """The last token is a label alone: it enters no block, so no span can hold it."""
    model = load(family, "causal-lm")
    batch = batch_of(model, sentences(sizes, 3))
    found = build("attack", "dager", {})(seen_of(Client(model), batch), stream(0, "attack"))
    ours = sorted(found.sequences)
    truth = sorted(tuple(s) for s in batch.sequences())
    assert len(ours) == len(truth)
    assert all(o in (t, t[:-1]) for o, t in zip(ours, truth, strict=True))


@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining("sgd", 0.01)], ids=["gradient", "delta"])
@pytest.mark.parametrize("family", ENCODERS)
def test_dager_recovers_single_encoder_sentences_exactly(load, family, training, seed):
    model = load(family, seed=seed)
    batch = batch_of(model, sentences((6,), seed + 5))
    seen = seen_of(Client(model, training), batch, "0-1:q,k,v", Given(batch_size=False))
    found = build("attack", "dager", {})(seen, stream(0, "attack"))
    assert found.sequences == (tuple(batch.sequences()[0]),)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("family", [*ENCODERS, "electra", "distilbert"])
def test_decode_recovers_short_encoder_sentences_exactly_with_dropout_on(load, family, seed):
    model = load(family)
    for size in (3, 5):
        batch = batch_of(model, sentences((size,), seed))
        seen = seen_of(Client(model, dropout=True), batch, "0:q,k,v", Given(batch_size=False, dropout=False), seed)
        found = build("attack", "decode", {})(seen, stream(0, "attack"))
        assert found.sequences == (tuple(batch.sequences()[0]),)


@pytest.mark.parametrize("noise", [0.0, 1e-7, 1e-3, 0.1])
@pytest.mark.parametrize("family", ENCODERS)
def test_what_is_called_proven_was_in_the_batch(load, family, noise):
    """On a width of 32 two sentences are often too much to decode: then it must say so, and never prove what is not."""
    model, proven = load(family), 0
    rng = torch.Generator().manual_seed(0)
    tried = 6 if noise == 1e-3 else 16  # of three times the time
    for seed in range(tried):
        batch = batch_of(model, sentences((3, 3), seed, distinct=seed % 2 == 0))
        seen = seen_of(Client(model, dropout=True), batch, "0:q,k,v", seed=seed)
        added = {n: t + noise * t.abs().max() * torch.randn(t.shape, generator=rng) for n, t in seen.tensors.items()}
        found = build("attack", "decode", {})(dataclasses.replace(seen, tensors=added), stream(0, "attack"))
        sure = [s for s, c in zip(found.sequences, found.certificates or (), strict=True) if c == "proven"]
        assert set(sure) <= {tuple(s) for s in batch.sequences()}
        proven += len(sure)
    assert (proven > tried / 4) == (noise < 0.1)


@pytest.mark.parametrize("family", ENCODERS)
@pytest.mark.parametrize("name", ["dlg", "tag"])
def test_matching_puts_special_tokens_in_the_frame_alone(load, name, family):
    model = load(family)
    batch = batch_of(model, sentences((5, 5, 5), 1))
    for seed in range(4):
        seen = seen_of(Client(model), batch, "0:q", EVERYTHING if seed % 2 else Given())
        found = build("attack", name, {"steps": 1, "assumed_length": 20})(seen, stream(seed, "attack"))
        for sentence in found.sequences:
            inner = sentence[1:-1] if seed % 2 else sentence[1:]
            assert not model.special.ids & set(inner)
            assert sentence[0] == model.special.prefix[0]


def test_dager_needs_two_blocks_and_says_so(load):
    model = load("bert")
    batch = batch_of(model, sentences((3,), 1))
    for selection in ("1-2:*", "0:*", "head"):
        with pytest.raises(NotSupportedError, match="needs the query, key or value gradients of blocks 0 and 1"):
            build("attack", "dager", {})(seen_of(Client(model), batch, selection), stream(0, "attack"))


@pytest.mark.parametrize(("family", "task"), SETTINGS)
def test_blind_guesses_frequent_words_and_looks_at_no_tensor(load, family, task):
    model = load(family, task)
    blind = build("attack", "blind", {})
    one, two = (batch_of(model, sentences((3, 5), seed)) for seed in (1, 2))
    found = [blind(seen_of(Client(model), b, given=EVERYTHING), stream(0, "x")) for b in (one, two)]
    assert found[0] == found[1]
    assert [len(s) for s in found[0].sequences] == [len(s) for s in one.sequences()]
    assert model.decode(found[0].sequences[1]).split()[:5] == "the of and to a".split()
    tokens = frequent_tokens(model)
    assert len(tokens) == len(set(tokens)) > 10
    assert set(model.decode(tokens[:5]).split()) <= set(frequent_words())
    unknown = seen_of(Client(model), one, given=Given(batch_size=False))
    assert len(blind(unknown, stream(0, "x")).sequences) == 1


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
def test_every_entry_counts_in_the_digest(dtype):
    """Whatever the number of bytes, and however the tensor lies in memory."""
    whole = torch.arange(1, 16, dtype=dtype)
    for value in (whole, whole[1:], whole[3:8], whole[:9].view(3, 3).T, whole[4]):
        before = digest_of(value)
        assert before == digest_of(value.clone())
        for n in range(value.numel()):
            other = value.clone(memory_format=torch.contiguous_format)
            other.view(-1)[n] += 1
            assert digest_of(other) != before, n


def test_no_more_guesses_than_a_batch_is_known_to_have():
    sure = ("guess", "likely", "proven", "guess", "likely")
    found = Reconstruction(((1,), (2,), (3,), (4,), (5,)), labels=(0, 1, 0, 1, 0), certificates=sure)
    kept = no_more_than(3, found)
    assert kept.sequences == ((2,), (3,), (5,)), "the surest, in their order"
    assert (kept.labels, kept.certificates) == ((1, 0, 0), ("likely", "proven", "likely"))
    assert kept.notes == ("5 guesses for a batch that is known to hold 3: the surest were kept",)
    assert no_more_than(2, replace(found, labels=None, certificates=None)).sequences == ((1,), (2,))
    assert no_more_than(5, found) is found
    assert no_more_than(None, found) is found
    images = Reconstruction(images=torch.arange(12.0).view(3, 1, 2, 2), labels=(0, 1, 2))
    assert torch.equal(no_more_than(2, images).images, images.images[:2])
    assert no_more_than(2, images).sequences == ()


def test_every_attack_is_held_to_the_size_it_was_told(fresh, monkeypatch):
    _, seen = fresh
    monkeypatch.setattr(Rogue, "run", lambda self, seen, rng: Reconstruction(((5,), (6,), (7,))))
    assert Rogue()(seen, stream(0, "attack")).sequences == ((5,),)
    unknown = replace(seen, knowledge=replace(seen.knowledge, batch_size=None))
    assert len(Rogue()(unknown, stream(0, "attack")).sequences) == 3


@dataclass(frozen=True)
class Talker(Attack):
    """An attack from elsewhere that prints, and puts what it read into notes, details and errors."""

    name: ClassVar[str] = "talker"
    source: ClassVar[str] = "tests"
    how: str = "tells"

    def run(self, seen, rng):
        print("my secret is out")
        if self.how == "raises":
            raise ZeroDivisionError("my secret is out")
        if self.how == "refuses":
            raise NotSupportedError("my secret is out")
        if self.how == "names":
            raise type("my secret is out", (Exception,), {})
        return Reconstruction(((5, 6),), notes=("my secret is out",), details={"my secret is out": 1, "a": "secret"})


@pytest.fixture
def talk(folders, tmp_path, gradaudit, monkeypatch):
    monkeypatch.setitem(registry._entries["attack"], "talker", Talker)
    (tmp_path / "rows.csv").write_text("text,label\nriver stone,0\n")
    case = tmp_path / "case.toml"
    case.write_text(
        f'model = "random:{folders["bert"]}"\n[data]\npath = "rows.csv"\nlabel = "label"\n[attack]\nname = "talker"\n'
    )
    return lambda how: (*gradaudit("run", case, "--out", tmp_path / how, "--json", "--set", f"attack.how={how}"),
                        tmp_path / how)  # fmt: skip


@pytest.mark.parametrize("how", ["tells", "raises", "refuses", "names"])
def test_an_attack_from_elsewhere_puts_no_text_into_records(talk, how):
    _, out, _, folder = talk(how)
    assert "secret" not in out
    assert "secret" not in (folder / "records.jsonl").read_text() + (folder / "report.html").read_text()
    record = json.loads(out.splitlines()[0])
    assert "does not declare `textless = True`" in (record["error"] or record["notes"][0])


def test_what_it_declares_to_be_free_of_text_is_kept(talk, monkeypatch):
    monkeypatch.setattr(Talker, "textless", True)
    assert json.loads(talk("tells")[1].splitlines()[0])["details"] == {"my secret is out": 1, "a": "secret"}
    assert json.loads(talk("raises")[1].splitlines()[0])["error"] == "ZeroDivisionError: my secret is out"


def test_what_a_plugin_prints_is_no_json(talk):
    code, out, err, _ = talk("tells")
    assert [json.loads(line) for line in out.splitlines()]
    assert code == 0
    assert "my secret is out" in err
