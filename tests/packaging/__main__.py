"""Inspects the results of `make dist`, installs them into each Python on this machine, and tries them there.

    make release-check

Prints a table, including what it could not try. Exits with 1 if anything is wrong or untried.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import NamedTuple

from tests.packaging import contents, interpreters
from tests.packaging.environments import InstallError, install
from tests.packaging.interpreters import ROOT
from tests.packaging.smoke import Installed, SmokeError, smoke

RUNNERS = {"uvx": ("uvx", "--from"), "pipx run": ("pipx", "run", "--spec")}
"""Programs that run a command of a wheel without installing it, and what comes before the wheel."""
_TIMEOUT = 180.0
"""Seconds for one of them, which fetches the dependencies."""


class Trial(NamedTuple):
    """One row of the table: `run` returns what was found, or raises."""

    where: str
    artefact: Path
    run: Callable[[], str]


def main() -> int:
    """Check all artefacts; 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artefacts", nargs="*", type=Path, help="files; all of dist/ where none is given")
    parser.add_argument("--python", action="append", help="a version, such as 3.12; all that are supported by default")
    parser.add_argument("--allow-untried", action="store_true", help="exit with 0 although something was not tried")
    given = parser.parse_args()
    artefacts = [each.resolve() for each in given.artefacts or sorted((ROOT / "dist").glob("rallypoint-*"))]
    if not artefacts:
        parser.error("there is nothing in dist/; run `make dist`")
    wanted = given.python or interpreters.supported()
    here = [each for each in artefacts if contents.is_for_this_machine(each)]
    wrong = [f"{each.name}: {fault}" for each in artefacts for fault in contents.faults(each, version(), tracked())]
    wrong += [f"{each.name}: it has no manual pages" for each in artefacts if not contents.has_manual(each)]
    print("| tried in | artefact | result | seconds |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="release-") as folder:
        for trial in (*_installed(here, wanted, Path(folder)), *_run_at_once(here, Path(folder))):
            wrong += _row(trial)
    untried = [*_not_tried(wanted)]
    print(*untried, sep="\n")
    print(*(f"not tried here: {each.name}; `make test-all` emulates aarch64" for each in artefacts if each not in here))
    if not any(line.startswith("Source") for line in contents.metadata(artefacts[0]).get_all("Project-URL") or []):
        print("before the first upload: pyproject.toml has no [project.urls] with Source; see docs/releasing.md")
    print(*(f"WRONG: {each}" for each in wrong), sep="\n")
    return 1 if wrong or (untried and not given.allow_untried) else 0


def version() -> str:
    """The version that the code has."""
    text = (ROOT / "src" / "rallypoint" / "base" / "version.py").read_text()
    return text.partition('__version__ = "')[2].partition('"')[0]


def tracked(*more: str) -> frozenset[str] | None:
    """The files of this commit, or with `more` words of `git ls-files`; None where this is no checkout."""
    try:
        listed = subprocess.run(["git", "ls-files", "-z", *more], cwd=ROOT, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return frozenset(filter(None, listed.stdout.split("\0")))


def _installed(artefacts: list[Path], wanted: list[str], folder: Path) -> Iterator[Trial]:
    found = interpreters.find()
    for minor in [each for each in wanted if each in found]:
        for number, artefact in enumerate(artefacts):
            try_it = partial(_install, artefact, found[minor], folder / f"{minor}-{number}")
            yield Trial(f"Python {found[minor].version}", artefact, try_it)


def _install(artefact: Path, python: interpreters.Interpreter, place: Path) -> str:
    store = "" if artefact.suffix != ".whl" else "Python" if "-none-any" in artefact.name else "C"
    return smoke(Installed(install(artefact, python, place), place / "scripts", version(), store))


def _run_at_once(artefacts: list[Path], folder: Path) -> Iterator[Trial]:
    """`uvx` and `pipx run` of the wheels, where these programs are here."""
    (script := folder / "hello.py").write_text("import os\nprint('rank', os.environ['RANK'])\n")
    for name, words in RUNNERS.items():
        for artefact in artefacts if shutil.which(words[0]) else []:
            if artefact.suffix == ".whl":
                yield Trial(name, artefact, partial(_run_by, [*words, str(artefact), "rallyrun"], script))


def _run_by(command: list[str], script: Path) -> str:
    for words, wanted in (["--version"], f"rallyrun {version()}\n"), (["--standalone", str(script)], "rank 0\n"):
        done = subprocess.run([*command, *words], capture_output=True, text=True, timeout=_TIMEOUT, check=False)
        if (done.returncode, done.stdout) != (0, wanted):
            raise SmokeError(f"{' '.join([*command, *words])} said {done.stdout!r}, {done.stderr[-500:]!r}")
    return "--version, a job"


def _row(trial: Trial) -> list[str]:
    """Try it, and print its row. Returns what is wrong."""
    began = time.monotonic()
    try:
        result, wrong = f"ok: {trial.run()}", []
    except (InstallError, SmokeError, subprocess.TimeoutExpired) as error:
        result, wrong = "**failed**", [f"{trial.artefact.name} in {trial.where}: {error}"]
    seconds = time.monotonic() - began
    print(f"| {trial.where} | {trial.artefact.name} | {result} | {seconds:.1f} |", flush=True)
    return wrong


def _not_tried(wanted: list[str]) -> Iterator[str]:
    found = interpreters.find()
    for minor in wanted:
        if minor not in found:
            yield f"not tried: Python {minor}, which is not here; {interpreters.NAMED}=/path/to/python{minor} names one"
    for name, words in RUNNERS.items():
        if not shutil.which(words[0]):
            yield f"not tried: {name}, which is not on PATH"


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "src"))  # nothing is installed where releases are built
    sys.exit(main())
