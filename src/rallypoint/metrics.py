"""Metrics of a worker for people: the number of steps in all, and values such as its loss::

    from rallypoint import metrics, notices

    metrics.report(total=10_000)
    for step, batch in enumerate(batches):
        loss = train(batch)
        notices.progress(step)
        if step % 100 == 0:
            metrics.report(loss=loss)

Where somebody asks for them, the agent of rank 0 passes on those of its first worker that has left any: to a TrainJob
of Kubeflow.

Any language can do the same: the file `metrics.<LOCAL_RANK>` in the folder that `RALLYPOINT_NOTICES` names is a JSON
object, `total` (an integer) and `metrics` (an object of numbers), of at most 16 KiB, replaced as a whole. What is read
is a worker's text: each value is checked.
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
"""The variable that names the folder, as of `rallypoint.notices`."""
PREFIX = "metrics."
MAX_FILE = 16 * 1024
MAX_METRICS = 64
MAX_NAME = 128
MAX_TOTAL = 2**63 - 1


class Metrics(NamedTuple):
    """What a worker has left: `total` is 0 if it is not known."""

    total: int = 0
    values: Mapping[str, float] = {}


def report(total: int = 0, **values: float) -> None:
    """Leave metrics. Call it as often as a program logs: each call replaces a small file.

    Values that are no finite numbers are left out; those of earlier calls stay. Nothing is raised, and outside of
    Rallypoint nothing happens.

    Args:
        total: the number of steps (as of `notices.progress`) that the job takes in all; 0 if it is not known.
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
"""What this worker has left last."""


def write_metrics(folder: str, rank: str, metrics: Metrics) -> None:
    """Replace the file of a worker. Raises nothing: what cannot be written is not."""
    path = os.path.join(folder, f"{PREFIX}{rank}")
    new = f"{path}.{os.getpid()}"
    text = json.dumps({"total": metrics.total, "metrics": dict(metrics.values)}).encode()
    if len(text) > MAX_FILE:
        return
    with suppress(OSError, ValueError):
        make_private(folder)
        # Opened to append, as logs are, it is not taken for a checkpoint whose writing a stop has to wait for.
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
        file = os.open(new, flags, 0o600)
        try:
            os.write(file, text)
        finally:
            os.close(file)
        os.replace(new, path)


def read_metrics(folder: str, ranks: int) -> Metrics:
    """The metrics of the first worker of a node that has left any; empty if none has."""
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
    """None if the text is no such object. Raises ValueError or RecursionError: it is no JSON."""
    content: object = json.loads(text)
    if not isinstance(content, dict):
        return None
    return Metrics(total_of(content.get("total")), values_of(content.get("metrics")))


def total_of(value: object) -> int:
    """A number of steps; 0 for what can be none."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= MAX_TOTAL else 0


def values_of(values: object) -> dict[str, float]:
    """What can be metrics of it: finite numbers with printable names."""
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
    except (TypeError, ValueError, OverflowError, RuntimeError):  # of a tensor with many elements: RuntimeError
        return None
    return number if math.isfinite(number) else None
