"""`rallyctl etcd`: a temporary etcd for trials and tests, which runs as long as the command."""

from __future__ import annotations

import argparse
import signal

_ENDINGS = {signal.SIGTERM, signal.SIGINT}


def run_etcd(options: argparse.Namespace) -> None:
    """Run etcd until a signal asks to end; raises RallypointError if it cannot start, or ends by itself."""
    from rallypoint.base.errors import RallypointError, UsageError, UserError
    from rallypoint.base.kernel import check_kernel
    from rallypoint.cli.exit import print_answer, print_error
    from rallypoint.etcd.local import LocalEtcd

    if not options.timeout > 0:
        raise UsageError(f"--timeout={options.timeout:g} is too short; give more than 0 seconds")
    if options.num_retries < 0:
        raise UsageError(f"--num-retries={options.num_retries} is negative; give 0 or more")
    check_kernel()
    # Blocked, so that `sigwait` alone gets them; it gets the end of a child too.
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
