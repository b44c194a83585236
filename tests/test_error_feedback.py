"""Error feedback: over rounds nothing is lost, clients remember their own, no attack learns what is held back."""

from __future__ import annotations

from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from gradaudit.audit.fitting import simulation_of
from gradaudit.audit.prepare import prepare
from gradaudit.case import parse_case
from gradaudit.client.client import Client
from gradaudit.client.error_feedback import after_rounds, earlier_rounds, feedback_round
from gradaudit.data.text import Sentences
from gradaudit.defenses.compression import Sign, TopK
from gradaudit.defenses.feedback import ErrorFeedback
from gradaudit.errors import BadInputError
from gradaudit.registry import build
from gradaudit.selection import Selection
from gradaudit.streams import stream
from gradaudit.types import LocalTraining
from tiny_models import batch_of, sentences

FEEDBACK = (ErrorFeedback(3), TopK(0.05))


def rounds_of(model: Any, count: int, size: int = 2) -> list[Any]:
    return [batch_of(model, sentences((4, 6, 5, 3)[:size], 10 + n)) for n in range(count)]


def flat(tensors: Any) -> Tensor:
    return torch.cat([t.double().flatten() for t in tensors.values()])


def share_apart(some: Tensor, others: Tensor) -> float:
    return float(((some - others).abs() > 1e-5 * others.abs().max()).double().mean())


@pytest.mark.parametrize("training", [LocalTraining(), LocalTraining("sgd", 0.1, epochs=2)], ids=["gradient", "delta"])
@pytest.mark.parametrize("compression", [(TopK(0.05),), (Sign(),), (TopK(0.2), Sign())], ids=["topk", "sign", "both"])
def test_over_rounds_nothing_is_lost(load, compression, training):
    """What was sent and what is still held back add up to the undefended updates, whatever compresses them."""
    model = load("bert")
    client, plain = Client(model, training, defenses=(ErrorFeedback(3), *compression)), Client(model, training)
    held, sent, whole = None, torch.zeros(()), torch.zeros(())
    for number, batch in enumerate(rounds_of(model, 3)):
        update, held = feedback_round(client, batch, 1, held, stream(0, "round", number))
        sent = sent + flat(update.tensors)
        whole = whole + flat(plain.update(batch, stream(1, "plain")).tensors)
    assert held is not None
    left = flat({name: value[0] for name, value in held.items()})
    torch.testing.assert_close(sent + left, whole, rtol=0, atol=1e-5 * float(sent.abs().max()))
    assert float(left.norm()) > 0.1 * float(whole.norm()), "something was held back"


def test_the_attacked_update_is_that_of_the_published_algorithm(load):
    """One loop in plain tensors: u = g + e, send the largest of u, keep the rest."""
    model = load("bert")
    batches = rounds_of(model, 4)
    memory: dict[str, Tensor] = {}
    expected: dict[str, Tensor] = {}
    for batch in batches:
        for name, g in Client(model).update(batch, stream(0, "x")).tensors.items():
            u = g + memory.get(name, torch.zeros_like(g))
            count = max(1, round(0.05 * u.numel()))
            where = u.abs().flatten().topk(count).indices
            expected[name] = torch.zeros_like(u).flatten().index_copy(0, where, u.flatten()[where]).view_as(u)
            memory[name] = u - expected[name]
    client = after_rounds(Client(model, defenses=FEEDBACK), batches[:3], stream(0, "earlier"))
    update = client.update(batches[3], stream(0, "attacked"))
    # the key biases' gradients are rounding alone, and so is which of them is largest
    assert share_apart(flat(update.tensors), flat(expected)) < 1e-4
    assert share_apart(flat(update.tensors), flat(Client(model).update(batches[3], stream(0, "x")).tensors)) > 0.1
    assert [d["name"] for d in update.defenses] == ["error-feedback", "topk"]
    without = Client(model, defenses=FEEDBACK[1:]).update(batches[3], stream(0, "attacked"))
    assert not torch.allclose(flat(update.tensors), flat(without.tensors))
    first = after_rounds(Client(model, defenses=FEEDBACK), [], stream(0, "earlier"))
    assert torch.equal(flat(first.update(batches[3], stream(0, "attacked")).tensors), flat(without.tensors))


@pytest.mark.parametrize("size", [4, 8], ids=["one each", "two each"])
def test_clients_of_a_sum_remember_their_own(load, size):
    model = load("bert")
    batches = [batch_of(model, sentences((4, 6, 5, 3, 4, 5, 6, 3)[:size], 20 + n)) for n in range(3)]
    together = after_rounds(Client(model, defenses=FEEDBACK, clients=4), batches[:2], stream(0, "earlier"))
    found = together.update(batches[2], stream(0, "attacked")).tensors
    each = size // 4
    alone = []
    for n in range(4):
        own = [b.take(torch.arange(n * each, (n + 1) * each)) for b in batches]
        client = after_rounds(Client(model, defenses=FEEDBACK), own[:2], stream(0, "earlier"))
        alone.append(flat(client.update(own[2], stream(0, "attacked")).tensors))
    mean = torch.stack(alone).mean(0)
    # a coordinate at the edge of the largest may fall to either side by rounding
    assert share_apart(flat(found), mean) < 1e-3
    assert share_apart(flat(found), alone[0]) > 0.01


def test_what_is_trained_is_the_same_with_a_freeze_behind_it(load):
    model = load("bert")
    client = Client(model, defenses=(*FEEDBACK, build("defense", "freeze", {"what": "embeddings"})))
    batches = rounds_of(model, 2)
    again = after_rounds(client, batches[:1], stream(0, "earlier"))
    assert again.held is not None
    assert set(again.held) == set(client.trained()) == set(again.update(batches[1], stream(0, "x")).tensors)


@pytest.mark.parametrize(
    "tables",
    [["error-feedback"], ["topk", "error-feedback"], ["error-feedback", "error-feedback", "topk"],
     ["error-feedback", "freeze"], ["error-feedback", "aegis", "topk"]],
    ids=" ".join,
)  # fmt: skip
def test_feedback_that_feeds_nothing_is_refused(load, tables):
    with pytest.raises(BadInputError, match="named once, right before the compression, such as topk"):
        Client(load("bert"), defenses=tuple(build("defense", name, {}) for name in tables))


def test_bad_rounds_and_a_client_without_feedback_are_refused(load):
    with pytest.raises(BadInputError, match="rounds must be at least 0, got -1"):
        ErrorFeedback(-1)
    model = load("bert")
    with pytest.raises(BadInputError, match="holds nothing back"):
        feedback_round(Client(model), rounds_of(model, 1)[0], 1, None, stream(0, "x"))
    plain = Client(model, defenses=(TopK(0.1),))
    assert after_rounds(plain, rounds_of(model, 1), stream(0, "x")) is plain
    assert (earlier_rounds(plain), earlier_rounds(Client(model, defenses=FEEDBACK))) == (0, 3)


def case_of(folders: Any, **over: Any) -> Any:
    table = [{"name": "error-feedback", "rounds": 2}, {"name": "topk", "keep": 0.05}]
    data = {"model": f"random:{folders['bert']}", "defense": table, "attack": {"name": "blind"}}
    return parse_case(data | over)


def test_earlier_rounds_are_of_rows_that_are_in_no_audited_batch(folders, monkeypatch):
    drawn: list[tuple[int, ...]] = []
    original = Sentences.batch
    monkeypatch.setattr(Sentences, "batch", lambda self, rows: (drawn.append(tuple(rows)), original(self, rows))[1])
    ready = prepare(case_of(folders, data={"batch_size": 2, "batches": 3}), Path.cwd(), torch.device("cpu"))
    assert ready.client.held is not None
    assert [len(some) for some in drawn] == [2, 2]
    assert not set(chain(*drawn)) & set(chain(*ready.batches))


def test_an_attack_that_learns_does_not_get_what_is_held_back(folders):
    ready = prepare(case_of(folders), Path.cwd(), torch.device("cpu"))
    assert ready.client.held is not None
    assert simulation_of(ready.client, Selection("all")).client.held is None
    for name in ("tag", "lamp", "lti"):
        assert not build("attack", name, {}).reckons_with("error-feedback", ready.model, 1)
