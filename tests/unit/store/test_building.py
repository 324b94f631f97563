"""Building the store in C, where there is a compiler."""

from __future__ import annotations

import re
import shutil
import sysconfig
from pathlib import Path

import build_native
import pytest

from tests.processes import completed
from tests.unit.store.both import is_compiled

pytestmark = pytest.mark.process


def can_build() -> bool:
    try:
        return shutil.which(build_native.compiler()[0]) is not None
    except build_native.NotBuiltError:
        return False


needs_compiler = pytest.mark.skipif(not can_build(), reason="there is no compiler, or no headers of Python")


@needs_compiler
def test_the_store_in_c_is_up_to_date() -> None:
    assert is_compiled(), "reinstall it, or run `python build_native.py`"
    from rallypoint.store import _native

    assert build_native.digest() == _native.SOURCES, "run `python build_native.py`: the sources have changed since"


@needs_compiler
def test_the_compiler_gives_no_warnings(tmp_path: Path) -> None:
    built = build_native.build(tmp_path / "_native.abi3.so", "-Werror")
    assert list(tmp_path.iterdir()) == [built]


def test_formats_have_no_sizes() -> None:
    """A module built with the headers of Python 3.13 must work under 3.11, which refuses their `y#`."""
    texts = {path.name: path.read_text() for path in build_native.SOURCES.glob("*.c")}
    assert [name for name, text in texts.items() if re.search(r'"[^"\n]*#[^"\n]*"', text)] == []


@needs_compiler
@pytest.mark.skipif(shutil.which("readelf") is None, reason="needs readelf")
def test_the_module_is_hardened() -> None:

    def shown(*what: str) -> str:
        command = ["readelf", *what, str(build_native.BUILT)]
        return completed(command, check=True).stdout

    assert "__stack_chk_fail" in shown("--wide", "--dyn-syms")
    assert "BIND_NOW" in shown("--dynamic")
    segments = shown("--wide", "--segments")
    assert "GNU_RELRO" in segments
    (stack,) = [line for line in segments.splitlines() if "GNU_STACK" in line]
    assert " RW " in stack


@needs_compiler
@pytest.mark.parametrize(
    ("compiler", "why"),
    [
        ("/nowhere/cc", "the compiler '/nowhere/cc' cannot be run: No such file or directory"),
        ("false", "the compiler 'false' failed: exit code 1"),
    ],
)
def test_a_failed_build_removes_the_old_module(
    compiler: str, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CC", compiler)
    target = tmp_path / "_native.abi3.so"
    target.write_bytes(b"what an older build has left")
    with pytest.raises(build_native.NotBuiltError) as caught:
        build_native.build(target)
    assert str(caught.value) == why
    assert list(tmp_path.iterdir()) == []


def test_missing_headers_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sysconfig, "get_path", lambda _name: str(tmp_path))
    with pytest.raises(build_native.NotBuiltError, match=r"headers of Python are not installed .*Python\.h"):
        build_native.compiler()
