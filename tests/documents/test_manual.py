"""The manual pages have no mistake in man(7), and leave no flag, verb or variable out; a wheel has them."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hatch_build import BuildNative
from hatchling.metadata.core import ProjectMetadata
from man.roff import example, inline, sentence, wrapped
from man.share import shared_files, write_shared_files

from rallypoint.cli.command_table import read_verbs
from rallypoint.cli.completion.scripts import SHELLS
from rallypoint.cli.flags import FLAGS
from rallypoint.cli.rallyctl import build_parser as build_rallyctl
from rallypoint.cli.unknown_names import OURS

ROOT = Path(__file__).parents[2]
PAGES = ("rallyrun", "rallyctl")
SECTIONS = ["NAME", "SYNOPSIS", "DESCRIPTION", "OPTIONS", "ENVIRONMENT", "FILES", "EXIT STATUS", "EXAMPLES", "SEE ALSO"]


@cache
def _shown(page: str) -> str:
    """A page as readers see it, on one line for each paragraph."""
    if shutil.which("mandoc") is None:
        pytest.skip("mandoc is not installed")
    command = ["mandoc", "-Tascii", "-Owidth=1000"]
    source = shared_files()[f"share/man/man1/{page}.1"]
    done = subprocess.run(command, input=source, capture_output=True, text=True, timeout=60, check=True)
    return re.sub(r".\x08", "", done.stdout)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_no_mistake(page: str, tmp_path: Path) -> None:
    if shutil.which("mandoc") is None:
        pytest.skip("mandoc is not installed")
    (tmp_path / page).write_text(shared_files()[f"share/man/man1/{page}.1"])
    command = ["mandoc", "-Tlint", "-Wall", page]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_all_sections(page: str) -> None:
    found = re.findall(r"^([A-Z].*)$", _shown(page), re.M)
    assert [each for each in found if each in SECTIONS] == SECTIONS


def test_every_flag_has_its_default_and_its_variable() -> None:
    text = _shown("rallyrun")
    for flag in FLAGS:
        entry = re.search(rf"^ +(?:-\w, )?{flag.name}(?:=\S+)?\n(?: {{14}}.*\n|\n)+", text, re.M)
        assert entry, flag.name
        assert "Default: " in entry[0]
        assert (f"variable: {flag.variable}" if flag.from_environment else "no variable") in entry[0]
    assert OURS - {"RALLYPOINT_NOTICES"} <= set(re.findall(r"^ +(RALLYPOINT_\w+)", text, re.M))


def test_every_verb_has_its_flags() -> None:
    text = _shown("rallyctl")
    for verb in read_verbs(build_rallyctl(), "rallyctl"):
        page = re.search(rf"^   {verb.name.partition(' ')[2]}\n((?: {{7}}.*\n|\n)+)", text, re.M)
        assert page, verb.name
        missing = [each.name for each in verb.options if each.name != "--help" and each.name not in page[1]]
        assert missing == []


def test_nothing_on_a_page_is_of_the_machine_that_made_it() -> None:
    for text in shared_files().values():
        assert sys.executable not in text
        assert str(ROOT) not in text


def test_the_date_is_that_of_the_release(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    assert " 2001-09-09 " in shared_files()["share/man/man1/rallyrun.1"].splitlines()[1]


def test_special_characters_show_as_they_are() -> None:
    assert inline(r"a\b `--x 'y'` [text](page.md) *Z* ([gone](x.md)).") == (r"a\eb \fB\-\-x \(aqy\(aq\fR text \fIZ\fR.")
    assert wrapped(".git and 'this'") == "\\&.git and 'this'\n"
    assert max(map(len, wrapped("word " * 100).splitlines())) <= 80
    assert sentence("the same") == "The same."
    assert sentence("c10d or etcd.") == "c10d or etcd."
    assert example("rallyrun -m a") == ".PP\n.RS 4\n.nf\n\\fBrallyrun \\-m a\\fR\n.fi\n.RE\n"


def test_a_wheel_has_pages_and_scripts_and_an_editable_install_has_none(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RALLYPOINT_BUILD", "pure")
    monkeypatch.setattr(sys, "path", [*sys.path])
    built = _build("standard", tmp_path)
    assert sorted(built) == sorted(write_shared_files(tmp_path).values())
    assert {f"share/man/man1/{page}.1" for page in PAGES} < set(built)
    assert {path for shell in SHELLS.values() for path in shell.installed_as} < set(built)
    assert _build("editable", tmp_path) == {}


def _build(version: str, folder: Path) -> dict[str, str]:
    """What the hook hands to hatchling for the wheel's `share/`, by the path there; afterwards nothing is left."""
    given: dict[str, Any] = {"shared_data": {}, "force_include": {}}
    hook = BuildNative(str(ROOT), {}, None, ProjectMetadata(str(ROOT), None), str(folder), "wheel")
    hook.initialize(version, given)
    found = {name: Path(path).read_text() for path, name in given["shared_data"].items()}
    hook.finalize(version, given, "")
    assert [path for path in given["shared_data"] if Path(path).exists()] == []
    return found
