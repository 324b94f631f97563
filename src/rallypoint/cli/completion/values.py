"""The completions of a flag's value, or of an operand: some words, and names that the shell finds."""

from __future__ import annotations

import signal
from enum import StrEnum
from functools import cache
from typing import NamedTuple

from rallypoint.cli.command_table import Operand, Option


class Names(StrEnum):
    """Kinds of names that are found when TAB is pressed; the values are their names in the shell code."""

    NONE = "none"
    FILE = "file"
    FOLDER = "folder"
    HOST = "host"
    PROGRAM = "program"
    VARIABLE = "variable"
    INTERFACE = "interface"
    SCRIPT = "script"
    """Programs for `rallyrun`: Python files and folders; modules after `-m`, programs after `--no-python`."""
    COMMAND = "command"
    """A command line of its own, which completes itself."""


class Values(NamedTuple):
    """Words and names; `separator` separates several of them, and is empty if there can be only one."""

    words: tuple[str, ...] = ()
    names: Names = Names.NONE
    separator: str = ""


ANYTHING = Values()
"""Numbers, ids and other texts that cannot be completed."""


@cache
def _by_flag() -> dict[str, Values]:
    """The values of flags with these names, and of operands."""
    from rallypoint.agent.features.worker_env import KINDS
    from rallypoint.base.plugins import entry_point_names
    from rallypoint.logs.specs import PLUGIN_GROUP
    from rallypoint.preflight.checks import NAMES
    from rallypoint.rendezvous.backends.option_table import OPTIONS
    from rallypoint.rendezvous.registry import rendezvous_handler_registry

    host, hosts = Values(names=Names.HOST), Values(names=Names.HOST, separator=",")
    some_hosts = Values(names=Names.HOST, separator="@")
    names = (each.name for each in signal.Signals if each not in (signal.SIGKILL, signal.SIGSTOP))
    signals = Values(tuple(names), separator=",")
    return {
        "--rdzv-backend": Values(rendezvous_handler_registry.names()),
        "--rdzv-conf": Values(tuple(sorted(f"{each.name}=" for each in OPTIONS)), separator=","),
        "--nproc-per-node": Values(("auto", "cpu", "gpu", "xpu")),
        "--redirects": Values(("0", "1", "2", "3")),
        "--tee": Values(("0", "1", "2", "3")),
        "--signals-to-handle": signals,
        "--preempt-signals": signals,
        "--event-log-handler": Values(("null", "console", "jsonl:")),
        "--logs-specs": Values(tuple(sorted({"default", *entry_point_names(PLUGIN_GROUP)}))),
        "--worker-env": Values(tuple(KINDS), separator=","),
        "--socket-ifname": Values(("auto",), Names.INTERFACE, ","),
        "--store-peers": Values(("members", "any"), separator=","),
        "--preload": Values(("auto",)),
        "--node-check": Values(names=Names.PROGRAM),
        "--require": Values(NAMES, separator=","),
        "--hosts": hosts,
        "--include": some_hosts,
        "--exclude": some_hosts,
        "--env": Values(names=Names.VARIABLE),
        "training_script": Values(names=Names.SCRIPT),
        "training_script_args": Values(names=Names.FILE),
        "command": Values(names=Names.COMMAND),
        "node": host,
        "--role": ANYTHING,
        "--tls-peer": ANYTHING,
    }


_BY_METAVAR = {
    **dict.fromkeys(("FILE", "PATH"), Values(names=Names.FILE)),
    **dict.fromkeys(("DIR",), Values(names=Names.FOLDER)),
    **dict.fromkeys(("ADDRESS", "ENDPOINT", "HOST:PORT", "[HOST:]PORT"), Values(names=Names.HOST)),
    **dict.fromkeys(("N", "S", "SECONDS", "PORT", "RANK", "RANKS", "ID", "TEXTS", "ARGS", "MIN:MAX"), ANYTHING),
}
"""The values of the others, by their metavar on the help page."""


def values_of(each: Option | Operand) -> Values:
    """The completions of a flag or an operand.

    Raises:
        LookupError: it is in none of the tables here.
    """
    name = each.name if isinstance(each, Option) else each.dest
    if each.words:
        return Values(each.words)
    found = _by_flag().get(name) or _BY_METAVAR.get(each.metavar)
    if found is None:
        raise LookupError(f"what completes {name} {each.metavar} is in no table of {__name__}")
    return found
