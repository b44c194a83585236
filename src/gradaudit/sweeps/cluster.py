"""A sweep on a Ray cluster: a task for the points of each client, and one program that writes the table."""

import socket
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gradaudit.errors import BadInputError
from gradaudit.leakage.matching.compiled import asked as compile_steps
from gradaudit.machine import ready_process
from gradaudit.sweeps.result import Result, SweepPoint
from gradaudit.sweeps.sweep import Groups, run_some
from gradaudit.sweeps.utility import UtilityTable


def run_on_cluster(
    groups: Groups,
    cost: UtilityTable | None,
    base: Path,
    out: Path,
    device: torch.device,
    address: str,
) -> Iterator[tuple[int, Result]]:
    """Run points on the workers of a Ray cluster and yield the number of each with what it gave, as they are ready.

    Workers write the points' folders, so that all machines see `out` and the data by the same paths. A worker that is
    killed costs the points of its client: they are results with that error, and are run when the sweep is run again.

    Args:
        groups: numbered points, those of one client together.
        cost, base, out, device: as `run_points` takes them.
        address: of the cluster, as `ray.init` takes it; "local" starts one on this machine.

    Raises:
        BadInputError: the extra "ray" is not installed, or no cluster answers.
    """
    ray = _connected(address)
    try:
        # a worker for each task: what it held goes with it, and want of memory would only come again
        task = ray.remote(max_calls=1, max_retries=0, num_cpus=1, num_gpus=int(device.type == "cuda"))(_task)
        base, out = base.resolve(), out.resolve()
        waiting = {
            task.remote([point for _, point in group], cost, str(base), str(out), str(device), compile_steps()): group
            for group in groups
        }
        while waiting:
            (done,), _ = ray.wait(list(waiting), num_returns=1)
            group = waiting.pop(done)
            try:
                results = ray.get(done)
            except ray.exceptions.RayError as error:
                said = f"its worker was lost ({type(error).__name__}); run the sweep again"
                results = [Result(point, None, error=said) for _, point in group]
            yield from zip([number for number, _ in group], results, strict=True)
    finally:
        ray.shutdown()


def _connected(address: str) -> Any:
    try:
        import ray
    except ImportError:
        raise BadInputError("a sweep on a Ray cluster needs the extra: pip install 'gradaudit[ray]'") from None
    host, colon, port = address.partition(":")
    try:
        if colon and port.isdigit():  # Ray itself tries for minutes
            socket.create_connection((host, int(port)), timeout=10).close()
        ray.init(address, log_to_driver=False, logging_level="ERROR")
    except (OSError, ValueError, RuntimeError, SystemExit) as error:
        # Ray leaves with a number where something else listens there
        exits = isinstance(error, SystemExit)
        first = "another program's port?" if exits else (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise BadInputError(f"no Ray cluster answers at '{address}' ({first})") from None
    return ray


def _task(
    points: Sequence[SweepPoint], cost: UtilityTable | None, base: str, out: str, device: str, compiled: bool
) -> list[Result]:
    """Run the points of a client in a worker."""
    ready_process()
    torch.set_num_threads(1)
    return run_some(points, cost, Path(base), Path(out), torch.device(device), compiled)
