"""Reports a job's progress to Kubeflow Trainer, which shows it in the status of the TrainJob.

If Trainer's feature gate `TrainJobStatus` is on, it sets these variables in every pod of a TrainJob (v2.2 or newer):

    KUBEFLOW_TRAINER_SERVER_URL        where to POST the status
    KUBEFLOW_TRAINER_SERVER_CA_CERT    path of the CA certificates for checking the server
    KUBEFLOW_TRAINER_SERVER_TOKEN      path of the token that identifies this pod; the token is renewed

    https://github.com/kubeflow/trainer/tree/master/docs/proposals/2779-trainjob-progress

The percentage and the remaining time are computed from the steps that workers report (`notices.progress`) and the total
number of steps (`rallypoint.metrics`). The metrics are those of `rallypoint.metrics`, and the step.

Laws:

1. Send nothing before a worker reports a step: do not interfere with a program that uses Trainer's own library.
2. Only the agent of group rank 0 reports.
3. Send at most one request per `_EVERY` seconds, and fewer after a failure. A separate thread reads all files and sends
   all requests, with a time limit. When the job ends, wait at most `_LAST` seconds.
4. Send the token only over https, to a server with a valid certificate. Do not follow redirections.
5. Nothing here can fail, delay or end the job. A failure is reported once, and again if a different one follows.
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
"""Names of variables; the last two contain paths."""

_EVERY = 10.0
_LONGEST_PAUSE = 300.0
"""Seconds between requests: normally, and at most after failures."""
_TIMEOUT = 5.0
"""Maximum seconds to connect, and then for each part of an answer."""
_LAST = 2.0
_MAX_ANSWER, _MAX_TOKEN = 64 * 1024, 64 * 1024
_MAX_SECONDS = 2**31 - 1
"""The maximum value of the field for the remaining seconds."""


class Position(NamedTuple):
    """A round's progress: the last step and when it was reached, and the first step, on the monotonic clock."""

    step: int
    at: float
    first: int
    first_at: float


def status_of(position: Position, metrics: Metrics, now: str, *, done: bool = False) -> dict[str, object]:
    """The status to send. Pure.

    Args:
        position: the current round's.
        metrics: its workers' metrics.
        now: the time of day, as in RFC 3339.
        done: whether the job has succeeded.
    """
    status: dict[str, object] = {"lastUpdatedTime": now}
    if done:
        status |= {"progressPercentage": 100, "estimatedRemainingSeconds": 0}
    elif metrics.total:
        # 100 is reserved for a job that has succeeded.
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
    """Seconds that the remaining steps will take at this round's pace; None if unknown."""
    steps, seconds = position.step - position.first, position.at - position.first_at
    if position.first < 0 or steps <= 0 or seconds <= 0:
        return None
    return min(_MAX_SECONDS, math.ceil(max(0, total - position.step) * seconds / steps))


class TrainJobStatus(Feature):
    """Reports for one node."""

    def __init__(self, agent: Agent) -> None:
        super().__init__(agent)
        self.reporter = Reporter(self._position, self._leads, self._read, os.environ, agent.clock)

    def watchers(self) -> Iterable[Source]:
        return (self.reporter,)

    def finish(self, error: BaseException | None) -> None:
        self.reporter.finish(succeeded=error is None)

    def close(self) -> None:
        if not self.workers.is_launched:  # otherwise `finish` follows
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
    """Where the workers are, and where the first worker to report began."""
    if began is None:
        return Position(latest.step, latest.at, -1, 0.0)
    return Position(latest.step, latest.at, began.first, began.first_at)


class Reporter(Source):
    """Sends the status at intervals. Only `finish` waits, and only briefly.

    Args:
        position: returns the job's position; None if unknown.
        leads: whether this node reports.
        reads: returns the function that reads the metrics on the thread.
        environ: contains the variables.
        clock: the clock for `wake_at`.
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
        # Only the thread writes these, except at the end.
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
        """Send the last status when the run is over, and wait for it briefly. Idempotent."""
        if self._thread.closed:
            return
        self._looked_at = math.inf
        last = self._position() or self._reported
        if succeeded and last is not None and self._leads():
            self._thread.post("the last report to the TrainJob", lambda: self._report(last, None))
        self._thread.close(_LAST)

    # On the thread

    def _report(self, position: Position, read: Callable[[], Metrics] | None) -> None:
        """Send a status. `read` is None for the last one: the workers' folder is then gone."""
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
                log.warning("this job's progress cannot be shown in the TrainJob: %s; the job continues", failure)
            else:
                log.info("this job's progress is shown in the TrainJob")

    def _failed(self, what: str) -> None:
        log.exception("%s failed; the job continues without it. This is a bug in Rallypoint (please report it)", what)


class Server:
    """Trainer's server, as the variables describe it. Reads the files for each request, since they are renewed.

    Args:
        environ: contains the variables.
    """

    def __init__(self, environ: Mapping[str, str]) -> None:
        self._url, self._ca, self._token = (environ.get(name, "") for name in (URL, CA_CERT, TOKEN))

    def send(self, status: Mapping[str, object]) -> str:
        """Send a status. Returns why that failed, in words; empty on success."""
        # Imported only for jobs of Trainer, on this thread.
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
        """Read the token. Raises OSError or ValueError."""
        with open(self._token, encoding="ascii") as file:
            token = file.read(_MAX_TOKEN).strip()
        if not token or not token.isprintable():
            raise ValueError(f"the file named by {TOKEN} contains no token")
        return token


def _message(text: bytes) -> str:
    """A server's error message, in the form of Kubernetes or unchanged."""
    import json

    try:
        content: object = json.loads(text)
    except (ValueError, RecursionError):
        content = None
    if isinstance(content, dict) and isinstance(content.get("message"), str):
        return str(content["message"])
    return text[:200].decode(errors="replace").strip()
