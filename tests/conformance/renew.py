"""Writes the record of torch's answers: asks every question live, and every test compares with the answer.

    python -m tests.conformance.renew [--with PYTHON] [arguments of pytest, such as -k]

Runs the conformance tests in namespaces of their own, in which the machine has an unmistakable name. The new record
replaces the old one; review it with `git diff`. With arguments, it keeps answers that were not asked again. A question
without an answer is missing in it, and fails in the next test run.

With another Python, whose environment has a newer torch (and this repository, and the needs of its tests), it keeps
only the answers that differ from those of the installed torch, in a folder of that version.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.conformance.record import FOLDER, FULL_NAME, HOST, Mode, keep_what_differs

_NAMED = f'hostname {HOST} && mount --bind "$1" /etc/hosts && shift && exec "$@"'
_HOSTS = f"127.0.0.1 localhost\n::1 localhost\n127.0.0.3 {FULL_NAME} {HOST}\n"
"""Another address of loopback, so that looking the name up leads back to it and not to `localhost`."""


def main(arguments: list[str]) -> int:
    """Renew the record; returns what pytest has returned."""
    python = arguments[1] if arguments[:1] == ["--with"] else ""
    arguments = arguments[2:] if python else arguments
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch, "records")
        if arguments and not python:
            shutil.copytree(FOLDER, folder)
        else:
            folder.mkdir()
        hosts = Path(scratch, "hosts")
        hosts.write_text(_HOSTS)
        namespaces = ["unshare", "--uts", "--mount", *([] if os.geteuid() == 0 else ["--map-root-user"])]
        tests = [
            python or sys.executable,
            "-m",
            "pytest",
            f"--torch={Mode.WRITE}",
            f"--records={folder}",
            "-n",
            "2",
            "--dist",
            "worksteal",
        ]
        timeouts = {"RALLYPOINT_TEST_TIMEOUT": "300", "PYTEST_TIMEOUT": "900"}
        done = subprocess.run(
            [*namespaces, "sh", "-c", _NAMED, "-", str(hosts), *tests, str(FOLDER.parent), *arguments],
            env=os.environ | timeouts,
            check=False,
        )
        if python:
            for name in keep_what_differs(folder, FOLDER):
                print(f"not answered by that torch yet: {name}")
            return done.returncode
        newer = {each: Path(scratch, each.name) for each in FOLDER.iterdir() if each.is_dir()}
        for old, kept in newer.items():
            old.rename(kept)
        shutil.rmtree(FOLDER, ignore_errors=True)
        shutil.copytree(folder, FOLDER, ignore=shutil.ignore_patterns(*(each.name for each in newer)))
        for old, kept in newer.items():
            shutil.copytree(kept, old)
        return done.returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
