"""The command `rallyrun`, from its arguments to its exit code (contract sections 1 and 7.6).

`--help` and usage errors import argparse and the table of flags, and nothing else of Rallypoint. The process is set up
before that (`process_setup`), so nothing is imported at the top of this file.
"""

from __future__ import annotations

import os
import sys

_SEVERAL_NODES = ("SLURM_STEP_NUM_NODES", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE", "JOB_COMPLETIONS")
"""Variables that show several nodes, if one is set."""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rallypoint.base.errors import UserError
    from rallypoint.cli.parse import Options


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rallyrun`.

    Args:
        argv: the arguments after the program's name; None takes those of this process, which is then the command's.

    Returns:
        The exit code: 0 when all workers succeeded; 1 when something failed, a value cannot work, or a signal that this
        agent handles ended it (^C among them); 2 for a value that torchrun would have accepted; 130 after a ^C that it
        does not handle, because it has not begun or was told not to. (The command's process ends by SIGINT then.)
        `--exit-codes=classified` has others (`exit_codes`).

    Raises:
        SystemExit: 2 after a usage error, 0 after help.
    """

    def read(arguments: Sequence[str], environ: Mapping[str, str]) -> Options:
        from rallypoint.cli.parse import parse

        return parse(arguments, environ)

    return run_command(argv, read)


def run_command(argv: Sequence[str] | None, read: Callable[[Sequence[str], Mapping[str, str]], Options]) -> int:
    """Run a command that differs from `rallyrun` only in `read`, which is called with arguments and environment.

    Arguments and results are those of `main`. `read` is called when the process is set up, and may raise UserError.
    """
    if argv is None:
        from rallypoint.cli.process_setup import set_up_process

        set_up_process()
        import gc

        gc.disable()  # a start makes no garbage, and the collector would look through all that it makes, many times
    from functools import partial

    from rallypoint.base.errors import UserError

    finish = None
    work: Callable[[], None]
    try:
        options = read(sys.argv[1:] if argv is None else argv, os.environ)
    except UserError as error:
        work = partial(_refuse, error)
    else:
        run = _Run(options, is_command=argv is None)
        work, finish = run.launch, run.finish
    from rallypoint.cli.exit import INTERRUPTED, exit_code_of

    code = exit_code_of(work, finish=finish)
    if code == INTERRUPTED and argv is None:
        from rallypoint.cli.process_setup import end_by_interrupt

        end_by_interrupt()
    return code


def _refuse(error: UserError) -> None:
    raise error


class _Run:
    """One run; its options are the user's, and from the start of `launch` on, the effective ones.

    `is_command`: this process is the command's, so that its collector is off during the start; otherwise that is the
    calling program's.
    """

    def __init__(self, options: Options, *, is_command: bool) -> None:
        self._options = options
        self._is_command = is_command

    def launch(self) -> None:
        """Launch the job; returns when all workers have succeeded."""
        from rallypoint.base.secrets import take_from_environment

        take_from_environment()  # before anything is started that would inherit it
        from rallypoint.base.log import configure
        from rallypoint.workers.reaper.prestart import prestart

        prestart()  # it starts up during the imports that follow
        from rallypoint.logs.prefix import host_label

        configure(host_label(self._options.host_prefix, os.environ))
        self._options = _by_cluster(self._options)
        from rallypoint.cli.convert import config_from_options, limit_threads

        config, program, arguments = config_from_options(self._options, os.environ)
        _warn_of_variables()
        limit_threads(config, os.environ)
        from rallypoint.cli.process_setup import end_keyboard_interrupt, restore_keyboard_interrupt
        from rallypoint.launch.api import elastic_launch

        # Only if the run does not handle it: in an import, a KeyboardInterrupt can leave a traceback.
        unhandled = "SIGINT" not in map(str.strip, config.signals_to_handle.split(","))
        restored = unhandled and restore_keyboard_interrupt()
        if self._is_command:
            import gc

            gc.freeze()  # what the start has made stays, and is not looked through again
            gc.enable()
        try:
            elastic_launch(config, program)(*arguments)
        finally:
            if restored:  # no worker is left; the rest only reports how it ended
                end_keyboard_interrupt()

    def finish(self, error: BaseException | None, code: int) -> int:
        """The final exit code; writes the verdict if that is requested. Most runs import nothing here."""
        wants = self._options.exit_codes == "classified"
        named = "RALLYPOINT_VERDICT_FILE" in os.environ
        shown = os.environ.get("RALLYPOINT_TERMINATION_LOG") or "/dev/termination-log"
        if not wants and not named and not (error is not None and os.path.exists(shown)):
            return code
        from rallypoint.cli.verdict import finish

        return finish(error, code, self._options.rdzv_id, wants, os.environ)


def _by_cluster(options: Options) -> Options:
    """The options with values of the cluster, if that was requested."""
    if options.cluster != "none":
        from rallypoint.cli.cluster_options import this_machine, with_cluster

        return with_cluster(options, os.environ, this_machine())
    if any(name in os.environ for name in _SEVERAL_NODES):
        from rallypoint.cli.cluster_options import warn_of_own_worlds

        warn_of_own_worlds(options, os.environ)
    return options


def _warn_of_variables() -> None:
    """Warn of misspelt variables. Most environments have none that could be ours; then nothing is imported."""
    if any(name.startswith(("PET_", "RALLYPOINT_")) for name in os.environ):
        from rallypoint.cli.unknown_names import warn_of_variables

        warn_of_variables(os.environ)
