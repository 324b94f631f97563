"""The deprecated command: what becomes of `--use-env`, and that all else is `rallyrun`'s."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rallypoint.base.errors import UserError
from rallypoint.cli.parse import parse
from rallypoint.cli.rallyrun import read_deprecated as read

RANK = "--local-rank=${local_rank}"


@pytest.mark.parametrize(
    ("arguments", "environ", "words"),
    [
        (["s.py", "a", "--use-env"], {}, (RANK, "a", "--use-env")),
        (["-m", "s", "--", "a"], {}, (RANK, "a")),
        (["--use-env", "s.py", "a"], {}, ("a",)),
        (["--use_env", "--no-python", "s", "--use-env"], {}, ("--use-env",)),
        (["s.py"], {"PET_USE_ENV": "1"}, (RANK,)),
    ],
)
def test_the_first_argument_is_the_local_rank(
    arguments: list[str], environ: dict[str, str], words: tuple[str, ...]
) -> None:
    options = read(arguments, environ)
    assert options.training_script_args == words
    plain = [word for word in arguments if word not in ("--use-env", "--use_env")]
    assert options._replace(training_script_args=()) == parse(plain, environ)._replace(training_script_args=())


def test_it_warns_that_it_is_deprecated(capsys: pytest.CaptureFixture[str]) -> None:
    read(["s.py"], {})
    assert "FutureWarning: python -m rallypoint.launch is deprecated" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "environ", "source"), [(["--no-python"], {}, "--no-python"), ([], {"PET_NO_PYTHON": "1"}, "PET_NO_P")]
)
def test_a_program_takes_no_local_rank(arguments: list[str], environ: dict[str, str], source: str) -> None:
    with pytest.raises(UserError, match=rf"{source}.* --use-env"):
        read([*arguments, "true"], environ)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--max-restarts=-1", "s.py"], 1, "rallyrun: error: --max-restarts=-1 is out of range"),
        (["--use-env=1", "s.py"], 2, "--use_env: it takes no value, and was given '1'; leave that out"),
        (["--no-python", "true"], 1, "rallyrun: error: --no-python runs a program"),
        (["--use-env", "--no-python", "true"], 0, ""),
    ],
)
@pytest.mark.process
def test_it_ends_as_rallyrun_does(arguments: list[str], code: int, said: str, tmp_path: Path) -> None:
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PET_", "TORCH"))}
    done = subprocess.run(
        [sys.executable, "-m", "rallypoint.launch", *arguments],
        env={**environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "Traceback" not in done.stderr
