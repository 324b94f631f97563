"""The deprecated command: what becomes of `--use-env`, and that all else is `rallyrun`'s."""

from __future__ import annotations

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
