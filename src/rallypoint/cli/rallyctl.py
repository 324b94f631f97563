"""The command `rallyctl`: everything that runs outside of a job.

rallyctl demo                           a job that loses a worker, then a node, and goes on
rallyctl launch --hosts a,b -- COMMAND  a job on several hosts, over ssh
rallyctl status ENDPOINT                status of a job; also restart, drain, resize, stop, stacks, bundle
rallyctl check                          whether this node can run a job
rallyctl report PATH...                 how a job spent its time, from the events of its agents
rallyctl serve --endpoint HOST:PORT     a control plane outside the training nodes, for many jobs
rallyctl secret                         a new secret, which the nodes of a job share
rallyctl token --job ID                 the token of one job, derived from the secret
rallyctl completion SHELL               completion of both commands for bash, zsh, fish or tcsh
rallyctl etcd                           a temporary etcd on this machine, for trials and tests
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from rallypoint.base.errors import UsageError
from rallypoint.cli.bundle import add_bundle
from rallypoint.cli.check import add_check
from rallypoint.cli.completion import add_completion
from rallypoint.cli.demo import add_demo
from rallypoint.cli.etcd import add_etcd
from rallypoint.cli.launching import add_launch
from rallypoint.cli.parse import HelpFormatter, Parser, ShowVersion, Verb
from rallypoint.cli.report import add_report
from rallypoint.cli.serve import add_serve
from rallypoint.cli.watching import add_watching


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
    options = build_parser().parse_args(argv)
    work: Callable[[argparse.Namespace], int | None] = options.work
    from rallypoint.cli.exit import exit_code_of

    answer: int | None = 0

    def answered() -> None:
        nonlocal answer
        answer = work(options)

    return exit_code_of(answered, "rallyctl") or answer or 0


def build_parser() -> argparse.ArgumentParser:
    """The parser of `rallyctl` with all its verbs."""
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

    add_demo(verb)
    add_launch(verb)
    add_watching(verb)
    add_check(verb)
    add_report(verb)
    add_bundle(verb)
    add_serve(verb)
    _add_secrets(verb)
    add_etcd(verb)
    add_completion(verb, parser)
    return parser


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
