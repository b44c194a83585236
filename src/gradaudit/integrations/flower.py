"""Flower: updates recorded at the server, by a wrapped Grid, or at a client, by a mod; a mod that may hold one back.

Recorders import nothing of Flower: they take what it hands them, so that they work with every version that hands it so.
"""

from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

from gradaudit.errors import BadInputError
from gradaudit.integrations.gatekeeper import Gatekeeper
from gradaudit.integrations.recording import Recorder, swallowing

_CLOSED = 1000
"""Code of the error that goes to the server in the place of an update; Flower's own are below 1000."""
_ROUND = "server-round"
"""Under which Flower's strategies tell the round in a message's configuration."""
_STORED = "numpy.ndarray"
"""What Flower calls arrays that are stored as `numpy.save` writes them, as all of its own are."""
_HEADERS = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}


class AuditGrid:
    """A Flower Grid that records what each client's training changed, and changes nothing.

    Use it in the place of the Grid: `strategy.start(grid=AuditGrid(grid, "updates", model=model, ...), ...)`. A round's
    bundles are FOLDER/round-1/node-123 and so on. What goes wrong is logged (logger "gradaudit") and swallowed.

    Args:
        grid: the Grid of the server app; all that is asked of this one is asked of it.
        folder: where the bundles go.
        model: as `Recorder` takes it, and all others as well.
    """

    def __init__(self, grid: Any, folder: str | Path, *, model: Any, **told: Any) -> None:
        self._grid, self._recorder, self._rounds = grid, Recorder(folder, model, **told), 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> list[Any]:
        """Send messages, return the replies as they came, and record those to messages of training."""
        sent = list(messages)
        replies = list(self._grid.send_and_receive(sent, timeout=timeout))
        with swallowing("a round of Flower"):
            before = {m.metadata.dst_node_id: m for m in sent if _trains(m)}
            self._rounds += bool(before)
            number = _round(next(iter(before.values()))) if before else None
            for reply in replies:
                node = reply.metadata.src_node_id
                if node in before:
                    with swallowing(f"round {number or self._rounds}, node {node}"):
                        self._record(number or self._rounds, node, before[node], reply)
        return replies

    def _record(self, number: int, node: int, message: Any, reply: Any) -> None:
        if self._recorder.due(number):
            self._recorder.write(f"round-{number}/node-{node}", _weights(message), _weights(reply))


def audit_mod(folder: str | Path, *, model: Any, **told: Any) -> Callable[[Any, Any, Callable[[Any, Any], Any]], Any]:
    """Return a mod of a Flower client that records what leaves the mods and the app within it.

    `ClientApp(mods=[audit_mod(...)])` records what is sent; behind a mod, as in `@app.train(mods=[LocalDpMod(...),
    audit_mod(...)])`, what was there before that mod acted. The bundles are FOLDER/round-1/node-123 and so on. What
    goes wrong is logged (logger "gradaudit") and swallowed.

    Args:
        folder: where the bundles go.
        model: as `Recorder` takes it, and all others as well.
    """
    recorder = Recorder(folder, model, **told)

    def mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        number, before = 1, None
        with swallowing("a round of Flower"):
            if _trains(message):
                number = _round(message) or 1
                # the app may write into what it was sent
                before = _weights(message) if recorder.due(number) else None
        reply = call_next(message, context)
        if before is not None:
            node = message.metadata.dst_node_id
            with swallowing(f"round {number}, node {node}"):
                recorder.write(f"round-{number}/node-{node}", before, _weights(reply))
        return reply

    return mod


def gate_mod(*, model: Any, **how: Any) -> Callable[[Any, Any, Callable[[Any, Any], Any]], Any]:
    """Return a mod of a Flower client that attacks its update, and sends an error in its place where it is read.

    It takes the time that it is given out of every round. As the outermost mod it judges what is really sent.

    Args:
        model: as `Gatekeeper` takes it, and all others as well.
    """
    keeper = Gatekeeper(model, **how)

    def mod(message: Any, context: Any, call_next: Callable[[Any, Any], Any]) -> Any:
        if not _trains(message):
            return call_next(message, context)
        before = _weights(message)
        reply = call_next(message, context)
        if reply.has_error():
            return reply
        try:
            why = keeper.refusal(before, _weights(reply))
        except BadInputError as error:
            why = f"not decided: {error}"
        return reply if why is None else _refused(message, why)

    return mod


def _refused(message: Any, why: str) -> Any:
    from flwr.app import Error, Message

    return Message(Error(_CLOSED, f"gradaudit did not let the update out ({why})"), reply_to=message)


def _trains(message: Any) -> bool:
    return str(message.metadata.message_type).partition(".")[0] == "train"


def _round(message: Any) -> int | None:
    """Return the round that a message says it is of, from 1."""
    for record in message.content.config_records.values():
        if _ROUND in record:
            return int(record[_ROUND])
    return None


def _weights(message: Any) -> Mapping[str, Any] | list[Any]:
    """Return the arrays of a message, by name or, where its names are numbers, in their order.

    Raises:
        BadInputError: an error in the place of a reply, or not one record of arrays.
    """
    if message.has_error():
        raise BadInputError(f"the client replied with an error ({message.error.reason})")
    records = list(message.content.array_records.values())
    if len(records) != 1:
        raise BadInputError(f"the message holds {len(records)} records of arrays, and one is needed")
    arrays = {name: _viewed(stored) for name, stored in records[0].items()}
    numbered = list(arrays) == [str(n) for n in range(len(arrays))]
    return list(arrays.values()) if numbered else arrays


def _viewed(stored: Any) -> Any:
    """Return one of Flower's arrays as a view of its bytes, which nobody writes into: a copy takes 30 ms of MiniLM."""
    file = BytesIO(stored.data)
    header = _HEADERS.get(np.lib.format.read_magic(file)) if stored.stype == _STORED else None
    if header is None:
        return stored.numpy()
    shape, columns_first, dtype = header(file)
    numbers = np.frombuffer(stored.data, dtype, offset=file.tell())
    return numbers.reshape(shape, order="F" if columns_first else "C")
