"""The command `rallyctl`: what runs beside jobs and not in one.

rallyctl status ENDPOINT                how a job stands; also restart, drain, resize, stop, stacks, bundle
rallyctl check                          whether this node can run a job
rallyctl report PATH...                 what became of a job's time, from the events of its agents
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
from typing import TYPE_CHECKING

from rallypoint.base.errors import RallypointError, UsageError, UserError
from rallypoint.cli.bundle import add_bundle
from rallypoint.cli.check import add_check
from rallypoint.cli.etcd import add_etcd
from rallypoint.cli.flag_types import ShowVersion
from rallypoint.cli.parse import HelpFormatter, Parser, Verb
from rallypoint.cli.report import add_report
from rallypoint.cli.watching import add_watching
from rallypoint.rendezvous.params import C10D_PORT

if TYPE_CHECKING:
    from rallypoint.cli.pages import PageServer
    from rallypoint.coordinator.jobs import ManyJobs


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
    work: Callable[[argparse.Namespace], int | None] = options.work
    from rallypoint.cli.exit import exit_code_of

    codes: list[int | None] = []
    return exit_code_of(lambda: codes.append(work(options)), "rallyctl") or codes[0] or 0


def _parser() -> argparse.ArgumentParser:
    about = "Run services for rallyrun's jobs, outside of them."
    parser = Parser("rallyctl", description=about, formatter_class=HelpFormatter)
    parser.add_argument("--version", action=ShowVersion, command="rallyctl")
    verbs = parser.add_subparsers(title="verbs", required=True, metavar="VERB")

    def verb(
        name: str, summary: str, text: str, example: str, work: Callable[[argparse.Namespace], int | None]
    ) -> argparse.ArgumentParser:
        epilog = f"example: rallyctl {name} {example}"
        page = verbs.add_parser(name, help=summary, description=text, epilog=epilog, formatter_class=HelpFormatter)
        page.set_defaults(work=work)
        return page

    add_watching(verb)
    add_check(verb)
    add_report(verb)
    add_bundle(verb)
    _add_serve(verb)
    _add_secrets(verb)
    add_etcd(verb)
    return parser


def _add_serve(verb: Verb) -> None:
    page = verb(
        "serve",
        "run a control plane outside the training nodes",
        "Run a control plane outside the training nodes, for many jobs with --rdzv-backend=c10d, whose nodes give its "
        "address as --rdzv-endpoint. If it is lost, workers go on; started again at the same endpoint, it gets its "
        "state from the nodes. Give it the jobs' RALLYPOINT_SECRET. Nodes on its own machine need "
        "--rdzv-conf=is_host=false: one that starts while the control plane is down would host its job itself. When a "
        "job has ended and its nodes have disconnected, its id can be used again; a node that reconnects within a day "
        "learns how the job ended, unless the control plane was started again.",
        "--endpoint=:29400",
        _serve,
    )
    endpoint = f"all addresses of HOST, or of this machine without HOST; port 0 is a free one (default: :{C10D_PORT})"
    listening = page.add_argument_group("listening")
    listening.add_argument("--endpoint", default="", metavar="HOST:PORT", help=endpoint)
    remote = "take commands (rallyctl restart, stop, ...) from other machines where there is no secret"
    listening.add_argument("--remote-control", action="store_true", help=remote)
    pages = page.add_argument_group("page and metrics")
    http = (
        "serve a page, /status.json, /events and /metrics there; on this machine alone without HOST (default: nowhere)"
    )
    pages.add_argument("--http", default="", metavar="[HOST:]PORT", help=http)
    pages.add_argument("--http-token-file", default="", metavar="FILE", help="file with the token to be given there")
    tls = page.add_argument_group("TLS")
    for name, metavar, text in (
        ("cert", "FILE", "PEM certificate; nodes give theirs as --rdzv-conf=tls_cert=..."),
        ("key", "FILE", "PEM file of its key"),
        ("ca", "FILE", "PEM file of the authorities that sign the nodes' certificates"),
        ("peer", "NAME", "name in nodes' certificates: spiffe://cluster/job (default: any)"),
    ):
        tls.add_argument(f"--tls-{name}", default="", metavar=metavar, help=text)


def _add_secrets(verb: Verb) -> None:
    verb(
        "secret",
        "print a new secret for RALLYPOINT_SECRET",
        "Print a new secret: 32 random bytes as text. Give it to all nodes of a job, and to 'rallyctl serve', as "
        "RALLYPOINT_SECRET or in a file that RALLYPOINT_SECRET_FILE names and nobody else may read.",
        "> job.secret",
        _secret,
    )
    page = verb(
        "token",
        "print the token of one job, derived from the secret",
        "Print the token of one job, derived from the secret in RALLYPOINT_SECRET or RALLYPOINT_SECRET_FILE. Nodes "
        "that have the token instead of the secret can join that job and no other job of the control plane.",
        "--job=job1",
        _token,
    )
    page.add_argument_group("job").add_argument("--job", required=True, metavar="ID", help="the job's --rdzv-id")


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
    jobs = ManyJobs()
    jobs.remote_control = options.remote_control
    pages = _pages(jobs, options)
    server = ControlServer(jobs, listeners, keys=accepted_keys(), tls=control_tls(vars(options)))
    print_error(f"rallyctl: control plane listens at {Endpoint(host or '*', server.port)}")
    number = signal.sigwait({signal.SIGTERM, signal.SIGINT})
    if pages is not None:
        pages.close()
    server.close(linger=0.0, why=f"{signal.Signals(number).name} has ended it")
    print_error(f"rallyctl: ended by {signal.Signals(number).name}")


def _pages(jobs: ManyJobs, options: argparse.Namespace) -> PageServer | None:
    from rallypoint.cli.exit import print_error

    if not options.http:
        if options.http_token_file:
            raise UsageError("--http-token-file is of use with --http only; give that, or leave it out")
        return None
    from rallypoint.cli.pages import PageServer

    pages = PageServer(jobs, options.http, options.http_token_file)
    print_error(f"rallyctl: the page of all jobs is at http://{pages.endpoint}/")
    return pages


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


if __name__ == "__main__":
    sys.exit(main())
