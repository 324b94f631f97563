"""Event files that are damaged, foreign, empty, or from two jobs."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from rallypoint.cli.rallyctl import main
from rallypoint.observe.report import read_events

WHOSE: dict[str, Any] = {"version": 1, "time": 1000.0, "elapsed": 0.0, "job": "j", "host": "h", "pid": 1, "round": -1}


def line(kind: str = "phase", **more: object) -> str:
    body = {"phase": "rendezvous"} if kind == "phase" else {}
    return json.dumps({"event": kind, **WHOSE, **body, **more}) + "\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "e.jsonl"


def read(*paths: Path) -> tuple[dict[str, int], list[str]]:
    found = read_events([str(path) for path in paths])
    return {job: len(events) for job, events in found.events.items()}, found.notes


@pytest.mark.parametrize(
    ("damage", "why"),
    [
        ("{\n", r"line 2: Input data was truncated"),
        ("\x00\n", r"line 2: JSON is malformed"),
        ("[]\n", r"line 2: Expected `object`, got `array`"),
        ('{"a": 1}\n', r"line 2: Object missing required field `event`"),
        (line(elapsed=-1.0), r"line 2: its elapsed is -1.0"),
        (line(time=1e300), r"line 2: its time is 1e\+300"),
        (line(seconds=-1e9), r"line 2: its seconds is -1000000000.0"),
        (line(job=3), r"line 2: Expected `str`, got `int` - at `\$.job`"),
        (line(phase="asleep"), r"line 2: Invalid enum value 'asleep'"),
        ('{"event": ' + "[" * 100_000 + "\n", r"line 2: (Expected `str`|maximum recursion|Input data was truncated)"),
    ],
)
def test_damaged_lines(file: Path, damage: str, why: str) -> None:
    file.write_text(line() + damage + line())
    jobs, (note,) = read(file)
    assert jobs == {"j": 2}
    assert note.startswith(f"a line was skipped in {file}: not readable (")
    assert re.search(why, note)
    assert "\n" not in note


def test_incomplete_and_binary_lines(file: Path) -> None:
    file.write_bytes(line().encode() + b"\xff\xfe\n" + line().encode()[:40])
    jobs, (note,) = read(file)
    assert jobs == {"j": 1}
    assert note.startswith(f"2 lines were skipped in {file}: not readable (line 2: ")


def test_kinds_of_newer_versions(file: Path) -> None:
    file.write_text(line() + line("checkpoint_saved") + line(color="red"))
    assert read(file) == ({"j": 2}, [f"1 lines of {file} were skipped: they are of kinds that a newer version writes"])


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "{} is empty; use files written by rallyrun --event-log-handler=jsonl:PATH"),
        ("root:x:0:0\nbin:x:1:1\n", "{} contains no events of rallyrun (line 1: JSON is malformed"),
        ('{"name": "torchelastic.worker.status.START"}\n', "{} contains no events of rallyrun (line 1: Object missing"),
    ],
)
def test_files_without_events(file: Path, text: str, sentence: str, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(text)
    assert main(["report", str(file)]) == 1
    assert capsys.readouterr().err.startswith(f"rallyctl: error: {sentence.format(file)}")


def test_an_empty_file_beside_others(file: Path, tmp_path: Path) -> None:
    file.write_text(line())
    (tmp_path / "other.jsonl").touch()
    assert read(tmp_path) == ({"j": 1}, [f"{tmp_path / 'other.jsonl'} is empty"])


@pytest.mark.parametrize(
    ("path", "sentence"),
    [
        ("none.jsonl", "{}/none.jsonl cannot be read: No such file or directory"),
        ("none/e.jsonl", "none/e.jsonl cannot be read: No such file or directory"),
        (".", "no *.jsonl file was found in ."),
    ],
)
def test_missing_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], path: str, sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["report", path]) == 1
    assert capsys.readouterr().err.startswith(f"rallyctl: error: {sentence.format(tmp_path)}")


def test_two_jobs_in_one_file(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text(line() + line(job="k", elapsed=2.0))
    assert main(["report", str(file)]) == 1
    assert (
        capsys.readouterr().err == "rallyctl: error: the files contain events of 2 jobs, j, k; choose one with --job\n"
    )
    assert main(["report", str(file), "--job", "k", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["job"] == "k"
    assert main(["report", str(file), "--job", "l"]) == 1
    assert "the files contain no events of job 'l'; they contain events of j, k" in capsys.readouterr().err


def test_rotated_files(file: Path, tmp_path: Path) -> None:
    for number, path in enumerate(("e.jsonl.10", "e.jsonl.2", "e.jsonl.1", "e.jsonl")):
        (tmp_path / path).write_text(line(elapsed=float(number)))
    for paths in ([file], [tmp_path], [file, tmp_path, tmp_path / "e.jsonl.1"]):
        found = read_events([str(path) for path in paths])
        assert [entry.elapsed for entry in found.events["j"]] == [0.0, 1.0, 2.0, 3.0]
