"""A metric handler, an event handler, a timer client and an error handler of third parties, written for torch."""

import json
import logging
import os
import tempfile
from typing import Any

from torch.distributed.elastic import events, metrics, timer
from torch.distributed.elastic.events.handlers import _log_handlers
from torch.distributed.elastic.multiprocessing.errors import ErrorHandler, record

told: dict[str, Any] = {"metrics": [], "events": [], "timers": [], "errors": []}


class Metrics(metrics.MetricHandler):
    def emit(self, metric_data: metrics.MetricData) -> None:
        kind = "ms" if metric_data.name.endswith(".ms") else metric_data.value
        told["metrics"].append([metric_data.group_name, metric_data.name, kind])


class Events(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        told["events"].append(json.loads(record.getMessage()))


class Timer(timer.TimerClient):
    def acquire(self, scope_id: str, expiration_time: float) -> None:
        told["timers"].append(["acquire", scope_id, expiration_time > 0])

    def release(self, scope_id: str) -> None:
        told["timers"].append(["release", scope_id])


class Errors(ErrorHandler):
    def initialize(self) -> None:
        told["errors"].append("initialize")

    def record_exception(self, e: BaseException) -> None:
        told["errors"].append(repr(e))
        super().record_exception(e)


@metrics.prof
def counted(fail: bool) -> None:
    if fail:
        raise KeyError("wanted")


def main() -> None:
    metrics.configure(Metrics())
    metrics.configure(Metrics(), group="mine")
    metrics.put_metric("a", 1, "mine")
    metrics.getStream("other").add_value("b", 2)
    counted(False)
    try:
        counted(True)
    except KeyError:
        told["raised"] = True

    _log_handlers["listed"] = Events()
    events.record(events.Event("name", events.EventSource.WORKER, metadata={"a": 1}), "listed")

    timer.configure(Timer())
    with timer.expires(after=5, scope="s"):
        told["timers"].append("inside")

    with tempfile.TemporaryDirectory() as folder:
        os.environ["TORCHELASTIC_ERROR_FILE"] = os.path.join(folder, "error.json")

        def broken() -> None:
            raise ValueError("told")

        try:
            record(broken, Errors())()
        except ValueError:
            with open(os.environ["TORCHELASTIC_ERROR_FILE"]) as file:
                told["file"] = json.load(file)["message"]["message"]
    print(json.dumps(told, sort_keys=True))


main()
