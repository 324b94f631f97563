"""`rallyctl serve`: a control plane outside the training nodes.

If requested (`Type=notify` and `WatchdogSec=` in systemd, through sd_notify(3)), it tells the service manager when it
is serving, that its loop is not stuck, and when it starts to shut down. `--http` also serves the pages of all its jobs.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
from collections.abc import Sequence
from importlib import import_module

from rallypoint.base.descriptors import allow_descriptors
from rallypoint.base.endpoint import Endpoint, is_loopback, listening_sockets, parse_endpoint, resolve
from rallypoint.base.errors import RallypointError, UsageError, UserError
from rallypoint.base.http import Access
from rallypoint.base.kernel import check_for_loop
from rallypoint.base.log import configure, get_logger
from rallypoint.base.loop import shared_loop
from rallypoint.base.secrets import http_token, job_secret
from rallypoint.cli.exit import print_error
from rallypoint.control.coordinator.extensions import load
from rallypoint.control.coordinator.jobs import ManyJobs
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.features.coordinator_table import EXTENSIONS
from rallypoint.observe.health import Serving
from rallypoint.observe.metrics import Family, build_family, job_families, jobs_families
from rallypoint.observe.site import InProcessJobs, Site
from rallypoint.observe.watching.session import copy_of_job, job_list
from rallypoint.rendezvous.backends.options import accepted_keys, control_tls
from rallypoint.rendezvous.params import C10D_PORT

log = get_logger(__name__)

_ENDING = {signal.SIGTERM, signal.SIGINT}
HTTP_PORT = 29480
_MANAGER_TIMEOUT = 1.0
"""Seconds in which the service manager must accept a message."""


def serve(options: argparse.Namespace) -> None:
    configure(program="rallyctl")
    check_for_loop()
    endpoint = _endpoint("--endpoint", options.endpoint or ":", C10D_PORT)
    # Blocked before any thread starts, so that only `sigwait` receives them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    listeners = _listeners("--endpoint", endpoint, "the control plane cannot listen")
    allow_descriptors()
    jobs = ManyJobs()
    jobs.remote_control = options.remote_control
    pages = _pages(jobs, options)
    server = ControlServer(jobs, listeners, keys=accepted_keys(), tls=control_tls(vars(options)))
    import_ahead()
    where = f"control plane listens at {endpoint._replace(port=server.port)}"
    print_error(f"rallyctl: {where}")
    number = _serve_until_signal(f"READY=1\nSTATUS={where}")
    _tell_manager("STOPPING=1")
    if pages is not None:
        pages.close()
    server.close(linger=0.0, why=f"{number.name} stopped it")
    print_error(f"rallyctl: stopped by {number.name}")


_LATER = (
    "control.coordinator.connection",
    "control.coordinator.differences",
    "control.coordinator.shares",
    "control.coordinator.store_peers",
    "control.membership.endings",
    "control.membership.layers",
    "control.membership.many_gone",
    "control.membership.segments",
    "control.protocol.signing",
    "store.wire",
    "observe.watching.session",
)
"""Modules that a coordinator imports only on demand."""


def import_ahead() -> None:
    """Import all that a job might need: the server runs for months, and an in-place upgrade might replace its files."""
    for name in _LATER:
        import_module(f"rallypoint.{name}")
    for row in EXTENSIONS:
        load(row.place)


def _serve_until_signal(ready: str) -> signal.Signals:
    """Wait for a signal that ends the server. Tell the service manager that the loop is alive; `ready` is first."""
    timeout = _watchdog_timeout()
    answered = ready
    while True:
        if answered and _loop_answers(timeout):
            _tell_manager(answered)
            answered = "WATCHDOG=1" if timeout else ""
        if not timeout:
            return signal.Signals(signal.sigwait(_ENDING))
        if (received := signal.sigtimedwait(_ENDING, timeout / 2)) is not None:
            return signal.Signals(received.si_signo)


def _watchdog_timeout() -> float:
    """Seconds within which the service manager expects a message; 0 if it expects none."""
    microseconds, of = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    return int(microseconds) / 1e6 if microseconds.isdecimal() and of in ("", str(os.getpid())) else 0.0


def _loop_answers(timeout: float) -> bool:
    """Whether the server's loop responds within this time; 0 for no limit."""

    async def answer() -> bool:
        return True

    try:
        return shared_loop().submit(answer()).result(timeout or None)
    except TimeoutError:
        return False


def _tell_manager(state: str) -> None:
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path:
        return
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            sender.settimeout(_MANAGER_TIMEOUT)
            sender.sendto(state.encode(), f"\0{path[1:]}" if path.startswith("@") else path)
    except OSError as error:
        log.warning(
            "the service manager at NOTIFY_SOCKET=%s could not be sent %r: %s; check that socket, or unset the "
            "variable",
            *(path, state, error.strerror or error),
        )


def _pages(jobs: ManyJobs, options: argparse.Namespace) -> Serving | None:
    """Serve the pages of all jobs at `--http` from now on; without HOST, only for this machine."""
    where, token_file = options.http, options.http_token_file
    if not where:
        if token_file:
            raise UsageError("--http-token-file has no effect without --http; add --http, or remove --http-token-file")
        return None
    token = http_token(token_file, "--http-token-file") if token_file else ""
    endpoint = _endpoint("--http", f"localhost:{where}" if where.isdecimal() else where, HTTP_PORT)
    listeners = _listeners("--http", endpoint, "the pages cannot be served")
    here = all(is_loopback(listener.getsockname()[0]) for listener in listeners)
    if not here and not token and job_secret() is not None:
        raise UsageError(
            f"--http={where} would show jobs to anyone who can reach it, although this control plane has a secret; set "
            "--http-token-file, or listen on localhost"
        )
    if not here and not token:
        log.warning(
            "anyone who can reach %s can see all jobs of this control plane; set --http-token-file, or listen on "
            "localhost",
            endpoint,
        )

    async def metrics() -> Sequence[Family]:
        summaries, counts = job_list(jobs).jobs, jobs.ended_counts
        dispatchers = (jobs.find(summary.job) for summary in summaries)
        copies = [copy_of_job(dispatcher) for dispatcher in dispatchers if dispatcher is not None]
        snapshots = await asyncio.to_thread(lambda: [make_snapshot() for make_snapshot in copies])
        return [build_family(), *jobs_families(summaries, counts), *job_families(snapshots)]

    site = Site(InProcessJobs(jobs), Access(token, is_open=not here), metrics)
    pages = Serving(listeners, site.answer, shared_loop(), "the server of pages")
    print_error(f"rallyctl: the page of all jobs is at http://{Endpoint(endpoint.host, pages.port)}/")
    return pages


def _endpoint(flag: str, text: str, default_port: int) -> Endpoint:
    """Where to listen. The host `*` means all addresses of this machine, as in `:29400`."""
    everywhere = text.startswith((":", "*:"))
    port = text.partition(":")[2] or default_port
    try:
        endpoint = parse_endpoint(f"localhost:{port}" if everywhere else text, default_port)
    except UserError as error:
        raise UsageError(f"{flag}: {error}") from None
    return endpoint._replace(host="*") if everywhere else endpoint


def _listeners(flag: str, endpoint: Endpoint, failed: str) -> list[socket.socket]:
    try:
        return listening_sockets([] if endpoint.host == "*" else resolve(endpoint.host), endpoint.port)
    except OSError as error:
        raise RallypointError(
            f"{failed} at {endpoint}: {error.strerror}; set {flag} to another port, or to an address of this machine"
        ) from None
