"""What recording a round of Flower costs the server: the app of examples/flower, two clients, MiniLM.

    OMP_NUM_THREADS=1 python benchmarks/flower_rounds.py --write benchmarks/results/integrations/flower-rounds.md

Needs the extra `flower`. Every second round is recorded. A round's seconds go into three parts: what Flower takes, what
writing the two bundles takes, and the rest, which is what `AuditGrid` itself adds.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from grid import commit, made, markdown, options, write_table

EXAMPLE = Path(__file__).parent.parent / "examples" / "flower"


class Clock:
    """Seconds of what is called through it, summed until they are taken."""

    def __init__(self) -> None:
        self.sum = 0.0

    def around(self, call: Any) -> Any:
        """Return the same call, timed."""

        def timed(*given: Any, **named: Any) -> Any:
            began = time.perf_counter()
            try:
                return call(*given, **named)
            finally:
                self.sum += time.perf_counter() - began

        return timed

    def taken(self) -> float:
        """Return the sum, and begin anew."""
        found, self.sum = self.sum, 0.0
        return found


class TimedGrid:
    """A Grid whose calls are timed; all else is asked of the one inside."""

    def __init__(self, grid: Any, clock: Clock) -> None:
        self.inner = grid
        self.send_and_receive = clock.around(grid.send_and_receive)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


def rounds(number: int, folder: Path) -> list[tuple[float, float, float]]:
    """Return each round's seconds: of Flower from one round to the next, of writing bundles, of the rest."""
    sys.path.insert(0, str(EXAMPLE))
    os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)  # Flower's workers find the app
    from audited.client_app import app as client
    from audited.task import DECAY, RATE, load
    from flwr.app import ArrayRecord
    from flwr.serverapp import ServerApp
    from flwr.serverapp.strategy import FedAvg
    from flwr.simulation import run_simulation

    from gradaudit.integrations.flower import AuditGrid
    from gradaudit.integrations.recording import Recorder
    from gradaudit.types import LocalTraining

    inner, writing, whole = Clock(), Clock(), Clock()
    Recorder.write = writing.around(Recorder.write)  # type: ignore[method-assign]
    began: list[float] = []
    parts: list[tuple[float, float]] = []
    server = ServerApp()

    @server.main()
    def main(grid: Any, context: Any) -> None:
        model, tokenizer = load()
        told = LocalTraining("adamw", RATE, weight_decay=DECAY)
        audit = AuditGrid(TimedGrid(grid, inner), folder, model=model, tokenizer=tokenizer, training=told, sentences=1,
                          dropout=True, every=2, most=10 * number)  # fmt: skip
        call = whole.around(audit.send_and_receive)

        def noted(messages: Any, **named: Any) -> Any:
            messages = list(messages)
            if not messages:  # of an evaluation that nobody takes part in
                return call(messages, **named)
            writing.taken(), whole.taken(), inner.taken()
            began.append(time.perf_counter())
            replies = call(messages, **named)
            parts.append((writing.taken(), whole.taken() - inner.taken()))
            return replies

        audit.send_and_receive = noted
        strategy = FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=2)
        strategy.start(grid=audit, initial_arrays=ArrayRecord(model.state_dict()), num_rounds=number + 2)

    workers = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server, client, 2, backend_config=workers)
    if len(parts) != number + 2:
        raise RuntimeError(f"{len(parts)} rounds were timed, and {number + 2} were run")
    found = []
    for n in range(number):  # the first waits for Flower's workers, and the last has no next one
        wrote, added = parts[n + 1]
        found.append((began[n + 2] - began[n + 1] - added, wrote, added - wrote))
    return found


def main() -> None:
    """Run the app, and print or write the table."""
    parser = options(__doc__)
    parser.add_argument("--rounds", type=int, default=16, help="rounds that are timed, half of them recorded")
    parser.add_argument("--write", type=Path, default=None, help="Markdown file for the table")
    given = parser.parse_args()
    commit()
    with tempfile.TemporaryDirectory() as place:
        timed = rounds(given.rounds, Path(place))
    rows = []
    for title, some in (("not recorded", timed[::2]), ("recorded", timed[1::2])):
        flower, wrote, rest = (statistics.median(one[n] for one in some) for n in range(3))
        worst = max(one[2] / one[0] for one in some)
        share = statistics.median(one[2] / one[0] for one in some)
        rows.append([title, str(len(some)), f"{flower:.2f}", f"{wrote:.2f}", f"{1000 * rest:.0f}", f"{share:.2%}",
                     f"{worst:.2%}"])  # fmt: skip
    columns = ["round", "rounds", "Flower's own s", "writing two bundles s", "the rest ms", "rest of Flower's own",
               "the worst round"]  # fmt: skip
    table = markdown(columns, rows)
    print(table)
    if given.write is not None:
        write_table(given.write, f"{made()} Two clients, MiniLM, one step of AdamW each; medians.", table)


if __name__ == "__main__":
    main()
