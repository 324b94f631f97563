"""Reports the progress of a job to Kubeflow Trainer, which shows it in the status of the TrainJob.

Where its feature gate `TrainJobStatus` is on, Trainer sets in every pod of a TrainJob (v2.2 or newer):

    KUBEFLOW_TRAINER_SERVER_URL        where the status is sent, by POST
    KUBEFLOW_TRAINER_SERVER_CA_CERT    path of the certificates that the server is checked against
    KUBEFLOW_TRAINER_SERVER_TOKEN      path of the token that says which pod this is; it is renewed

    https://github.com/kubeflow/trainer/tree/master/docs/proposals/2779-trainjob-progress

The percentage and the remaining time follow from the steps that workers report (`notices.progress`) and the number of
steps in all (`rallypoint.metrics`); metrics are those of `rallypoint.metrics`, and the step.

Laws:

1. Nothing is sent before a worker has reported a step: a program that reports by Trainer's own library is left alone.
2. The agent of group rank 0 reports, and nobody else.
3. At most one request in `_EVERY` seconds, after a failure fewer. All files are read and all requests made on a thread
   of its own, with a limit in time; at the end of the job at most `_LAST` seconds are waited.
4. The token is sent by https alone, to a server that the certificates vouch for. Redirections are not followed.
5. Nothing here can fail, hold up or end the job. What fails is said once, and again once something else fails.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from rallypoint.agent.feature import Agent, Feature
from rallypoint.agent.sources import Source
from rallypoint.base.clock import SYSTEM_CLOCK, Clock
from rallypoint.base.light_typing import NamedTuple
from rallypoint.base.log import get_logger, printable
from rallypoint.base.side_thread import SideThread
from rallypoint.metrics import Metrics, read_metrics

if TYPE_CHECKING:
    from rallypoint.agent.folder import Reached

log = get_logger(__name__)

URL = "KUBEFLOW_TRAINER_SERVER_URL"
CA_CERT = "KUBEFLOW_TRAINER_SERVER_CA_CERT"
TOKEN = "KUBEFLOW_TRAINER_SERVER_TOKEN"
"""Names of variables; the last two name files."""

_EVERY = 10.0
_LONGEST_PAUSE = 300.0
"""Seconds between requests, at first and at most after failures."""
_TIMEOUT = 5.0
"""Seconds that a connection, and then each part of an answer, may take."""
_LAST = 2.0
_MAX_ANSWER, _MAX_TOKEN = 64 * 1024, 64 * 1024
_MAX_SECONDS = 2**31 - 1
"""What the field of the remaining seconds can hold."""


class Position(NamedTuple):
    """How far a round has come: the last step and when it was reached, and the first, on the monotonic clock."""

    step: int
    at: float
    first: int
    first_at: float


def status_of(position: Position, metrics: Metrics, now: str, *, done: bool = False) -> dict[str, object]:
    """The status that is sent. Pure.

    Args:
        position: of the round that runs.
        metrics: of its workers.
        now: the time of day, as RFC 3339 has it.
        done: the job has succeeded.
    """
    status: dict[str, object] = {"lastUpdatedTime": now}
    if done:
        status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
    elif metrics.total:
        # 100 is for a job that has succeeded.
        status["progressPercentage"] = min(99, 100 * position.step // metrics.total)
        left = remaining(position, metrics.total)
        if left is not None:
            status["estimatedRemainingSeconds"] = left
    shown: dict[str, float] = {**metrics.values, "step": position.step}
    if metrics.total:
        shown["totalSteps"] = metrics.total
    status["metrics"] = [{"name": name, "value": f"{value:.10g}"} for name, value in shown.items()]
    return {"trainerStatus": status}


def remaining(position: Position, total: int) -> int | None:
    """Seconds that the steps which are left will take at the pace of this round; None if that is not known."""
    steps, seconds = position.step - position.first, position.at - position.first_at
    if position.first < 0 or steps <= 0 or seconds <= 0:
        return None
    return min(_MAX_SECONDS, math.ceil(max(0, total - position.step) * seconds / steps))


class TrainJobStatus(Feature):
    """The reports of one node."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.reporter = Reporter(self._position, self._leads, self._read, os.environ, agent.clock)

    def watchers(self) -> Iterable[Source]:
        return (self.reporter,)

    def finish(self, error: BaseException | None) -> None:
        self.reporter.finish(succeeded=error is None)

    def close(self) -> None:
        if not self.workers.is_launched:  # else `finish` follows
            self.reporter.finish(succeeded=False)

    def _leads(self) -> bool:
        return not self.workers.group.group_rank

    def _position(self) -> Position | None:
        latest, began = self.workers.folder.latest(), self.workers.folder.began()
        return None if latest is None or latest.step < 0 else position_of(latest, began)

    def _read(self) -> Callable[[], Metrics]:
        folder, ranks = self.workers.group.notices, len(self.workers.group.workers)
        return lambda: read_metrics(folder, ranks)


def position_of(latest: Reached, began: Reached | None) -> Position:
    """Where the workers are, and where the first of them that has reported began."""
    if began is None:
        return Position(latest.step, latest.at, -1, 0.0)
    return Position(latest.step, latest.at, began.first, began.first_at)


class Reporter(Source):
    """Sends the status at intervals. Nothing here waits but `finish`, and that not for long.

    Args:
        position: where the job is; None if that is not known.
        leads: whether this node reports.
        reads: returns what reads the metrics, on the thread.
        environ: has the variables.
        clock: of `wake_at`.
    """

    def __init__(
        self,
        position: Callable[[], Position | None],
        leads: Callable[[], bool],
        reads: Callable[[], Callable[[], Metrics]],
        environ: Mapping[str, str],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._position = position
        self._leads = leads
        self._reads = reads
        self._clock = clock
        self._server = Server(environ)
        self._thread = SideThread("rallypoint-trainjob", self._failed, limit=2)
        self._looked_at = clock.monotonic()
        # Only the thread writes these, but for the end.
        self._pause = _EVERY
        self._reported: Position | None = None
        self._metrics = Metrics()
        self._said = ""

    def wake_at(self) -> float:
        return self._looked_at + self._pause

    def step(self) -> None:
        now = self._clock.monotonic()
        if now < self.wake_at():
            return
        self._looked_at = now
        found = self._position()
        if found is None or found == self._reported or not self._leads() or not self._thread.is_idle:
            return
        read = self._reads()
        self._thread.post("a report to the TrainJob", lambda: self._report(found, read))

    def finish(self, *, succeeded: bool) -> None:
        """The run is over: send the last status, and wait for it a little. Idempotent."""
        if self._thread.closed:
            return
        self._looked_at = math.inf
        last = self._position() or self._reported
        if succeeded and last is not None and self._leads():
            self._thread.post("the last report to the TrainJob", lambda: self._report(last, None))
        self._thread.close(_LAST)

    # On the thread

    def _report(self, position: Position, read: Callable[[], Metrics] | None) -> None:
        """`read` is None for the last report: the folder of the workers is gone by then."""
        if read is not None:
            found = read()
            self._metrics = self._metrics if found == Metrics() else found
        now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        failure = self._server.send(status_of(position, self._metrics, now, done=read is None))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE) if failure else _EVERY
        self._reported = self._reported if failure else position
        if failure != self._said:
            self._said = failure
            if failure:
                log.warning("the progress of this job is not shown in the TrainJob: %s; the job continues", failure)
            else:
                log.info("the progress of this job is shown in the TrainJob")

    def _failed(self, what: str) -> None:
        log.exception("%s failed; the job continues without it: this is a bug in Rallypoint, please report it", what)


class Server:
    """The server of Trainer, as the variables name it. Files are read anew for each request, as they are renewed.

    Args:
        environ: has the variables.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._url, self._ca, self._token = (environ.get(name, "") for name in (URL, CA_CERT, TOKEN))

    def send(self, status: Mapping[str, object]) -> str:
        """Send a status. Returns why that failed, in words; empty if it did not."""
        # Only a job of Trainer imports these, on this thread.
        import http.client
        import json
        import ssl
        from urllib.parse import urlsplit

        try:
            parts = urlsplit(self._url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.scheme != "https":
            return f"{URL}={printable(self._url)!r} is not an https address"
        path = f"{parts.path or '/'}?{parts.query}" if parts.query else parts.path or "/"
        try:
            headers = {"Authorization": f"Bearer {self._read_token()}", "Content-Type": "application/json"}
            context = ssl.create_default_context(cafile=self._ca or None)
            connection = http.client.HTTPSConnection(host, port, timeout=_TIMEOUT, context=context)
            try:
                connection.request("POST", path, json.dumps(status).encode(), headers)
                answer = connection.getresponse()
                text = answer.read(_MAX_ANSWER)
            finally:
                connection.close()
        except (OSError, ValueError, http.client.HTTPException) as error:
            return printable(f"{host}: {str(error) or type(error).__name__}")
        return "" if answer.status == 200 else printable(f"{host} answers {answer.status}: {_message(text)}")

    def _read_token(self) -> str:
        """Raises OSError or ValueError."""
        with open(self._token, encoding="ascii") as file:
            token = file.read(_MAX_TOKEN).strip()
        if not token or not token.isprintable():
            raise ValueError(f"the file that {TOKEN} names has no token")
        return token


def _message(text: bytes) -> str:
    """What a server says of a failure, in the form of Kubernetes or as it is."""
    import json

    try:
        content: object = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and isinstance(content.get("message"), str):
        return str(content["message"])
    return text[:200].decode(errors="replace").strip()
