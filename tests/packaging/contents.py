"""The contents of `make dist`'s artifacts against what they should be: sentences about mistakes."""

from __future__ import annotations

import platform
import re
import struct
import tarfile
import zipfile
from collections.abc import Iterator, Mapping
from email.message import Message
from email.parser import Parser
from pathlib import Path, PurePosixPath

from tests.packaging.interpreters import supported

_RELATIVE = re.compile(r"\]\((?![a-z]+:|#)[^)]*\)|<!--")
WANTED = ("rallypoint/__init__.py", "rallypoint/py.typed", "rallypoint/observe/page.html", "rallypoint/base/version.py")
MACHINES = {62: "x86_64", 183: "aarch64"}
"""The machines of ELF files (`e_machine`), as tags of wheels name them."""
_LOADED, _LARGEST_PAGE = 1, 64 * 1024
MANUAL = tuple(f"build/share/man/man1/{command}.1" for command in ("rallyrun", "rallyctl"))
"""The manual pages of a source archive. A wheel that is built of one has them; of a checkout, after `make man`."""


def metadata(artefact: Path) -> Message:
    """The metadata of a wheel or of a source archive."""
    if artefact.suffix == ".whl":
        with zipfile.ZipFile(artefact) as wheel:
            (name,) = [name for name in wheel.namelist() if name.endswith(".dist-info/METADATA")]
            text = wheel.read(name).decode()
    else:
        with tarfile.open(artefact) as archive:
            file = archive.extractfile(f"{artefact.name.removesuffix('.tar.gz')}/PKG-INFO")
            assert file is not None
            text = file.read().decode()
    return Parser().parsestr(text)


def names(artefact: Path) -> list[str]:
    """The files of an artefact; those of a source archive from its folder on."""
    if artefact.suffix == ".whl":
        with zipfile.ZipFile(artefact) as wheel:
            return [name for name in wheel.namelist() if not name.endswith("/")]
    with tarfile.open(artefact) as archive:
        return [str(PurePosixPath(*PurePosixPath(each.name).parts[1:])) for each in archive if each.isfile()]


def has_manual(artefact: Path) -> bool:
    """Whether all manual pages are in an artefact."""
    found = names(artefact)
    return all(any(name.endswith(Path(page).name) for name in found) for page in MANUAL)


def is_for_this_machine(artefact: Path) -> bool:
    """Whether an artefact is for the machine that this runs on; a source archive is for each."""
    return "manylinux" not in artefact.name or artefact.stem.endswith(f"_{platform.machine()}")


def faults(artefact: Path, version: str, tracked: frozenset[str] | None) -> Iterator[str]:
    """What is wrong with an artefact.

    Args:
        artefact: the file.
        version: that it should have.
        tracked: the files of the commit, which make the source archive; None if they are not known.
    """
    about = metadata(artefact)
    if about["Version"] != version:
        yield f"its version is {about['Version']}, and the code's {version}"
    if about.get_all("License-File") != ["LICENSE"]:
        yield f"its licence files are {about.get_all('License-File')}"
    classified = about.get_all("Classifier") or []
    yield from (f"it is not classified for {each}" for each in supported() if not _is_for(each, classified))
    text = about.get_payload()
    if _RELATIVE.search(str(text)):
        yield "its long description has links or comments that a package index cannot show"
    found = names(artefact)
    if artefact.suffix == ".whl":
        yield from _faults_of_wheel(artefact, found)
    elif tracked is not None:
        yield from (
            f"it has {each}, which is not in git" for each in sorted({*found} - tracked - {"PKG-INFO", *MANUAL})
        )
        yield from (f"it lacks {each}" for each in sorted(tracked - {*found}))


def _faults_of_wheel(wheel: Path, found: list[str]) -> Iterator[str]:
    from rallypoint.cli.completion import SHELLS  # whoever runs this has the sources on their path

    info = f"{'-'.join(wheel.name.split('-')[:2])}.dist-info"
    data = f"{info.removesuffix('.dist-info')}.data/data/"
    wanted = (*WANTED, f"{info}/licenses/LICENSE", *_completions(data, SHELLS))
    yield from (f"it lacks {each}" for each in wanted if each not in found)
    ours = ("rallypoint/", f"{info}/", f"{data}share/")
    strange = [each for each in found if not each.startswith(ours)]
    yield from (f"it has {each} beside the package" for each in strange)
    yield from (f"it has {each}" for each in found if each.endswith((".c", ".h", ".pyc")))
    built = [each for each in found if each.endswith(".so")]
    if "-none-any" in wheel.name:
        yield from (f"it has {each}, and says that it fits every system" for each in built)
    elif built != ["rallypoint/store/_native.abi3.so"]:
        yield f"its compiled modules are {built}"
    elif "manylinux" not in wheel.name:
        yield "it has no manylinux tag"
    else:
        yield from _faults_of_module(wheel, built[0])


def _faults_of_module(wheel: Path, name: str) -> Iterator[str]:
    """It is for the machine of the tag, and can be loaded where pages have 64 KiB, as those of aarch64 may."""
    with zipfile.ZipFile(wheel) as opened:
        module = opened.read(name)
    machine = MACHINES.get(struct.unpack_from("<H", module, 18)[0], "another machine")
    if machine not in wheel.name:
        yield f"its compiled module is for {machine}"
    (begin,), (size, count) = struct.unpack_from("<Q", module, 32), struct.unpack_from("<HH", module, 54)
    segments = (struct.unpack_from("<I44xQ", module, begin + size * number) for number in range(count))
    pages = min(alignment for kind, alignment in segments if kind == _LOADED)
    if machine == "aarch64" and pages < _LARGEST_PAGE:
        yield f"its compiled module is made for pages of {pages} bytes"


def _completions(data: str, shells: Mapping[str, tuple[str, ...]]) -> Iterator[str]:
    yield from (f"rallypoint/cli/completions/{shell}" for shell in shells)
    yield from (f"{data}{path}" for paths in shells.values() for path in paths)


def _is_for(minor: str, classified: list[str]) -> bool:
    return f"Programming Language :: Python :: {minor}" in classified
