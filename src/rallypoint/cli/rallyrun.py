"""The command `rallyrun`, from its arguments to its exit code (contract sections 1 and 7.6).

`--help` and usage errors import argparse and the table of flags, and nothing else from Rallypoint. The process is set
up before that (`process_setup`), so nothing is imported at the top of this file.
"""

from __future__ import annotations

import os
import sys

_SEVERAL_NODES = (
    "SLURM_STEP_NUM_NODES",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
    "MV2_COMM_WORLD_SIZE",
    "JSM_NAMESPACE_SIZE",
    "JOB_COMPLETIONS",
    "SKYPILOT_NUM_NODES",
    "DSTACK_NODES_NUM",
    "FLUX_JOB_NNODES",
)
"""Variables that indicate several nodes, if one is set."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rallypoint.base.errors import UserError
    from rallypoint.cli.parse import Options


def main(argv: Sequence[str] | None = None, in_place_of: str = "") -> int:
    """Run `rallyrun`.

    Args:
        argv: the arguments after the program's name. None for those of this process, which the command then owns.
        in_place_of: the command that the user started, if not `rallyrun`: `torchrun`, through `rallyctl shim`.

        Returns:
        The exit code: 0 if all workers succeeded. 1 if something failed, a value cannot work, or a signal that this
        agent handles ended it (including ^C). 2 for a value that torchrun would have accepted. 130 after a ^C that it
        does not handle, because it has not started or SIGINT is not among its signals. (The command's process then
        ends by SIGINT.) `--exit-codes=classified` uses other codes (`verdict`).

    Raises:
        SystemExit: 2 after a usage error, 0 after help.
    """
    return _run_command(argv, _read, in_place_of)


def _read(arguments: Sequence[str], environ: Mapping[str, str]) -> Options:
    from rallypoint.cli.parse import parse

    return parse(arguments, environ)


def _run_command(
    argv: Sequence[str] | None, read: Callable[[Sequence[str], Mapping[str, str]], Options], in_place_of: str
) -> int:
    """Run a command. `read` parses the arguments after the process is set up; it may raise UserError."""
    if argv is None:
        from rallypoint.cli.process_setup import set_up_process

        set_up_process()
        import gc

        gc.disable()  # a start creates no garbage, and the collector would scan all its objects many times
    from rallypoint.base.errors import UserError

    run = _Run(in_place_of, is_command=argv is None)
    try:
        run.options = read(sys.argv[1:] if argv is None else argv, os.environ)
    except UserError as error:
        run.refused = error
    from rallypoint.cli.exit import INTERRUPTED, exit_code_of

    code = exit_code_of(run.launch, finish=run.finish)
    if code == INTERRUPTED and argv is None:
        from rallypoint.cli.process_setup import end_by_interrupt

        end_by_interrupt()
    return code


class _Run:
    """One run. Its options are the user's, and after `launch` starts, the effective ones.

    `is_command`: the command owns this process, so the garbage collector is off during the start. Otherwise the
    calling program owns it.
    """

    options: Options
    refused: UserError | None = None
    """The error in the arguments; there are then no options."""

    def __init__(self, in_place_of: str, *, is_command: bool) -> None:
        self._in_place_of = in_place_of
        self._is_command = is_command

    def launch(self) -> None:
        if self.refused is not None:
            raise self.refused
        if self.options.features.command.dry_run:
            from rallypoint.cli.config import effective_lines
            from rallypoint.cli.exit import print_answer

            shown = by_cluster(self.options)
            print_answer("\n".join(effective_lines(shown.flat(), shown.sources, shown.environment)))
            return
        for name, value in self.options.environment.items():
            os.environ.setdefault(name, value)
        from rallypoint.base.secrets import take_from_environment

        take_from_environment()  # before starting anything that would inherit them
        from rallypoint.base.log import configure
        from rallypoint.workers.reaper.client import prestart

        prestart()  # it gets ready during the imports below
        from rallypoint.workers.logs.specs import host_label

        command = self.options.features.command
        configure(host_label(command.host_prefix, os.environ), "rallyrun", command.log_format)
        if self._in_place_of:
            from rallypoint.agent.launch import announce

            announce(self._in_place_of)  # before any other line
        self.options = by_cluster(self.options)
        from rallypoint.cli.convert import check_script, config_from_options, limit_threads

        config, program, arguments = config_from_options(self.options, os.environ)
        check_script(self.options, os.environ)
        _warn_of_variables()
        limit_threads(config, os.environ)
        from rallypoint.agent.launch import elastic_launch
        from rallypoint.cli.process_setup import end_keyboard_interrupt, restore_keyboard_interrupt

        # Only if the run does not handle SIGINT: during an import, KeyboardInterrupt can print a traceback.
        unhandled = "SIGINT" not in map(str.strip, config.signals_to_handle.split(","))
        restored = unhandled and restore_keyboard_interrupt()
        if self._is_command:
            import gc

            gc.freeze()  # objects of the start stay, so do not scan them again
            gc.enable()
        try:
            elastic_launch(config, program)(*arguments)
        finally:
            if restored:  # no worker is left; only the report remains
                end_keyboard_interrupt()

    def finish(self, error: BaseException | None, code: int) -> int:
        """The final exit code. Writes the verdict if requested. Most runs import nothing here."""
        if self.refused is not None:
            return code
        wants = self.options.features.command.exit_codes
        named = "RALLYPOINT_VERDICT_FILE" in os.environ
        shown = os.environ.get("RALLYPOINT_TERMINATION_LOG") or "/dev/termination-log"
        if wants == "torchrun" and not named and not (error is not None and os.path.exists(shown)):
            return code
        from rallypoint.cli.verdict import finish

        return finish(error, code, self.options.rdzv_id, wants, os.environ)


def by_cluster(options: Options) -> Options:
    """The options, completed with values from the cluster if requested."""
    if options.features.command.cluster != "none":
        from rallypoint.cli.cluster_options import this_machine, with_cluster

        return with_cluster(options, os.environ, this_machine(os.environ))
    if any(name in os.environ for name in _SEVERAL_NODES):
        from rallypoint.cli.cluster_options import warn_of_own_worlds

        warn_of_own_worlds(options, os.environ)
    return options


def _warn_of_variables() -> None:
    """Warn about misspelt variables. Most environments contain none that resemble ours; then nothing is imported."""
    if any(name.startswith(("PET_", "RALLYPOINT_")) for name in os.environ):
        from rallypoint.cli.convert import warn_of_variables

        warn_of_variables(os.environ)


# `python -m rallypoint.launch`: the deprecated form (contract section 1.14). It differs in one point: without
# `--use-env`, each worker's first argument is `--local-rank=<local rank>`.

_DEPRECATED = (
    "python -m rallypoint.launch is deprecated, like torch.distributed.launch; use rallyrun, and read LOCAL_RANK "
    "instead of the argument --local-rank"
)


def main_deprecated(argv: Sequence[str] | None = None, in_place_of: str = "") -> int:
    return _run_command(argv, read_deprecated, in_place_of)


def read_deprecated(arguments: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Parse a command line that may contain `--use-env`.

    Raises:
        SystemExit: code 2 after a usage error, code 0 after help.
        UserError: a program would receive the local rank as an argument, or a `PET_*` variable is invalid.
    """
    from rallypoint.base.errors import UserError
    from rallypoint.cli.exit import print_error
    from rallypoint.cli.parse import build_parser, parse_with

    parser = build_parser()
    parser.add_argument(
        "--use-env",
        "--use_env",
        action="store_true",
        help="Pass the local rank only in LOCAL_RANK, not as an argument",
    )
    options, more = parse_with(parser, arguments, environ)
    print_error(f"FutureWarning: {_DEPRECATED}")
    if more.get("use_env", False):
        return options
    if options.no_python:
        raise UserError(f"{options.source('no_python')} does not pass --local-rank to the program; add --use-env")
    return options.replace(training_script_args=("--local-rank=${local_rank}", *options.training_script_args))
