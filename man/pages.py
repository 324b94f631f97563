"""What is on the manual pages.

Flags, verbs and examples come from the parsers; what else is said of them, variables, files and exit codes from the
tables of the documents: `docs/generate/*.toml`, `docs/reference/*.md`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

from man.roff import code, entry, example, inline, paragraph, section, sentence, subsection, variable, wrapped
from rallypoint.cli.command_table import Command, Operand, Option, read_command, read_verbs
from rallypoint.cli.flag_types import SWITCH
from rallypoint.cli.flags import BEYOND_TORCHRUN, FLAGS
from rallypoint.cli.parse import build_parser
from rallypoint.cli.rallyctl import build_parser as build_rallyctl

DOCS = Path(__file__).resolve().parents[1] / "docs"

_DEFAULT = re.compile(r" \(default: ([^()]*(?:\([^()]*\)[^()]*)*)\)$")
_COMMON = ("RALLYPOINT_SECRET", "RALLYPOINT_SECRET_FILE", "RALLYPOINT_ETCD_PASSWORD", "RALLYPOINT_ETCD_PASSWORD_FILE")
_RALLYCTL = (*_COMMON, "LOGLEVEL", "NO_COLOR", "COLUMNS", "TORCHELASTIC_ETCD_BINARY_PATH")
"""Variables of `rallyctl` whose text does not name it."""


def rallyrun(date: str, version: str) -> str:
    """The page of `rallyrun`.

    Args:
        date: when it was made, as YYYY-MM-DD.
        version: of the package.
    """
    command = read_command(build_parser(), "rallyrun")
    examples = [(group.title, group.example) for group in command.groups if group.example]
    operands = section(
        "SYNOPSIS", f"{code('rallyrun')} [{variable('FLAG')} ...] {variable('SCRIPT')} [{variable('ARGUMENT')} ...]\n"
    )
    return "".join(
        (
            _head("rallyrun", "start distributed Python jobs and keep them alive", date, version),
            operands,
            section("DESCRIPTION", *map(paragraph, (command.description, *_RALLYRUN))),
            section("OPTIONS", *_flags(command)),
            section("KEYS OF --RDZV-CONF", *_keys()),
            section("ENVIRONMENT", *_variables(_read("generate/environment.toml"))),
            section("FILES", *_files()),
            section("EXIT STATUS", *_exit_codes()),
            section("EXAMPLES", *(part for title, line in examples for part in _example(title, line))),
            _see_also("rallyctl"),
        )
    )


def rallyctl(date: str, version: str) -> str:
    """The page of `rallyctl`; for the arguments see `rallyrun`."""
    verbs = read_verbs(build_rallyctl(), "rallyctl")
    synopsis = ".br\n".join(wrapped(_synopsis(each)) for each in verbs)
    description = (
        paragraph(build_rallyctl().description or ""),
        *(entry(code(_verb(each)), sentence(each.summary)) for each in verbs),
        *map(paragraph, _RALLYCTL_TEXTS),
    )
    return "".join(
        (
            _head("rallyctl", "run services for rallyrun's jobs, watch them and steer them", date, version),
            section("SYNOPSIS", synopsis),
            section("DESCRIPTION", *description),
            section("OPTIONS", *_common_options(), *(_verb_page(each) for each in verbs)),
            section("ENVIRONMENT", *_variables(_of_rallyctl(_read("generate/environment.toml")))),
            section("FILES", *(entry(tag, text) for tag, text in _RALLYCTL_FILES)),
            section("EXIT STATUS", *(entry(code(number), text) for number, text in _RALLYCTL_CODES)),
            section("EXAMPLES", *(part for each in verbs for part in _example(each.summary, each.example))),
            _see_also("rallyrun"),
        )
    )


_RALLYRUN = (
    "On each node `rallyrun` starts the workers of the job, which run *SCRIPT*. When a worker fails, all nodes stop "
    "their workers at once, regroup and start them again, up to `--max-restarts` times; then one report shows the "
    "first cause. When a node is lost, the others continue without it, if `--nnodes` permits that.",
    "Everything after *SCRIPT* is passed to the script. Each flag can be written with dashes or underscores, and its "
    "value after `=` or a space. A variable sets the value of a flag unless the command line does; for a flag without "
    "a value, 1 switches it on and 0 off.",
)
_RALLYCTL_TEXTS = (
    "Verbs that inspect or control a job connect to its control plane, on every backend, and never count as a node. "
    "With a secret (`RALLYPOINT_SECRET`), anyone who has it may give commands; without one, commands are accepted "
    "only from the control plane's own machine.",
)
_RALLYCTL_FILES = (
    (
        f"{variable('FILE')} of {code('--hostfile')}",
        "One host per line: `node1 slots=8`.",
    ),
    (
        f"{code('@rallypoint/agent/')}{variable('PID')}",
        "Abstract sockets of the agents on this machine, through which jobs are found without an endpoint.",
    ),
)
_RALLYCTL_CODES = (
    (
        "0",
        "Done. After `status`, the job is running; after `check`, all checks have passed; a service was ended by "
        "SIGTERM or ^C.",
    ),
    ("1", "Something failed, or the job cannot be reached. After `check`, a WARN."),
    ("2", "The command line is wrong, or a value in it cannot work. After `check`, a FAIL."),
    ("3", "After `status`, the job waits for nodes or forms a round."),
    ("4", "After `status`, the job has failed or was stopped."),
    ("5", "After `status`, the job has succeeded."),
    ("130", "^C."),
)


def _head(name: str, summary: str, date: str, version: str) -> str:
    title = f'.TH {name.upper()} 1 {date} "Rallypoint {version}" "Rallypoint"'
    return f".\\\" Made by 'make man'; changes here are lost.\n{title}\n.SH NAME\n{name} \\- {summary}\n"


def _see_also(other: str) -> str:
    more = "The documents, on the site that `make docs` builds from `docs/`: tutorials, how-to guides, reference."
    return section("SEE ALSO", f".BR {other} (1)\n", paragraph(more))


def _read(name: str) -> dict[str, dict[str, dict[str, str]]]:
    return tomllib.loads((DOCS / name).read_text("utf-8"))


def _flags(command: Command) -> Iterator[str]:
    """The flags of `rallyrun`, group by group, with default and variable."""
    known = {flag.name: flag for flag in FLAGS}
    details: dict[str, str] = tomllib.loads((DOCS / "generate/flags.toml").read_text("utf-8"))
    for group in command.groups:
        if group.title:
            yield f".SS {inline(group.title[:1].upper() + group.title[1:])}\n"
        for option in group.options:
            flag = known.get(option.name)
            if flag is None:
                yield _option(option)
                continue
            facts = [
                f"Default: {_default(option, 'off' if flag.read is SWITCH else 'none')}",
                f"variable: `{flag.variable}`" if flag.from_environment else "no variable",
                *(["not in torchrun"] if flag.dest in BEYOND_TORCHRUN else []),
            ]
            text = f"{sentence(_DEFAULT.sub('', option.help))} {details.get(option.name, '')}"
            yield entry(_tag(option), text, sentence("; ".join(facts)))


def _default(option: Option, otherwise: str) -> str:
    found = _DEFAULT.search(option.help)
    return found[1] if found else otherwise


def _option(option: Option) -> str:
    return entry(_tag(option), sentence(option.help))


def _tag(option: Option) -> str:
    spellings = [code(each) for each in (option.short, option.name) if each]
    return ", ".join(spellings) + (f"={variable(option.metavar)}" if option.metavar else "")


def _keys() -> Iterator[str]:
    """The keys of `--rdzv-conf`."""
    from rallypoint.rendezvous.backends.option_table import OPTIONS

    for each in OPTIONS:
        facts = [f"Default: {each.default}", f"backends: {', '.join(each.backends)}"]
        facts += ["not in torchrun"] if each.beyond_torchrun else []
        yield entry(code(each.name), each.meaning, sentence("; ".join(facts)))


def _variables(table: dict[str, dict[str, dict[str, str]]]) -> Iterator[str]:
    for kind, title in (("read", ""), ("set", " (set)")):
        for group, variables in table.get(kind, {}).items():
            yield subsection(
                inline(group) + title, *(entry(code(name), sentence(text)) for name, text in variables.items())
            )


def _of_rallyctl(table: dict[str, dict[str, dict[str, str]]]) -> dict[str, dict[str, dict[str, str]]]:
    """The variables that `rallyctl` reads."""
    groups = {
        title: {name: text for name, text in group.items() if name in _RALLYCTL or "`rallyctl" in text}
        for title, group in table["read"].items()
    }
    return {"read": {title: group for title, group in groups.items() if group}}


def _files() -> Iterator[str]:
    page, title = "reference/files-and-ports.md", "## Files for you"
    yield paragraph((DOCS / page).read_text("utf-8").partition(title)[0].partition("\n")[2])
    for what, where, flag, time in _rows(page, title):
        yield entry(inline(what), sentence(where), f"By {flag}. How long: {sentence(time)}")


def _exit_codes() -> Iterator[str]:
    yield paragraph(
        "0 if all workers succeeded, 1 for any failure, 2 for a wrong command line. With "
        "`--exit-codes=classified` the code tells a scheduler what to do, and is the same on all nodes:"
    )
    for number, ending, what, again in _rows("reference/exit-codes.md", "| code |"):
        texts = [sentence(what), f"Try again? {sentence(again)}" if again else ""]
        yield entry(code(number) + (f" ({inline(ending)})" if ending else ""), *texts)


def _rows(page: str, start: str) -> Iterator[list[str]]:
    """The rows of the first table behind a text of a page."""
    text = (DOCS / page).read_text("utf-8")
    lines = text[text.index(start) :].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("|---"))
    for line in lines[first + 1 :]:
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]


def _verb(command: Command) -> str:
    return command.name.partition(" ")[2]


def _synopsis(command: Command) -> str:
    words = [code(command.name), f"[{variable('FLAG')} ...]" if len([*command.options]) > 1 else ""]
    return " ".join(filter(None, [*words, *map(_operand, command.operands)]))


def _operand(operand: Operand) -> str:
    name = variable(operand.metavar) + (" ..." if operand.repeats or operand.rest else "")
    return name if operand.required or operand.rest else f"[{name}]"


def _common_options() -> Iterable[str]:
    return (
        entry(f"{code('-h')}, {code('--help')}", "Show the help page, also of each verb, and exit."),
        entry(code("--version"), "Show the version and exit."),
    )


def _verb_page(command: Command) -> str:
    operands = (entry(variable(each.metavar), sentence(each.help)) for each in command.operands)
    options = (_option(each) for each in command.options if each.name != "--help")
    head = f".PP\n{wrapped(_synopsis(command))}"
    return subsection(_verb(command), head, paragraph(command.description), *operands, *options)


def _example(title: str, command: str) -> Iterator[str]:
    if command:
        yield paragraph(f"{title[:1].upper()}{title[1:]}:")
        yield example(command)
