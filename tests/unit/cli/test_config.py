"""`--config`: a launch in one file."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import UsageError
from rallypoint.base.flags import Flag
from rallypoint.cli.config import effective_lines, read_config
from rallypoint.cli.flags import FLAGS
from rallypoint.cli.parse import Options, parse

_JOB = """
nnodes = "2:4"
nproc_per_node = 8
max-restarts = 3
no-python = true
preload = ["torch", "numpy"]
hang-timeout = 600.5

[rdzv-conf]
join_timeout = 600
is_host = true

[env]
NCCL_DEBUG = "WARN"
OMP_NUM_THREADS = 4

[profile.debug]
nproc-per-node = 1
[profile.debug.env]
NCCL_DEBUG = "INFO"
[profile.debug.rdzv-conf]
join_timeout = 30
"""


@pytest.fixture
def job(tmp_path: Path) -> str:
    (tmp_path / "job.toml").write_text(_JOB)
    return str(tmp_path / "job.toml")


def test_a_file(job: str) -> None:
    options = parse(["--config", job, "train.py", "--lr=1"], {})
    assert (options.nnodes, options.nproc_per_node, options.max_restarts, options.no_python) == ("2:4", "8", 3, True)
    assert options.rdzv_conf == "join_timeout=600,is_host=true"
    assert options.features.recovery.preload == ("torch", "numpy")
    assert options.features.hangs.hang_timeout == 600.5
    assert options.environment == {"NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "4"}
    assert options.training_script_args == ("--lr=1",)
    assert options.source("nnodes") == job


def test_precedence(job: str) -> None:
    environ = {"PET_NNODES": "7", "PET_MAX_RESTARTS": "5", "PET_NO_PYTHON": "0"}
    options = parse([f"--config={job}", "--max-restarts=9", "train.py"], environ)
    assert (options.nnodes, options.max_restarts, options.no_python) == ("7", 9, False)
    assert [options.source(name) for name in ("nnodes", "max_restarts", "no_python", "nproc_per_node")] == [
        *("PET_NNODES", "--max-restarts", "PET_NO_PYTHON"),
        job,
    ]


def test_a_profile(job: str) -> None:
    options = parse(["--config", f"{job}:debug", "train.py"], {})
    assert (options.nnodes, options.nproc_per_node) == ("2:4", "1")
    assert options.rdzv_conf == "join_timeout=30,is_host=true"
    assert options.environment == {"NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}
    assert parse(["train.py"], {"PET_CONFIG": f"{job}:debug"}).nproc_per_node == "1"


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("nnode = 2", r"'nnode' is not a flag of rallyrun; did you mean 'nnodes'\?"),
        ("learning-rate = 2", "'learning-rate' is not a flag of rallyrun; rallyrun --help lists them"),
        ("standalone = 1", "standalone is 1, but the flag takes no value; write true or false"),
        ("nnodes = {min = 1}", r"nnodes is \{'min': 1\}; write a string, a number, true or false"),
        ("hang-timeout = nan", "hang-timeout is nan; write"),
        ("[env]\n'A B' = 1", "'A B' is not a valid variable"),
        ("[env]\nPET_NNODES = 1", "'PET_NNODES' is not a valid variable"),
        ("env = 1", "env is not a table"),
        ("profile = 1", "profile is not a table of tables"),
        ("nnodes", "is not valid TOML"),
        ("nnodes = '\udcff'", "is not valid TOML"),
    ],
)
def test_invalid_files(text: str, error: str, tmp_path: Path) -> None:
    path = tmp_path / "job.toml"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(UsageError, match=error):
        read_config(str(path))


def test_missing_files_and_profiles(job: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        read_config(str(tmp_path / "no.toml"))
    with pytest.raises(UsageError, match=r"has no profile 'big'; it has debug"):
        read_config(f"{job}:big")


def _lines(options: Options) -> list[str]:
    return effective_lines(options.flat(), options.sources, options.environment)


def _again(options: Options, tmp_path: Path) -> Options:
    path = tmp_path / "again.toml"
    path.write_text("\n".join(_lines(options)))
    return parse(["--config", str(path), options.training_script], {})


def test_effective_lines(job: str, tmp_path: Path) -> None:
    options = parse(["--config", job, "--max-restarts=9", "train.py"], {"PET_ROLE": 'a "b"\\\n'})
    lines = _lines(options)
    assert "max-restarts = 9  # --max-restarts" in lines
    assert f'nnodes = "2:4"  # {job}' in lines
    assert '# rdzv-backend = "static"' in lines
    again = _again(options, tmp_path)
    known = {"config": again.features.command.config}
    assert again.flat() | known == options.flat() | known
    assert again.environment == options.environment


@pytest.mark.parametrize(
    "flag", [flag for flag in FLAGS if flag.dest not in ("config", "dry_run")], ids=lambda flag: flag.name
)
def test_every_flag_can_be_printed_and_read(flag: Flag[object], tmp_path: Path) -> None:
    sample = next(iter(word for word in (*flag.words, *flag.samples) if word != flag.default))
    options = parse([flag.name, "train.py"] if flag.read is None else [f"{flag.name}={sample}", "train.py"], {})
    again = _again(options, tmp_path)
    assert again.flat()[flag.dest] == options.flat()[flag.dest]


@given(st.text())
def test_quoted(text: str) -> None:
    from rallypoint.cli.config import _quoted

    if text.isascii() or not any("\ud800" <= character <= "\udfff" for character in text):
        assert tomllib.loads(f"x = {_quoted(text)}") == {"x": text}
