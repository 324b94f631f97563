"""The metrics of a worker, and the agent's view of them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from rallypoint import metrics, notices
from rallypoint.metrics import Metrics, read_metrics


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    found = tmp_path / "notices"
    monkeypatch.setenv(notices.VARIABLE, str(found))
    monkeypatch.setenv("LOCAL_RANK", "2")
    return found


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_left", Metrics())


def test_report(folder: Path) -> None:
    metrics.report(total=1000, loss=0.5, lr=1e-4)
    metrics.report(loss=0.25)
    assert read_metrics(str(folder), 3) == Metrics(1000, {"loss": 0.25, "lr": 1e-4})
    assert os.listdir(folder) == ["metrics.2"]
    assert folder.stat().st_mode & 0o777 == 0o700
    assert read_metrics(str(folder), 2) == Metrics()


def test_invalid_metrics(folder: Path) -> None:
    class Tensor:
        def __float__(self) -> float:
            raise RuntimeError("a Tensor with 4 elements cannot be converted to Scalar")

    odd = {"nan": float("nan"), "text": "x", "none": None, "tensor": Tensor(), "flag": True, "a\x1b": 1.0, "b" * 200: 1}
    metrics.report(total=-1, loss=0.5)
    metrics.report(total="many", loss=float("inf"), **odd)  # type: ignore[arg-type]
    assert read_metrics(str(folder), 3) == Metrics(0, {"loss": 0.5})
    metrics.report(**{f"m{number}": number for number in range(200)})
    assert len(read_metrics(str(folder), 3).values) == 64


def test_metrics_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for place in ("", str(tmp_path / "file"), str(tmp_path / "none" / "deep"), "/proc/none"):
        monkeypatch.setenv(metrics.FOLDER, place)
        monkeypatch.setenv("LOCAL_RANK", "0")
        metrics.report(total=3, loss=1.0)
        assert read_metrics(place, 1) == Metrics()


@pytest.mark.parametrize("text", [b"", b"[]", b"[" * 10000, b'{"total": 1e3, "metrics": []}', b"\xff", b" " * 20000])
def test_damaged_files(folder: Path, text: bytes) -> None:
    folder.mkdir(mode=0o700)
    (folder / "metrics.0").write_bytes(text)
    assert read_metrics(str(folder), 1) == Metrics()
