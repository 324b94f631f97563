"""The pages that an agent serves in addition to its health: the job's page, the stream, metrics (`observe.site`).

Laws:

1. The agent's loop only counts and passes on events. Everything else happens on the server's or separate threads, and
   is imported on the first request.
2. The pages show workers as the loop last saw them (`WorkerController.seen`), and never ask a worker.
3. The state of the whole job comes from its coordinator, through a session that belongs to no node.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Mapping, Sequence

from rallypoint.agent.workers import WorkerController
from rallypoint.base.endpoint import host_name
from rallypoint.base.http import Access, Answer, Client, Handler
from rallypoint.base.light_typing import TYPE_CHECKING, Any
from rallypoint.base.secrets import http_token
from rallypoint.observe.metrics import AgentAccount, AgentReading

if TYPE_CHECKING:
    from rallypoint.control.client.dialing import DialTarget
    from rallypoint.observe.metrics import Family, NodeReading
    from rallypoint.observe.site import RemoteJob, Site
    from rallypoint.observe.telemetry.agent_events import AgentEvent

TOKEN_FILE = "RALLYPOINT_HTTP_TOKEN_FILE"


def begin_pages(workers: WorkerController, options: Mapping[str, Any]) -> tuple[Handler, Access]:
    """Set up the pages of an agent. Returns the handler and the access. Raises like `AgentPages.begin`."""
    return AgentPages(workers, options).begin()


class AgentPages:
    """The pages of one agent.

    Args:
        workers: the workers of its node.
        options: the rendezvous options with which to reach its coordinator.
    """

    def __init__(self, workers: WorkerController, options: Mapping[str, Any]) -> None:
        self._workers = workers
        self._options = options
        self._account = AgentAccount()
        self._lock = threading.Lock()
        """Protects the account: the agent's thread writes it, and others read it."""
        self._site: Site | None = None
        self._source: RemoteJob
        self.access = Access()
        """The clients that may see the pages; valid after `begin`."""

    def begin(self) -> tuple[Handler, Access]:
        """Start to count the agent's events. Returns the handler and the access.

        Raises:
            UsageError: the file with the token is unusable.
        """
        path = os.environ.get(TOKEN_FILE, "")
        self.access = Access(http_token(path, TOKEN_FILE) if path else "")
        self._workers.record_events().listen(self._take)
        self._workers.look()
        return self.answer, self.access

    async def answer(self, head: bytes, client: Client) -> Answer:
        """See `base.http.Handler`."""
        if self._site is None:
            self._site = await asyncio.to_thread(self._make)
        return await self._site.answer(head, client)

    def _make(self) -> Site:
        from rallypoint.observe.site import RemoteJob, Site

        job = self._workers.group.spec.rdzv_handler.get_run_id()
        self._source = RemoteJob(job, self._targets)
        return Site(self._source, self.access, self._metrics)

    def _targets(self) -> Sequence[DialTarget]:
        from rallypoint.observe.watching.client import UnreachableError
        from rallypoint.rendezvous.coordinators import coordinators
        from rallypoint.rendezvous.params import RendezvousParameters

        self._workers.rendezvous.serve_commands()
        job = self._workers.rendezvous.local_job()
        if job is None:
            raise UnreachableError("this job's coordinator is not known yet; try again")
        options = {name: value for name, value in self._options.items() if name not in {"rank", "local_addr"}}
        return coordinators(RendezvousParameters(job.backend, job.endpoint, job.job, 1, 1, **options))

    # Metrics

    def _take(self, event: AgentEvent) -> None:
        with self._lock:
            self._account.count(event)

    async def _metrics(self) -> Sequence[Family]:
        own = await asyncio.to_thread(self._own_metrics)
        return [*own, *await self._job_metrics()]

    def _own_metrics(self) -> Sequence[Family]:
        from rallypoint.observe.metrics import build_family, node_families

        with self._lock:
            elapsed = time.monotonic() - self._workers.began
            counted = self._account.read(elapsed)
        return [build_family(), *node_families(self._reading(elapsed, counted))]

    def _reading(self, elapsed: float, counted: AgentReading) -> NodeReading:
        from rallypoint.observe.metrics import NodeReading

        seen, now = self._workers.seen, time.time()
        assert seen is not None, "looked at where the agent begins"
        return NodeReading(
            job=seen.job,
            node=host_name(),
            role=seen.role,
            backend=self._workers.group.spec.rdzv_handler.get_backend(),
            uptime=elapsed,
            workers=len(seen.workers),
            running=len(seen.running),
            remaining=seen.remaining,
            last_output=[now - age if age >= 0 else 0.0 for age in seen.output_ages()],
            counted=counted,
        )

    async def _job_metrics(self) -> Sequence[Family]:
        """The metrics of the whole job. Only the agent with the coordinator serves them."""
        from rallypoint.base.errors import RallypointError
        from rallypoint.observe.metrics import job_families
        from rallypoint.observe.watching.messages import Snapshot

        if not self._workers.rendezvous.hosts_coordinator:
            return []
        try:
            seen = await self._source.snapshot("")
        except RallypointError:  # the coordinator has moved
            return []
        return job_families([seen]) if isinstance(seen, Snapshot) else []
