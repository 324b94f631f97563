"""Folders of our own, wherever there is a place for them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rallypoint.logs.specs import temporary_folder


def test_a_named_folder_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    assert temporary_folder() == str(tmp_path)


def test_a_working_directory_that_has_been_deleted_does_no_harm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    for name in ("TMPDIR", "TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    assert os.path.isabs(temporary_folder())
    monkeypatch.setenv("TMPDIR", ".")
    assert os.path.isabs(temporary_folder())
