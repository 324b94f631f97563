"""`python -m rallypoint.launch`: the deprecated form of `rallyrun` (contract section 1.14).

It differs in one thing: without `--use-env`, each worker's first argument is `--local-rank=<local rank>`. As in
`rallyrun`, nothing is imported before the process is set up.
"""

from __future__ import annotations

from rallypoint.cli.rallyrun import run_command

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rallypoint.cli.parse import Options

_DEPRECATED = (
    "python -m rallypoint.launch is deprecated, as torch.distributed.launch is: use rallyrun, and LOCAL_RANK instead "
    "of the argument --local-rank"
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command. Arguments, results and exceptions are those of `rallyrun.main`."""
    return run_command(argv, read)


def read(arguments: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Read a command line that may have `--use-env`.

    Raises:
        SystemExit: code 2 after a usage error, code 0 after help.
        UserError: a program would be given the local rank as an argument, or a `PET_*` variable is bad.
    """
    from rallypoint.base.errors import UserError
    from rallypoint.cli.exit import print_error
    from rallypoint.cli.parse import build_parser, parse_with

    parser = build_parser()
    parser.add_argument(
        "--use-env",
        "--use_env",
        action="store_true",
        help="Pass the local rank in LOCAL_RANK only, and not as an argument too",
    )
    options, more = parse_with(parser, arguments, environ)
    print_error(f"FutureWarning: {_DEPRECATED}")
    if more.get("use_env", False):
        return options
    if options.no_python:
        raise UserError(
            f"{options.source('no_python')} runs a program, which takes no --local-rank; give --use-env too"
        )
    return options._replace(training_script_args=("--local-rank=${local_rank}", *options.training_script_args))
