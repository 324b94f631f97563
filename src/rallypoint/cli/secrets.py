"""`rallyctl secret` and `rallyctl token`: what the nodes of a job prove to hold."""

from __future__ import annotations

import argparse
from typing import Any

from rallypoint.base.errors import UsageError
from rallypoint.base.secrets import SECRET, job_secret, new_secret, token
from rallypoint.cli.exit import print_answer


def add_verbs(verbs: Any) -> None:
    """Make `secret` and `token` verbs of `rallyctl`; `verbs` is what argparse's `add_subparsers` returns."""
    secret: argparse.ArgumentParser = verbs.add_parser(
        "secret",
        help="print a new secret for RALLYPOINT_SECRET",
        description="Print a new secret: 32 random bytes as text. Give it to all nodes of a job, and to 'rallyctl "
        "serve', as RALLYPOINT_SECRET or in a file that RALLYPOINT_SECRET_FILE names and nobody else may read.",
    )
    secret.set_defaults(work=lambda _options: print_answer(new_secret()))
    one: argparse.ArgumentParser = verbs.add_parser(
        "token",
        help="print the token of one job, derived from the secret",
        description="Print the token of one job, derived from the secret in RALLYPOINT_SECRET or "
        "RALLYPOINT_SECRET_FILE. Nodes that are given the token in the secret's place can take part in that job and "
        "in no other job of the same control plane.",
    )
    one.add_argument("--job", required=True, metavar="ID", help="the job's --rdzv-id")
    one.set_defaults(work=_token)


def _token(options: argparse.Namespace) -> None:
    secret = job_secret()
    if secret is None:
        raise UsageError(f"{SECRET} is not set; make a secret with 'rallyctl secret', and give it to this command too")
    print_answer(token(secret, options.job))
