"""Parses arguments and environment into `Options` (contract sections 1.2 and 1.3).

Laws:

1. The command line takes precedence over `PET_<NAME>`, which takes precedence over the default.
2. Up to the script, argparse handles prefixes, `--` and usage errors, as in torchrun with the same Python. No prefix
   means `--version`. A prefix that could be one of torchrun's flags never means another flag.
3. Words after the script are not parsed, except for a `--` right after it. (With argparse they are: torchrun refuses
   `train.py --log x`, since `--log` matches two of its own flags.)
4. Text from the environment is converted by the flag's type, but not checked against its choices.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from rallypoint.agent.options import Features
from rallypoint.base.errors import UserError, user_error
from rallypoint.base.flags import Flag
from rallypoint.base.light_typing import Any, NoReturn
from rallypoint.cli.flags import (
    BEYOND_TORCHRUN,
    FLAGS,
    GROUPS,
    LogOptions,
    RendezvousOptions,
    RestartOptions,
    StaticRankOptions,
    WorkerOptions,
)

_DESCRIPTION = """\
Start a distributed Python job, keep it running, and report why it failed. Drop-in replacement for torchrun: the same
flags, worker environment and logs."""

_EPILOG = """\
Each flag can also be set in the environment, as PET_<NAME>: PET_NNODES=2, PET_STANDALONE=1. Flags can be written with
underscores instead of dashes. LOGLEVEL=INFO logs each step."""


class Options(RendezvousOptions, WorkerOptions, RestartOptions, LogOptions, StaticRankOptions):
    """The user's options: torchrun's by name, and `features` for the others.

    `sources` holds the origin of each value that is not a default: `--nnodes`, `PET_NNODES`, or the file of
    `--config`. That file may also set `environment`, variables for workers.
    """

    training_script: str
    training_script_args: tuple[str, ...]
    features: Features
    sources: Mapping[str, str]
    environment: Mapping[str, str]

    def __init__(
        self,
        *,
        training_script: str,
        training_script_args: tuple[str, ...],
        features: Features,
        sources: Mapping[str, str],
        environment: Mapping[str, str] = {},
        **values: Any,
    ) -> None:
        super().__init__(**values)
        vars(self).update(
            training_script=training_script,
            training_script_args=training_script_args,
            features=features,
            sources=sources,
            environment=environment,
        )

    @classmethod
    def from_values(
        cls, values: dict[str, Any], sources: Mapping[str, str], environment: Mapping[str, str] = {}
    ) -> Options:
        """Create options from the script, its arguments, and values other than defaults, by flag name. Raises TypeError
        if a name is unknown.
        """
        own = {dest: values.pop(dest) for dest in values.keys() & BEYOND_TORCHRUN}
        return cls(**values, features=Features.of(**own), sources=sources, environment=environment)

    def flat(self) -> dict[str, Any]:
        """All values by flag name."""
        values = vars(self) | self.features.flat()
        del values["sources"], values["features"], values["environment"]
        return values

    def source(self, dest: str) -> str:
        """The origin of the value of `dest`, for messages; the flag's name for a default."""
        return self.sources.get(dest, f"--{dest.replace('_', '-')}")


def parse(arguments: Sequence[str], environ: Mapping[str, str]) -> Options:
    """Parse the arguments after the program's name, and the `PET_*` variables of `environ`.

    Raises:
        SystemExit: code 2 after a usage error, code 0 after help; the text is already printed.
        UserError: the `PET_*` variable of a flag without a value is not a whole number.
    """
    return parse_with(build_parser(), arguments, environ)[0]


def parse_with(
    parser: Parser, arguments: Sequence[str], environ: Mapping[str, str]
) -> tuple[Options, Mapping[str, Any]]:
    """Like `parse`, with a parser from `build_parser` and other optional flags; also returns their values."""
    switches = {flag.dest: _read_switch(flag, environ[flag.variable]) for flag in FLAGS if _is_set(flag, environ, True)}
    values = _up_to_the_script(parser, arguments)
    known = {flag.dest for flag in FLAGS} | {"training_script", "training_script_args"}
    more = {dest: values.pop(dest) for dest in values.keys() - known}
    sources = {flag.dest: flag.name for flag in FLAGS if flag.dest in values}
    texts, environment = dict[str, str](), dict[str, str]()
    path = values.get("config") or environ.get("PET_CONFIG", "")
    if path:
        from rallypoint.cli.config import read_config

        texts, environment = read_config(path)
    for flag in FLAGS:
        if flag.dest in values:
            continue
        if flag.dest in switches:
            values[flag.dest], source = switches[flag.dest], flag.variable
        elif _is_set(flag, environ, False):
            values[flag.dest], source = _read_text(flag, environ[flag.variable], parser), flag.variable
        elif flag.dest in texts:
            text, source = texts[flag.dest], path
            values[flag.dest] = bool(int(text)) if flag.read is None else _read_text(flag, text, parser, path)
        else:
            continue
        sources[flag.dest] = source
    return Options.from_values(values, sources, environment), more


class ShowVersion(argparse.Action):
    """The flag `--version`: prints the command's name and the version to stdout and exits with code 0."""

    def __init__(self, option_strings: list[str], dest: str, command: str, default: str = argparse.SUPPRESS) -> None:
        super().__init__(option_strings, argparse.SUPPRESS, nargs=0, default=default, help="Show the version and exit")
        self._command = command

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        from rallypoint.base.version import __version__  # imported here to save a module at every start

        print(self._command, __version__)
        parser.exit()


class PrintCompletion(argparse.Action):
    """The flag `--print-completion SHELL`: prints a completion script for the command to stdout and exits.

    The command is `rallyrun`, or `torchrun` if called by that name. Exit code 1 if no script is available.
    """

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        from rallypoint.cli.completion import printed_script
        from rallypoint.cli.exit import print_answer

        try:
            print_answer(printed_script(values, {"torchrun" if parser.prog == "torchrun" else "rallyrun": parser}))
        except UserError as error:
            parser.exit(1, f"{parser.prog}: {option}={values}: {error}\n")
        parser.exit()


def parse_nnodes(text: str, source: str = "--nnodes") -> tuple[int, int]:
    """Parse `N` or `MIN:MAX` into the minimum and maximum number of nodes; `source` is the origin, for messages.
    Raises UserError: the text is invalid, or no job can have these sizes.
    """
    try:
        numbers = [int(part) for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) not in (1, 2):
        raise user_error(f"{source}={text!r} is not a number or range of nodes; use one such as 2 or 1:4", RuntimeError)
    low, high = numbers[0], numbers[-1]
    if not 0 < low <= high:
        bounds = (
            f"{source}={text!r} requests {low} to {high} nodes; the minimum must be 1 or more, and not above the "
            "maximum"
        )
        raise user_error(bounds, AssertionError)
    return low, high


class _NotACommandLine(Exception):
    pass


class HelpFormatter(argparse.HelpFormatter):
    """Shows each flag in its dashed spelling only, with its value once."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=36, width=_columns() - 2)

    def _format_action_invocation(self, action: argparse.Action) -> str:
        if not action.option_strings:
            return super()._format_action_invocation(action)
        spellings = ", ".join(spelling for spelling in action.option_strings if "_" not in spelling)
        return spellings if action.nargs == 0 else f"{spellings} {action.metavar}"

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = [text] if text.startswith("example: ") else self._split_lines(text, width - len(indent))
        return "\n".join(indent + line for line in lines)

    def _split_lines(self, text: str, width: int) -> list[str]:
        """Like argparse, but does not break flag names."""
        lines = [""]
        for word in text.split():
            if lines[-1] and len(lines[-1]) + len(word) >= width:
                lines.append("")
            lines[-1] += f" {word}" if lines[-1] else word
        return lines


def _columns() -> int:
    """The terminal's width, as from `shutil.get_terminal_size`, whose module imports the compression modules."""
    try:
        columns = int(os.environ.get("COLUMNS", ""))
    except ValueError:
        columns = 0
    if columns > 0:
        return columns
    try:
        return os.get_terminal_size().columns or 80
    except OSError:  # standard output is not a terminal
        return 80


class Parser(argparse.ArgumentParser):
    """argparse's parser, which can also try a command line without ending the process on an error."""

    _trying = False

    def try_parse(self, words: Sequence[str]) -> dict[str, Any] | None:
        """The values, or None if `words` are not a valid command line."""
        self._trying = True
        try:
            return vars(self.parse_args(words))
        except _NotACommandLine:
            return None
        finally:
            self._trying = False

    def _get_option_tuples(self, option_string: str) -> list[Any]:
        """argparse's candidates for a prefix; torchrun's only, if there are any: `--te` must mean the same as there."""
        candidates = [
            candidate
            for candidate in super()._get_option_tuples(option_string)
            if not isinstance(candidate[0], ShowVersion)
        ]
        return [candidate for candidate in candidates if candidate[0].dest not in BEYOND_TORCHRUN] or candidates

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        """Like argparse, but keeps the value in `--flag=--`, which argparse loses before Python 3.12.5."""
        nothing = action.option_strings and arg_strings == ["--"]
        values = super()._get_values(action, arg_strings)
        if nothing and values == []:
            raise argparse.ArgumentError(action, "'--' is not a value; use another one")
        return values

    def _get_value(self, action: argparse.Action, arg_string: str) -> Any:
        """Like argparse, but shows the reader's own message if it refuses a value."""
        try:
            return super()._get_value(action, arg_string)
        except argparse.ArgumentError as error:
            if isinstance(error.__context__, UserError):
                raise argparse.ArgumentError(action, str(error.__context__)) from None
            raise

    def _print_message(self, message: str, file: Any = None) -> None:
        # Like argparse from Python 3.11.4 on: a closed output does not change the exit code.
        try:  # noqa: SIM105 - in the bytecode of each start
            super()._print_message(message, file)
        except OSError:
            pass

    def error(self, message: str) -> NoReturn:
        """Exit with a usage error and code 2, except in `try_parse`."""
        if self._trying:
            raise _NotACommandLine
        if message.startswith("unrecognized arguments: -"):
            from rallypoint.cli.similar_names import unknown_flag

            message = unknown_flag(message.split()[2], self._option_string_actions, self.prog)
        about, needless, value = message.partition("ignored explicit argument ")
        super().error(f"{about}it takes no value; remove {value}" if needless else message)


def build_parser() -> Parser:
    """Create the parser. Its results contain only values from the command line."""
    parser = Parser(
        _program(),
        usage="%(prog)s [OPTION ...] training_script ...",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        argument_default=argparse.SUPPRESS,
        formatter_class=HelpFormatter,
        add_help=False,
    )
    parser.add_argument("-h", "--help", action="help", help="Show this help and exit")
    parser.add_argument("training_script", help="Script, module or program for each worker to run")
    parser.add_argument("training_script_args", nargs=argparse.REMAINDER, help="Arguments for the script")
    for group in GROUPS:
        section = parser.add_argument_group(group.title, f"example: %(prog)s {group.example}")
        for flag in group.flags:
            if flag.read is None:
                section.add_argument(*flag.spellings, dest=flag.dest, action="store_true", help=flag.help)
            else:
                section.add_argument(
                    *flag.spellings,
                    dest=flag.dest,
                    type=flag.read,
                    choices=flag.choices,
                    metavar=flag.metavar,
                    help=_help(flag),
                )
    section.add_argument("--version", action=ShowVersion, command="rallyrun")
    section.add_argument(
        "--print-completion",
        "--print_completion",
        action=PrintCompletion,
        choices=("bash", "fish", "tcsh", "zsh"),
        metavar="SHELL",
        help="Print a completion script for bash, fish, tcsh or zsh and exit",
    )
    return parser


def _help(flag: Flag[Any]) -> str:
    """The flag's help, with its default in plain form: 300, not 300.0."""
    if flag.default in (None, "", ()):
        return flag.help
    shown = f"{flag.default:g}" if isinstance(flag.default, float) else flag.default
    return f"{flag.help} (default: {shown})"


def _program() -> str | None:
    """The name in the usage. None lets argparse find it, which fails if an embedding program sets no name."""
    named = sys.argv and isinstance(sys.argv[0], (str, os.PathLike))
    return None if named else "rallyrun"


def _up_to_the_script(parser: Parser, arguments: Sequence[str]) -> dict[str, Any]:
    """Parse up to the script, the last word of the shortest prefix that argparse accepts."""
    for end in range(1, len(arguments) + 1):
        head, rest = arguments[:end], arguments[end:]
        values = parser.try_parse(head)
        if values is None:
            if not any(word.startswith("-") for word in head[-2:]):
                break  # one of two words that are not flags is the script: the mistake precedes it
            continue
        if rest[:1] == ["--"] and "--" not in head:
            rest = rest[1:]
        return values | {"training_script_args": tuple(rest)}
    return vars(parser.parse_args(arguments))


def _is_set(flag: Flag[Any], environ: Mapping[str, str], switch: bool) -> bool:
    return flag.from_environment and (flag.read is None) is switch and flag.variable in environ


def _read_switch(flag: Flag[Any], text: str) -> bool:
    try:
        return bool(int(text))
    except ValueError:
        raise UserError(f"{flag.variable}={text!r} is not a whole number; set it to 1 (on) or 0 (off)") from None


def _read_text(flag: Flag[Any], text: str, parser: argparse.ArgumentParser, source: str = "") -> object:
    assert flag.read is not None
    try:
        return flag.read(text)
    except UserError as error:
        parser.error(f"argument {'/'.join(flag.spellings)}: {source or flag.variable}: {error}")
