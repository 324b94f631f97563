"""`rallyctl serve`: a control plane outside the training nodes.

If requested (`Type=notify` and `WatchdogSec=` of systemd, by sd_notify(3)), it notifies the service manager when it
serves, that its loop is not stuck, and when it begins to end.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
from typing import TYPE_CHECKING

from rallypoint.base.errors import RallypointError, UsageError, UserError
from rallypoint.rendezvous.params import C10D_PORT

if TYPE_CHECKING:
    from rallypoint.cli.serve_http import PageServer
    from rallypoint.control.coordinator.jobs import ManyJobs


_ENDING = {signal.SIGTERM, signal.SIGINT}
_MANAGER_TIMEOUT = 1.0
"""Seconds within which the service manager must accept a message."""


def serve(options: argparse.Namespace) -> None:
    from rallypoint.base.descriptors import allow_descriptors
    from rallypoint.base.endpoint import Endpoint, listening_sockets, parse_endpoint, resolve
    from rallypoint.base.kernel import check_for_loop
    from rallypoint.base.log import configure
    from rallypoint.cli.exit import print_error
    from rallypoint.control.coordinator.jobs import ManyJobs
    from rallypoint.control.coordinator.server import ControlServer
    from rallypoint.rendezvous.backends.options import accepted_keys, control_tls

    configure()
    check_for_loop()
    text: str = options.endpoint
    try:
        everywhere = not text or text.startswith(":")
        endpoint = parse_endpoint(f"localhost{text}" if everywhere else text, C10D_PORT)
    except UserError as error:
        raise UsageError(f"--endpoint: {error}") from None
    host = "" if everywhere else endpoint.host
    # Blocked before any thread is made, so that only `sigwait` gets them.
    signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
    try:
        listeners = listening_sockets(resolve(host) if host else [], endpoint.port)
    except OSError as error:
        raise RallypointError(
            f"the control plane cannot listen at {text or endpoint}: {error.strerror}; "
            "give --endpoint another port, or an address of this machine"
        ) from None
    allow_descriptors()
    jobs = ManyJobs()
    jobs.remote_control = options.remote_control
    pages = _pages(jobs, options)
    server = ControlServer(jobs, listeners, keys=accepted_keys(), tls=control_tls(vars(options)))
    where = f"control plane listens at {Endpoint(host or '*', server.port)}"
    print_error(f"rallyctl: {where}")
    number = _serve_until_signal(f"READY=1\nSTATUS={where}")
    _tell_manager("STOPPING=1")
    if pages is not None:
        pages.close()
    server.close(linger=0.0, why=f"{number.name} has ended it")
    print_error(f"rallyctl: ended by {number.name}")


def _serve_until_signal(ready: str) -> signal.Signals:
    """Wait for a signal that ends this, and notify the service manager that the loop runs: at first with `ready`."""
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
    """Seconds within which the service manager expects the next message; 0 if it expects none."""
    asked, of = os.environ.get("WATCHDOG_USEC", ""), os.environ.get("WATCHDOG_PID", "")
    return int(asked) / 1e6 if asked.isdecimal() and of in ("", str(os.getpid())) else 0.0


def _loop_answers(timeout: float) -> bool:
    """Whether the serving loop responds within this time; 0 for any time."""
    from rallypoint.base.loop import shared_loop

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
        from rallypoint.base.log import get_logger

        get_logger(__name__).warning(
            "the service manager at NOTIFY_SOCKET=%s cannot be told %r: %s; unset it, or check that socket",
            *(path, state, error.strerror or error),
        )


def _pages(jobs: ManyJobs, options: argparse.Namespace) -> PageServer | None:
    from rallypoint.cli.exit import print_error

    if not options.http:
        if options.http_token_file:
            raise UsageError("--http-token-file has an effect only with --http; give that, or leave it out")
        return None
    from rallypoint.cli.serve_http import PageServer

    pages = PageServer(jobs, options.http, options.http_token_file)
    print_error(f"rallyctl: the page of all jobs is at http://{pages.endpoint}/")
    return pages
