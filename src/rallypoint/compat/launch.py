"""Replaces `torch.distributed.launch`: the deprecated form of `rallypoint.compat.run`.

Without `--use-env`, each worker's first argument is `--local-rank=<local rank>`.
"""

from __future__ import annotations

import argparse
import warnings
from collections.abc import Sequence

from rallypoint.base.errors import UserError
from rallypoint.compat.run import get_args_parser, get_use_env, run

__all__ = ["launch", "main", "parse_args"]


def parse_args(args: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line with `--use-env`; None for this process's own. Raises SystemExit after a usage error."""
    parser = get_args_parser()
    parser.add_argument(
        "--use-env",
        "--use_env",
        default=False,
        action="store_true",
        help="Pass the local rank only in LOCAL_RANK, not as an argument",
    )
    return parser.parse_args(args)


def launch(args: argparse.Namespace) -> None:
    """Run this node's part of the job. Raises like `rallypoint.compat.run.run`."""
    if not get_use_env(args):
        if args.no_python:
            raise UserError("--no-python does not pass --local-rank to the program; add --use-env")
        script_args = ["--local-rank=${local_rank}", *args.training_script_args]
        args = argparse.Namespace(**{**vars(args), "training_script_args": script_args})
    run(args)


def main(args: Sequence[str] | None = None) -> None:
    """Parse a command line and run it; None for this process's own."""
    warnings.warn(
        "rallypoint.compat.launch is deprecated, like torch.distributed.launch; use rallyrun, and read LOCAL_RANK "
        "instead of the argument --local-rank",
        FutureWarning,
        stacklevel=2,
    )
    launch(parse_args(args))


if __name__ == "__main__":
    main()
