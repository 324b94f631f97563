"""The command `rallyctl`: everything that runs outside a job. Its verbs are the rows of `cli/verbs.py`. A verb's
function is imported when the verb runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from rallypoint.cli.parse import HelpFormatter, Parser, ShowVersion
from rallypoint.cli.verbs import GROUPS, VERBS, Verb

_ABOUT = "Start, watch and control rallyrun jobs, and run services for them."


def main(argv: Sequence[str] | None = None) -> int:
    """Run `rallyctl` with the arguments `argv` after the program's name; None for this process's own.

    Returns:
        The exit code: 0 after SIGTERM or ^C, 1 after a failure, 2 after a value that cannot work.

    Raises:
        SystemExit: 2 after a usage error, 0 after help and `--version`.
    """
    if argv is None:
        from rallypoint.cli.process_setup import set_up_process

        set_up_process()
    words = sys.argv[1:] if argv is None else argv
    options = _parsed(words)
    if options.verb is None:
        build_parser().print_help(sys.stderr)
        return 2
    from rallypoint.cli.exit import exit_code_of

    answer: int | None = 0

    def answered() -> None:
        nonlocal answer
        if options.slurm:
            from rallypoint.cli.slurm_step import run_on_first_node

            run_on_first_node(options.slurm, words)
        answer = load(options.work)(options)

    return exit_code_of(answered, "rallyctl") or answer or 0


class _VerbParser(Parser):
    listed: Sequence[argparse.Action] = ()
    """Options to show before the list of verbs, in the parser for verbs."""

    def format_help(self) -> str:
        """Like argparse, but shows the verbs in groups, which argparse cannot do."""
        if not self.listed:
            return super().format_help()
        page = self.formatter_class(prog=self.prog)
        page.add_usage(self.usage, (), ())
        page.add_text(self.description)
        page.start_section("options")
        page.add_arguments(self.listed)
        page.end_section()
        page.add_text(_verb_list())
        return page.format_help()

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Check as argparse does, but suggest the most similar verb for an unknown one."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            from rallypoint.cli.similar_names import closest_match

            similar = closest_match(value, action.choices)
            hint = f"did you mean {similar}? " if similar else ""
            self.error(f"unknown verb {value!r}; {hint}'rallyctl --help' lists all")
        super()._check_value(action, value)


def _parsed(words: Sequence[str]) -> argparse.Namespace:
    """Parse the arguments, including operands after later flags, which argparse would not accept."""
    parser = build_parser()
    options, late = parser.parse_known_args(words)
    for word in late:
        values = vars(options)
        if not word.startswith("-") and "operands" in values:
            options.operands.append(word)
        elif not word.startswith("-") and values.get("endpoint") == "":
            options.endpoint = word
        else:
            parser.error(_unknown(word, options.verb))
    return options


def _unknown(word: str, verb: str | None) -> str:
    """The error for a word that no argument accepts."""
    if not word.startswith("-"):
        return f"unexpected argument {word!r}; see 'rallyctl {verb} --help'"
    from rallypoint.cli.similar_names import unknown_flag

    arguments = [argument for row in VERBS if row.name == verb for argument in row.arguments]
    flags = [name for argument in arguments if not isinstance(argument, str) for name in argument.names]
    return unknown_flag(word, flags, f"rallyctl {verb}" if verb else "rallyctl")


def load(work: str) -> Callable[[argparse.Namespace], int | None]:
    module, _, name = work.partition(":")
    function: Callable[[argparse.Namespace], int | None] = getattr(import_module(f"rallypoint.cli.{module}"), name)
    return function


class _PageFormatter(HelpFormatter):
    """Preserves paragraphs, and leaves lines that start with two spaces unchanged."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines: list[str] = []
        for line in text.split("\n"):
            lines += [line] if line.startswith("  ") else self._split_lines(line, width - len(indent))
        return "\n".join(indent + line if line else "" for line in lines)


def build_parser() -> argparse.ArgumentParser:
    parser = _VerbParser(
        "rallyctl",
        usage="%(prog)s [OPTION ...] VERB ...",
        description=_ABOUT,
        formatter_class=_PageFormatter,
        add_help=False,
    )
    parser.listed = (
        _add_help(parser),
        parser.add_argument("--version", action=ShowVersion, command="rallyctl"),
        parser.add_argument(
            "--slurm",
            metavar="JOBID",
            default="",
            help="Run the verb on the first node of this Slurm job, through srun",
        ),
    )
    verbs = parser.add_subparsers(metavar="VERB", prog="rallyctl", dest="verb")
    for verb in VERBS:
        page = verbs.add_parser(
            verb.name,
            help=verb.summary,
            description=verb.text,
            epilog=_epilog(verb),
            formatter_class=_PageFormatter,
            add_help=False,
        )
        page.set_defaults(work=verb.work, found=None)
        section: argparse._ActionsContainer = page
        for argument in verb.arguments:
            if isinstance(argument, str):
                section = page.add_argument_group(argument)
            else:
                section.add_argument(*argument.names, **argument.more)
        _add_help(page)
    return parser


def _add_help(parser: argparse.ArgumentParser) -> argparse.Action:
    return parser.add_argument("-h", "--help", action="help", help="Show this help and exit")


def _verb_list() -> str:
    """All verbs, by group."""
    width = max(len(verb.name) for verb in VERBS)
    lines: list[str] = []
    for group in GROUPS:
        lines += ["", f"{group}:"]
        lines += [f"  {verb.name:<{width}}  {verb.summary}" for verb in VERBS if verb.group == group]
    return "\n".join([*lines[1:], "", "Run 'rallyctl VERB --help' for a verb's arguments and examples."])


def _epilog(verb: Verb) -> str:
    lines = ["examples:"]
    for comment, words in verb.examples:
        lines += [f"  # {comment}", f"  rallyctl {verb.name} {words}".rstrip()]
    if verb.exit_codes:
        lines += ["", "exit codes:", *(f"  {code:<3}  {meaning}" for code, meaning in verb.exit_codes)]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
