"""Metrics from a worker: the total number of steps, and values such as its loss::

    from rallypoint import metrics, notices

    metrics.report(total=10_000)
    for step, batch in enumerate(batches):
        loss = train(batch)
        notices.progress(step)
        if step % 100 == 0:
            metrics.report(loss=loss)

If a receiver wants them (a TrainJob in Kubeflow), the agent of rank 0 passes on the metrics of its first worker that
reported any.

Any language can do the same: the file `metrics.<LOCAL_RANK>` in the folder `RALLYPOINT_NOTICES` is a JSON object with
`total` (an integer) and `metrics` (an object of numbers), of at most 16 KiB. Replace it as a whole. The reader checks
each value, since any worker can write it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from contextlib import suppress

from rallypoint.base.light_typing import NamedTuple
from rallypoint.base.private_files import is_private, make_private, open_regular

FOLDER = "RALLYPOINT_NOTICES"
"""Names the folder, as for `rallypoint.notices`."""
PREFIX = "metrics."
MAX_FILE = 16 * 1024
MAX_METRICS = 64
MAX_NAME = 128
MAX_TOTAL = 2**63 - 1


class Metrics(NamedTuple):
    """A worker's metrics; `total` is 0 if unknown."""

    total: int = 0
    values: Mapping[str, float] = {}


def report(total: int = 0, **values: float) -> None:
    """Report metrics. Call this as often as a program logs: each call replaces a small file.

    Values that are not finite numbers are ignored; those from earlier calls stay. Nothing is raised, and without
    Rallypoint nothing happens.

    Args:
        total: the total number of steps (as in `notices.progress`) of the job; 0 if unknown.
        values: by name.
    """
    global _left
    folder, rank = os.environ.get(FOLDER), os.environ.get("LOCAL_RANK")
    if not folder or not rank:
        return
    new = values_of(values)
    _left = Metrics(total_of(total) or _left.total, values_of({**new, **_left.values, **new}))
    write_metrics(folder, rank, _left)


_left = Metrics()
"""This worker's last report."""


def write_metrics(folder: str, rank: str, metrics: Metrics) -> None:
    """Replace the file of a worker. Never raises; a failed write is ignored."""
    path = os.path.join(folder, f"{PREFIX}{rank}")
    new = f"{path}.{os.getpid()}"
    text = json.dumps({"total": metrics.total, "metrics": dict(metrics.values)}).encode()
    if len(text) > MAX_FILE:
        return
    with suppress(OSError, ValueError):
        make_private(folder)
        # Open it for appending, like a log, so that a stop does not mistake it for a checkpoint and wait for it.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(new, flags, 0o600)
        try:
            os.write(file, text)
        finally:
            os.close(file)
        os.replace(new, path)


def read_metrics(folder: str, ranks: int) -> Metrics:
    """The metrics of the first worker on a node that reported any; empty if none did."""
    if not folder or not is_private(folder):
        return Metrics()
    for rank in range(ranks):
        with suppress(OSError, ValueError, RecursionError):
            with open(open_regular(os.path.join(folder, f"{PREFIX}{rank}")), "rb", buffering=0) as file:
                text = file.read(MAX_FILE + 1)
            if len(text) <= MAX_FILE and (found := decoded(text)) is not None:
                return found
    return Metrics()


def decoded(text: bytes) -> Metrics | None:
    """Decode metrics; None if the JSON has another form. Raises ValueError or RecursionError if it is not JSON."""
    content: object = json.loads(text)
    if not isinstance(content, dict):
        return None
    return Metrics(total_of(content.get("total")), values_of(content.get("metrics")))


def total_of(value: object) -> int:
    """A number of steps; 0 if the value is not valid."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_TOTAL else 0


def values_of(values: object) -> dict[str, float]:
    """The valid metrics among the values: finite numbers with printable names."""
    found: dict[str, float] = {}
    if isinstance(values, Mapping):
        for name, value in values.items():
            if len(found) < MAX_METRICS and isinstance(name, str) and 0 < len(name) <= MAX_NAME and name.isprintable():
                number = _number(value)
                if number is not None:
                    found[name] = number
    return found


def _number(value: object) -> float | None:
    if isinstance(value, bool):
        return None
    try:
        number = float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError, RuntimeError):  # RuntimeError: a tensor with several elements
        return None
    return number if math.isfinite(number) else None
