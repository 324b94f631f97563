"""Destinations of output: log folders, streams, prefixes."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rallypoint.base.errors import UserError
from rallypoint.workers.logs.specs import (
    DefaultLogsSpecs,
    LogsDest,
    Std,
    host_label,
    line_prefixes,
    log_only_in_files,
    temporary_folder,
    to_map,
    with_host,
)

HOST = os.uname().nodename


def _envs(count: int, run_id: str = "job", attempt: str = "0") -> dict[int, dict[str, str]]:
    both = {"TORCHELASTIC_RUN_ID": run_id, "TORCHELASTIC_RESTART_COUNT": attempt}
    return {rank: dict(both) for rank in range(count)}


def _files(base: Path) -> set[str]:
    """Folders below `base`, without the host and the random suffix of the run's folder."""
    found = set()
    for path in base.rglob("*"):
        run, *rest = path.relative_to(base).parts
        found.add("/".join([run[: -len("_XXXXXXXX")].removesuffix(f"_{HOST}"), *rest]))
    return found


def test_relative_log_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    envs = _envs(1)
    dest = DefaultLogsSpecs("logs").reify(envs)
    assert dest.error_files[0].startswith("logs/")
    assert envs[0]["TORCHELASTIC_ERROR_FILE"] == str(tmp_path / dest.error_files[0])


def test_reify(tmp_path: Path) -> None:
    specs = DefaultLogsSpecs(str(tmp_path / "logs"), redirects=Std.OUT, tee={1: Std.ERR})
    envs = _envs(2, attempt="3")
    dest = specs.reify(envs)
    assert _files(tmp_path / "logs") == {"job", "job/attempt_3", "job/attempt_3/0", "job/attempt_3/1"}
    attempt = os.path.dirname(dest.filtered_stdout)
    assert dest == LogsDest(
        stdouts={0: f"{attempt}/0/stdout.log", 1: f"{attempt}/1/stdout.log"},
        stderrs={0: "", 1: f"{attempt}/1/stderr.log"},
        tee_stdouts={},
        tee_stderrs={1: f"{attempt}/1/stderr.log"},
        error_files={0: f"{attempt}/0/error.json", 1: f"{attempt}/1/error.json"},
        filtered_stdout=f"{attempt}/filtered_stdout.log",
        filtered_stderr=f"{attempt}/filtered_stderr.log",
    )
    assert envs[1]["TORCHELASTIC_ERROR_FILE"] == dest.error_files[1]
    assert specs.root_log_dir == str(tmp_path / "logs")


def test_log_only_in_files(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for shown in ({"tee": Std.ALL}, {}, {"local_ranks_filter": {0}}):
        assert not log_only_in_files(DefaultLogsSpecs(str(tmp_path), **shown).reify(_envs(2)), "role")
    hidden = DefaultLogsSpecs(str(tmp_path), redirects=Std.ERR, tee={1: Std.ALL}, local_ranks_filter={0})
    dest = hidden.reify(_envs(2))
    assert log_only_in_files(dest, "role")
    attempt = os.path.dirname(os.path.dirname(dest.stderrs[0]))
    assert caplog.messages == [
        f"[role] the workers' output goes only to files: stderr.log and stdout.log in {attempt}",
    ]


def test_run_ids(tmp_path: Path) -> None:
    DefaultLogsSpecs(str(tmp_path / "default")).reify({0: {}})
    assert "test_run_id/attempt_0/0" in _files(tmp_path / "default")
    envs = _envs(1, run_id="ü" * 300)
    DefaultLogsSpecs(str(tmp_path / "long")).reify(envs)
    (folder,) = (tmp_path / "long").iterdir()
    assert folder.name.startswith("ü" * ((200 - len(HOST)) // 2) + f"_{HOST}_")
    assert os.path.isdir(os.path.dirname(envs[0]["TORCHELASTIC_ERROR_FILE"]))
    DefaultLogsSpecs(str(tmp_path / "logs")).reify(_envs(1, run_id="../../job"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["default", "logs", "long"]


@pytest.mark.parametrize("named", [True, False])
def test_removed_folders_are_created_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, named: bool) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    specs = DefaultLogsSpecs(str(tmp_path / "logs") if named else None)
    specs.reify(_envs(1))
    (root,) = tmp_path.iterdir()
    shutil.rmtree(root)
    error_file = specs.reify(_envs(1, attempt="1")).error_files[0]
    assert os.path.isdir(os.path.dirname(error_file))
    assert error_file.endswith("/attempt_1/0/error.json")
    specs.clean_up()
    assert list(tmp_path.iterdir()) == ([root] if named else [])


def test_clean_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    specs = DefaultLogsSpecs()
    assert specs.root_log_dir is None
    for _ in range(2):  # specs can be reused
        specs.reify(_envs(2))
        assert [path.name.startswith("torchelastic_") for path in tmp_path.iterdir()] == [True]
        specs.clean_up()
        assert list(tmp_path.iterdir()) == []
    named = DefaultLogsSpecs(str(tmp_path / "logs"))
    folder = Path(named.reify(_envs(2)).error_files[1]).parent
    named.clean_up()
    assert folder.is_dir()
    kept = Path(specs.reify(_envs(2)).error_files[1])
    kept.write_text("{}")
    specs.clean_up()
    assert kept.exists()
    assert not kept.parent.with_name("0").exists()


def test_a_file_as_log_folder(tmp_path: Path) -> None:
    file = tmp_path / "taken"
    file.touch()
    with pytest.raises(UserError, match="is a file"):
        DefaultLogsSpecs(str(file))
    with pytest.raises(UserError, match="cannot be created"):
        DefaultLogsSpecs(str(file / "below")).reify(_envs(1))


@pytest.mark.parametrize("text", ["4", "x", "", " 1", "10:1", "0:1,", "0:1, 1:2", "0:4", "-1", "٣", "1\n"])
def test_invalid_streams(text: str) -> None:
    with pytest.raises(UserError, match=re.escape(repr(text))) as caught:
        Std.from_str(text)
    assert "[0-3]" in str(caught.value)
    assert "[0-9]:[0-3]" in str(caught.value)


@given(st.text(alphabet="0123456789:,-x ", max_size=12))
def test_any_text_is_streams_or_an_error(text: str) -> None:
    fits = re.match(r"^(?:[0-3]|(?:[0-9]:[0-3],)*[0-9]:[0-3])\Z", text) is not None
    try:
        Std.from_str(text)
    except UserError:
        assert not fits
    else:
        assert fits


def test_streams_of_ranks() -> None:
    assert Std.from_str("3") is Std.ALL
    assert Std.from_str("0:1,3:2") == {0: Std.OUT, 3: Std.ERR}
    assert Std.from_str("0:1,0:2") == {0: Std.ERR}
    assert to_map(Std.ERR, 2) == {0: Std.ERR, 1: Std.ERR}
    assert to_map({0: Std.OUT, 5: Std.ERR}, 2) == {0: Std.OUT, 1: Std.NONE}
    assert to_map(Std.ALL, 0) == {}


STEP = {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_STEP_NUM_NODES": "2"}


def test_line_prefixes() -> None:
    assert line_prefixes("${host}.${attempt} ", "default", {1: 5}, 3) == {1: f"{HOST}.3 "}
    assert line_prefixes("${hostname}:${rank}: ", "default", {1: 5}) == {1: f"{HOST}:5: "}
    assert with_host(None, "") is None
    assert line_prefixes(with_host(None, "n$3: "), "default", {0: 0}) == {0: "n$3: [default0]:"}
    assert line_prefixes(with_host("${rank} ", "n3: "), "default", {0: 7}) == {0: "n3: 7 "}
    for own in ("${host} ", "${hostname} ", "$hostname "):
        assert with_host(own, "n3: ") == own


@pytest.mark.parametrize(
    ("when", "environ", "labelled"),
    [
        ("auto", {}, False),
        ("auto", STEP, True),
        ("auto", STEP | {"SLURM_STEP_NUM_NODES": "1", "SLURM_NNODES": "4"}, False),  # one node of four
        ("auto", {"SLURM_STEP_ID": "0", "SLURM_PROCID": "1", "SLURM_NNODES": "4"}, True),
        ("auto", {"SLURM_JOB_ID": "5", "SLURM_PROCID": "0", "SLURM_NNODES": "4"}, False),  # a batch script
        ("auto", STEP | {"SLURM_STEP_NUM_NODES": "two"}, False),
        ("never", STEP, False),
        ("always", {}, True),
    ],
)
def test_host_label(when: str, environ: dict[str, str], labelled: bool) -> None:
    assert host_label(when, environ) == (f"{HOST}: " if labelled else "")


def test_a_deleted_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    assert os.path.isabs(temporary_folder())
    monkeypatch.setenv("TMPDIR", ".")
    assert os.path.isabs(temporary_folder())
