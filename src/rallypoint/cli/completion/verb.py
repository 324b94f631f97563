"""`rallyctl completion`: prints a completion script."""

from __future__ import annotations

import argparse

from rallypoint.cli.parse import Verb, build_parser

_SHELLS = ("bash", "zsh", "fish")


def add_completion(verb: Verb, rallyctl: argparse.ArgumentParser) -> None:
    """Make `completion` a verb of `rallyctl`, whose parser is given."""

    def print_script(options: argparse.Namespace) -> None:
        from rallypoint.cli.completion.scripts import completion_script
        from rallypoint.cli.exit import print_answer

        print_answer(completion_script(options.shell, build_parser(), rallyctl).rstrip("\n"))

    page = verb(
        "completion",
        "print a script that completes both commands in a shell",
        "Print a script that completes rallyrun and rallyctl: flags, their values, verbs, hosts from host files, and "
        "scripts. To install it, bash: write it to a file that ~/.bashrc reads by 'source'; zsh: to DIR/_rallyrun, "
        "with a DIR of $fpath; fish: to rallyrun.fish and to rallyctl.fish in ~/.config/fish/completions. It is whole "
        "in itself: write it anew after an upgrade. Wheels have the scripts too, and shells find them where the "
        "package is installed below /usr or /usr/local (docs/how-to/completion.md).",
        "bash > ~/.rallypoint.bash && echo 'source ~/.rallypoint.bash' >> ~/.bashrc",
        print_script,
    )
    page.add_argument("shell", choices=_SHELLS, metavar="SHELL", help="bash, zsh or fish")
