"""The command `rallyctl`: what runs beside a job and not in it.

rallyctl serve --endpoint HOST:PORT     a control plane outside the training nodes, for any number of jobs
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

from rallypoint.base.errors import RallypointError, UserError

DEFAULT_PORT = 29400


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rallyctl`.

    Args:
        argv: the arguments after the program's name; None takes those of this process.

    Returns:
        The exit code: 0 after SIGTERM or ^C, 1 when something failed.

    Raises:
        SystemExit: 2 after a usage error, 0 after help.
    """
    options = _parser().parse_args(argv)
    work: Callable[[argparse.Namespace], None] = options.work
    from rallypoint.cli.outcome import exit_code_of

    return exit_code_of(partial(work, options), "rallyctl")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("rallyctl", description="What runs beside rallyrun's jobs.")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    serve = verbs.add_parser(
        "serve",
        help="run a control plane outside the training nodes",
        description="Run a control plane outside the training nodes, for any number of jobs with --rdzv-backend=c10d. "
        "Their nodes give its address as --rdzv-endpoint. If it is lost, running workers run on; started again at the "
        "same endpoint, it is filled by what the nodes hold. RALLYPOINT_SECRET must be as for the jobs.",
    )
    serve.add_argument(
        "--endpoint",
        default="",
        metavar="HOST:PORT",
        help=f"where to listen; an empty host is all interfaces, port 0 a free one (default: all, port {DEFAULT_PORT})",
    )
    serve.set_defaults(work=_serve)
    return parser


def _serve(options: argparse.Namespace) -> None:
    """Serve until a signal asks to end."""
    from rallypoint.base.endpoint import Endpoint, listening_socket, parse_endpoint
    from rallypoint.base.log import configure
    from rallypoint.rendezvous.backends.options import secret
    from rallypoint.rendezvous.jobs import ManyJobs
    from rallypoint.rendezvous.server import ControlServer

    configure()
    text: str = options.endpoint
    try:
        everywhere = not text or text.startswith(":")
        place = parse_endpoint(f"localhost{text}" if everywhere else text, DEFAULT_PORT)
    except UserError as error:
        raise UserError(f"--endpoint: {error}") from None
    host = "" if everywhere else place.host
    # Blocked before any thread is made, so that `sigwait` alone gets them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        listener = listening_socket(host, place.port)
    except OSError as error:
        raise RallypointError(
            f"the control plane cannot listen at {text or place}: {error.strerror}; "
            "give --endpoint another port, or an address of this machine"
        ) from None
    server = ControlServer(ManyJobs(), listener, secret=secret())
    print(f"rallyctl: control plane listens at {Endpoint(host or '*', server.port)}", file=sys.stderr, flush=True)
    number = signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.close(linger=0.0)
    print(f"rallyctl: ended by {signal.Signals(number).name}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
