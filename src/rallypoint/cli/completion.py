"""Completion of both commands in a shell: `rallyctl completion SHELL`, `rallyrun --print-completion SHELL`.

shtab creates the scripts from the parsers.

Laws:

1. Pressing TAB never starts Python: a script contains everything that it completes, and the shell reads file names.
2. A wheel contains the scripts from its build. A checkout creates them if shtab is installed.
3. Only dashed spellings are completed, although the commands also accept torchrun's underscores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

from rallypoint.base.errors import UserError

SHELLS = {
    "bash": ("share/bash-completion/completions/rallyrun", "share/bash-completion/completions/rallyctl"),
    "zsh": ("share/zsh/site-functions/_rallyrun",),
    "fish": ("share/fish/vendor_completions.d/rallyrun.fish", "share/fish/vendor_completions.d/rallyctl.fish"),
    "tcsh": (),
}
"""Where each shell looks for completion scripts, below a prefix; tcsh has no such place."""

PACKAGED = Path(__file__).with_name("completions")
"""The folder in a wheel that contains each shell's script, named after the shell."""

_FILES = ("FILE", "PATH", "training_script", "training_script_args", "paths")
_FOLDERS = ("DIR",)
_ENDS_OF_ZSH = "\nif [[ $zsh_eval_context[-1] == eval ]]"


def printed_script(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """The script for commands, by name, in one of `SHELLS`. The installed script covers both of ours.

    Raises:
        UserError: the script is not installed, and shtab cannot create it.
    """
    packaged = PACKAGED / shell
    try:
        if "rallyrun" in parsers and packaged.exists():
            return packaged.read_text("utf-8").rstrip("\n")
        return completion_script(shell, parsers).rstrip("\n")
    except ImportError:
        raise UserError(
            "this installation contains no completion scripts; run 'pip install shtab' and try again"
        ) from None


def completion_script(shell: str, parsers: Mapping[str, argparse.ArgumentParser]) -> str:
    """Create the script.

    Raises:
        ImportError: shtab is not installed.
    """
    import shtab

    scripts = []
    for name, parser in parsers.items():
        parser.prog = name
        for action in _arguments(parser):
            _say_what_completes(action)
        scripts.append(shtab.complete(parser, shell))
    return _one_of_zsh(scripts, list(parsers)) if shell == "zsh" else "\n\n".join(scripts) + "\n"


def _arguments(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        yield action
        if isinstance(action, argparse._SubParsersAction):
            for verb in action.choices.values():
                yield from _arguments(verb)


def _say_what_completes(action: argparse.Action) -> None:
    """Tell shtab the words for a value, or that it is a file; keep only one spelling per flag."""
    import shtab

    action.option_strings = [flag for flag in action.option_strings if "_" not in flag]
    names = {*action.option_strings, str(action.metavar or action.dest)}
    if action.choices is None:
        # The parser converts values first, so it cannot enforce these words. It serves completion only.
        action.choices = getattr(action.type, "words", None) or next(
            (words for name, words in _words().items() if name in names), None
        )
    if names & {*_FILES}:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    elif names & {*_FOLDERS}:
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]


def _words() -> dict[str, tuple[str, ...]]:
    """Words for values, by flag name: from the flags' rows, and for verbs."""
    from rallypoint.cli.flags import FLAGS
    from rallypoint.clusters.preflight.run import NAMES

    rows = ((flag.name, flag.complete() if callable(flag.complete) else flag.complete) for flag in FLAGS)
    return {"--require": tuple(NAMES), **{name: words for name, words in rows if words}}


def _one_of_zsh(scripts: list[str], names: list[str]) -> str:
    """One autoloaded file for all commands: zsh calls it with the command's name in `$service`."""
    bodies = [script.partition("\n")[2].partition(_ENDS_OF_ZSH)[0] for script in scripts]
    sourced = "\n".join(f"  compdef _shtab_{name} -N {name}" for name in names)
    end = f"""
if [[ $zsh_eval_context[-1] == eval ]]; then
{sourced}
else
  _shtab_$service "$@"
fi
"""
    return "".join([f"#compdef {' '.join(names)}\n", *bodies, end])
