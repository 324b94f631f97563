"""The command `rallyctl`: what runs beside a job and not in it.

rallyctl serve --endpoint HOST:PORT     a control plane outside the training nodes, for many jobs
rallyctl secret                         a new secret, which the nodes of a job share
rallyctl token --job ID                 the token of one job, derived from the secret
rallyctl etcd                           a throw-away etcd on this machine, for trials and tests
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial

from rallypoint.base.errors import RallypointError, UsageError, UserError
from rallypoint.cli.etcd import add_verb as add_etcd_verb
from rallypoint.cli.flags import ShowVersion
from rallypoint.cli.parse import Parser
from rallypoint.cli.secrets import add_verbs as add_secret_verbs
from rallypoint.rendezvous.params import C10D_PORT


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rallyctl`.

    Args:
        argv: the arguments after the program's name; None takes those of this process.

    Returns:
        The exit code: 0 after SIGTERM or ^C, 1 when something failed, 2 after a value that cannot work.

    Raises:
        SystemExit: 2 after a usage error, 0 after help and `--version`.
    """
    if argv is None:
        from rallypoint.cli.process_setup import set_up_process

        set_up_process()
    options = _parser().parse_args(argv)
    work: Callable[[argparse.Namespace], None] = options.work
    from rallypoint.cli.exit import exit_code_of

    return exit_code_of(partial(work, options), "rallyctl")


_TLS_FILES = {
    "cert": ("FILE", "PEM file of the control plane's certificate; nodes give theirs as --rdzv-conf=tls_cert=..."),
    "key": ("FILE", "PEM file of its key"),
    "ca": ("FILE", "PEM file of the authorities that sign the nodes' certificates"),
    "peer": ("NAME", "the name that a node's certificate must have, such as spiffe://cluster/job (default: any)"),
}


def _parser() -> argparse.ArgumentParser:
    parser = Parser("rallyctl", description="What runs beside rallyrun's jobs.")
    parser.add_argument("--version", action=ShowVersion, command="rallyctl")
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    serve = verbs.add_parser(
        "serve",
        help="run a control plane outside the training nodes",
        description="Run a control plane outside the training nodes, for many jobs with --rdzv-backend=c10d. "
        "Their nodes give its address as --rdzv-endpoint. If it is lost, running workers run on; started again at the "
        "same endpoint, it is filled by what the nodes hold. RALLYPOINT_SECRET must be as for the jobs. Nodes on the "
        "machine of the control plane should be given --rdzv-conf=is_host=false: one that starts while the control "
        "plane is down would host its job there itself. When a job has ended and its nodes have gone, its id is free "
        "for a new one. A node that was out of reach then, and comes back within a day, is told how its job ended; "
        "that is forgotten when the control plane is started again.",
    )
    serve.add_argument(
        "--endpoint",
        default="",
        metavar="HOST:PORT",
        help="where to listen: all addresses that the host's name has; an empty host is all interfaces, port 0 a free "
        f"one (default: all, port {C10D_PORT})",
    )
    for name, what in _TLS_FILES.items():
        serve.add_argument(f"--tls-{name}", default="", metavar=what[0], help=what[1])
    serve.set_defaults(work=_serve)
    add_secret_verbs(verbs)
    add_etcd_verb(verbs)
    return parser


def _serve(options: argparse.Namespace) -> None:
    """Serve until a signal asks to end."""
    from rallypoint.base.descriptors import allow_descriptors
    from rallypoint.base.endpoint import Endpoint, listening_sockets, parse_endpoint, resolve
    from rallypoint.base.kernel import check_for_loop
    from rallypoint.base.log import configure
    from rallypoint.cli.exit import print_error
    from rallypoint.coordinator.jobs import ManyJobs
    from rallypoint.coordinator.server import ControlServer
    from rallypoint.rendezvous.backends.options import accepted_keys, control_tls

    configure()
    check_for_loop()
    text: str = options.endpoint
    try:
        everywhere = not text or text.startswith(":")
        place = parse_endpoint(f"localhost{text}" if everywhere else text, C10D_PORT)
    except UserError as error:
        raise UsageError(f"--endpoint: {error}") from None
    host = "" if everywhere else place.host
    # Blocked before any thread is made, so that `sigwait` alone gets them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        listeners = listening_sockets(resolve(host) if host else [], place.port)
    except OSError as error:
        raise RallypointError(
            f"the control plane cannot listen at {text or place}: {error.strerror}; "
            "give --endpoint another port, or an address of this machine"
        ) from None
    allow_descriptors()
    server = ControlServer(ManyJobs(), listeners, keys=accepted_keys(), tls=control_tls(vars(options)))
    print_error(f"rallyctl: control plane listens at {Endpoint(host or '*', server.port)}")
    number = signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.close(linger=0.0, why=f"{signal.Signals(number).name} has ended it")
    print_error(f"rallyctl: ended by {signal.Signals(number).name}")


if __name__ == "__main__":
    sys.exit(main())
