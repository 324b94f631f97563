"""The recorded answers of real torch: its version is fixed, and starting it takes most of a test run's time.

1. A question has a group, a name, and everything that its answer depends on. An answer is plain JSON. The caller
   removes values that differ from run to run; the names of this machine are removed here.
2. With `--fresh`, a tenth of the questions is asked live, another tenth each day: ten days ask all. Without it, none.
3. Questions that depend on the machine are asked live in each run, and those that depend on Python whenever that is not
   the recorded one.
4. Answers of a newer torch than the installed one, whose build need not run here, are in a folder of their own below
   those of the installed one: only those that differ there, and the tests compare ours with them.
5. A live answer that differs from the recorded one fails its test, and so does a record of another question or of
   another torch. A test run never writes the record: `make record` does.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import platform
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from importlib.metadata import version
from pathlib import Path
from typing import Any
from zlib import crc32

FOLDER = Path(__file__).with_name("records")
VERSIONS = "versions.json"
ALIKE = "alike.json"
"""In the folder of a newer torch: which questions it has answered as the installed one has."""
HOST, FULL_NAME = "torchs-recorder", "torchs-recorder.invalid"
"""How the machine is called on which the record is written, so that its name is nothing else in any answer."""
_DAYS = 10


class Mode(StrEnum):
    """Which questions real torch is asked."""

    RECORDED = "recorded"
    DAILY = "daily"
    LIVE = "live"
    WRITE = "write"


class From(StrEnum):
    """What an answer depends on beside the question and the version of torch."""

    TORCH = "torch"
    PYTHON = "python"
    MACHINE = "machine"


def is_turn(group: str, name: str, day: int) -> bool:
    """Whether a question belongs to the tenth that is asked live on a day, a number of days since whenever."""
    return crc32(f"{group} {name}".encode()) % _DAYS == day % _DAYS


def versions() -> dict[str, str]:
    """What is installed here, of what answers may depend on."""
    return {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version("torch").partition("+")[0],
    }


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part)


def keep_what_differs(asked: Path, base: Path) -> list[str]:
    """Put what a newer torch has answered below the record of the installed one, as far as that is another answer.

    Returns:
        The questions that it has not answered in this run or another.
    """
    folder = base / json.loads((asked / VERSIONS).read_text())["torch"]
    folder.mkdir(exist_ok=True)
    (folder / VERSIONS).write_text((asked / VERSIONS).read_text())
    alike, unasked = _read(folder / ALIKE), []
    for group in sorted({each.stem for each in (*asked.glob("*.json"), *base.glob("*.json"))} - {Path(VERSIONS).stem}):
        had, kept, new = (_read(each / f"{group}.json") for each in (base, folder, asked))
        same = alike.setdefault(group, {})
        for name, entry in new.items():
            kept.pop(name, None)
            same.pop(name, None)
            if had.get(name) == entry:
                same[name] = entry["question"]
            else:
                kept[name] = entry
        unasked += [name for name in had if name not in kept and same.get(name) != had[name]["question"]]
        if kept:
            (folder / f"{group}.json").write_text(_text(kept))
        else:
            (folder / f"{group}.json").unlink(missing_ok=True)
    (folder / ALIKE).write_text(_text({group: same for group, same in alike.items() if same}))
    return unasked


def _read(file: Path) -> Any:
    return json.loads(file.read_text()) if file.exists() else {}


class Record:
    """Asks real torch, or reads what it has answered. The folder is written where the mode says so only."""

    def __init__(self, folder: Path, mode: Mode, day: int) -> None:
        self._folder = folder
        self._mode = mode
        self._day = day
        self._groups: dict[str, dict[str, Any]] = {}
        if mode is Mode.WRITE:
            assert (socket.gethostname(), socket.getfqdn()) == (HOST, FULL_NAME), "`make record` sees to that"
            (folder / VERSIONS).write_text(_text(versions()))

    def of(self) -> dict[str, str]:
        """The versions that it was recorded with."""
        found: dict[str, str] = json.loads((self._folder / VERSIONS).read_text())
        return found

    def stale(self) -> str:
        """Why nothing in it is of use here, as a sentence; empty if it is."""
        recorded, here = self.of()["torch"], versions()["torch"]
        if recorded == here:
            return ""
        return f"{self._folder} holds the answers of torch {recorded}, but torch {here} is installed: run `make record`"

    def _newer(self) -> list[Path]:
        """The folders of newer versions, the newest first."""
        found = [each for each in self._folder.iterdir() if (each / VERSIONS).exists()]
        return sorted(found, key=lambda each: _number(each.name), reverse=True)

    def _of_a_newer_torch(self, group: str, name: str, question: object) -> list[Any]:
        """The answer that a newer torch than the installed one has given, if it is recorded as another one."""
        for folder in self._newer():
            entry = Record(folder, Mode.RECORDED, self._day)._entries(group).get(name)
            if entry is not None:
                assert entry["question"] == _digest(question), (
                    f"{name!r} has changed since torch {folder.name} answered it"
                )
                return [_with_names(entry["answer"], _restored())]
        return []

    def at_rest(self) -> Record:
        """The same for another test of the same questions, which today's tenth is not asked again for."""
        return self if self._mode is not Mode.DAILY else Record(self._folder, Mode.RECORDED, self._day)

    def answer(
        self,
        group: str,
        name: str,
        question: object,
        ask: Callable[[], object],
        depends: From = From.TORCH,
        since: str = "",
    ) -> Any:
        """The answer of torch, live or recorded; that of a newer torch than the installed one where that differs.

        `question` is plain JSON: when it changes, the recorded answer is that of another question. `ask` starts torch.
        A torch older than `since` has no answer.
        """
        newer = [] if self._mode is Mode.WRITE else self._of_a_newer_torch(group, name, question)
        if _number(versions()["torch"]) < _number(since):
            assert newer, f"{name!r} is a question for torch {since} or newer: run `make record WITH=PYTHON` with one"
            return newer[0]
        own = self._own_answer(group, name, question, ask, depends)
        return newer[0] if newer else own

    def _own_answer(self, group: str, name: str, question: object, ask: Callable[[], object], depends: From) -> Any:
        if depends is From.MACHINE:
            return _plain(ask())
        if self._mode is Mode.WRITE:
            return self._written(group, name, question, ask())
        if self.stale() or (depends is From.PYTHON and not self._same_python()):
            return _plain(ask())
        entry = self._entries(group).get(name)
        assert entry is not None, f"no answer to {name!r} is recorded in {self._file(group)}: run `make record`"
        changed = f"{name!r} has changed since its answer was recorded in {self._file(group)}: run `make record`"
        assert entry["question"] == _digest(question), changed
        recorded = _with_names(entry["answer"], _restored())
        if self._mode is Mode.LIVE or (self._mode is Mode.DAILY and is_turn(group, name, self._day)):
            live = _plain(ask())
            assert live == recorded, f"torch answers {name!r} not as in {self._file(group)}: run `make record`"
        return recorded

    def _same_python(self) -> bool:
        recorded, here = (each["python"].split(".")[:2] for each in (self.of(), versions()))
        return recorded == here

    def _file(self, group: str) -> Path:
        return self._folder / f"{group}.json"

    def _entries(self, group: str) -> dict[str, Any]:
        if group not in self._groups:
            file = self._file(group)
            self._groups[group] = json.loads(file.read_text()) if file.exists() else {}
        return self._groups[group]

    def _written(self, group: str, name: str, question: object, answer: object) -> Any:
        plain = _plain(answer)
        with _locked(self._folder):  # other processes of the same test run write too
            file = self._file(group)
            entries = json.loads(file.read_text()) if file.exists() else {}
            entries[name] = {"answer": _with_names(plain, _common()), "question": _digest(question)}
            file.write_text(_text(entries))
        return plain


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    fd = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _text(value: object) -> str:
    return json.dumps(value, indent=1, sort_keys=True) + "\n"


def _plain(value: object) -> Any:
    return json.loads(json.dumps(value))


def _digest(question: object) -> str:
    text = json.dumps(_with_names(_plain(question), _common()), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _common() -> dict[str, str]:
    """This machine's names by those that the record has for them; what contains another comes first."""
    where = {str(Path(sys.executable).parent): "<bin>", str(Path(__file__).parents[2]): "<repository>"}
    recording = socket.gethostname() == HOST
    return {**where, **({FULL_NAME: "<full host name>", HOST: "<host name>"} if recording else {})}


def _restored() -> dict[str, str]:
    here = {common: own for own, common in _common().items()}
    return {**here, "<full host name>": socket.getfqdn(), "<host name>": socket.gethostname()}


def _with_names(value: Any, names: dict[str, str]) -> Any:
    """The same value, with other names in all its texts."""
    if isinstance(value, list):
        return [_with_names(each, names) for each in value]
    if isinstance(value, dict):
        return {_with_names(key, names): _with_names(each, names) for key, each in value.items()}
    if not isinstance(value, str):
        return value
    for old, new in names.items():
        value = value.replace(old, new)
    return value
