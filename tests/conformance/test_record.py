"""The record of torch's answers matches the installed torch, and a stale record fails."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.conformance.record import FOLDER, VERSIONS, From, Mode, Record, is_turn, keep_what_differs, versions

DAY = next(day for day in range(10) if is_turn("group", "name", day))
ANOTHER = DAY + 1


def never() -> object:
    raise AssertionError("torch was asked")


class Torch:
    """Counts how often it is asked, and answers what it is to answer."""

    def __init__(self, says: object) -> None:
        self.says = says
        self.asked = 0

    def __call__(self) -> object:
        self.asked += 1
        return self.says


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A record of one answer, written where the machine has the name that it must have for that."""
    with monkeypatch.context() as patch:
        for name, text in (("gethostname", "torchs-recorder"), ("getfqdn", "torchs-recorder.invalid")):
            patch.setattr(f"socket.{name}", lambda text=text: text)
        answer = Record(tmp_path, Mode.WRITE, DAY).answer("group", "name", ["question", 1], Torch([1, "text"]))
    assert answer == [1, "text"]
    yield tmp_path
    assert sorted(each.name for each in tmp_path.iterdir()) == ["group.json", VERSIONS]


def test_the_record_is_of_the_torch_that_is_installed() -> None:
    record = Record(FOLDER, Mode.DAILY, 0)
    assert not record.stale(), record.stale()
    assert record.of().keys() == versions().keys()


def test_it_is_written_on_a_machine_of_its_own_name_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("socket.gethostname", lambda: "another")  # this also runs where the record is written
    with pytest.raises(AssertionError, match="make record"):
        Record(tmp_path, Mode.WRITE, 0)


def test_every_question_has_one_day_in_ten() -> None:
    for name in map(str, range(200)):
        assert sum(is_turn("group", name, day) for day in range(737_000, 737_010)) == 1
    assert 10 < sum(is_turn("group", str(number), 0) for number in range(200)) < 30


def test_torch_is_asked_on_the_day_of_the_question_and_otherwise_read(folder: Path) -> None:
    torch = Torch([1, "text"])
    assert Record(folder, Mode.RECORDED, DAY).answer("group", "name", ["question", 1], never) == torch.says
    assert Record(folder, Mode.DAILY, ANOTHER).answer("group", "name", ["question", 1], never) == torch.says
    assert Record(folder, Mode.DAILY, DAY).answer("group", "name", ["question", 1], torch) == torch.says
    assert Record(folder, Mode.LIVE, ANOTHER).answer("group", "name", ["question", 1], torch) == torch.says
    assert torch.asked == 2


def test_another_live_answer_than_the_recorded_one_is_told(folder: Path) -> None:
    with pytest.raises(AssertionError, match=r"torch answers 'name' not as in .*group\.json: run `make record`"):
        Record(folder, Mode.LIVE, ANOTHER).answer("group", "name", ["question", 1], Torch([2, "text"]))


def test_another_question_than_the_recorded_one_is_told(folder: Path) -> None:
    with pytest.raises(AssertionError, match=r"'name' has changed since .*: run `make record`"):
        Record(folder, Mode.DAILY, ANOTHER).answer("group", "name", ["question", 2], never)
    with pytest.raises(AssertionError, match=r"no answer to 'other' is recorded .*: run `make record`"):
        Record(folder, Mode.DAILY, ANOTHER).answer("group", "other", ["question", 1], never)


def test_a_record_of_another_torch_is_told_and_not_used(folder: Path) -> None:
    (folder / VERSIONS).write_text(json.dumps({**versions(), "torch": "2.12.0"}))
    record = Record(folder, Mode.DAILY, ANOTHER)
    assert "torch 2.12.0, but torch 2.13" in record.stale()
    assert record.answer("group", "name", ["question", 1], Torch("live")) == "live"


def test_what_depends_on_python_is_asked_under_another_one(folder: Path) -> None:
    record = Record(folder, Mode.DAILY, ANOTHER)
    assert record.answer("group", "name", ["question", 1], never, From.PYTHON) == [1, "text"]
    (folder / VERSIONS).write_text(json.dumps({**versions(), "python": "3.2.1"}))
    assert record.answer("group", "name", ["question", 1], Torch("live"), From.PYTHON) == "live"
    assert record.answer("group", "name", ["question", 1], never) == [1, "text"]


def test_what_depends_on_the_machine_is_always_asked(folder: Path) -> None:
    for mode in (Mode.RECORDED, Mode.DAILY, Mode.LIVE):
        assert Record(folder, mode, ANOTHER).answer("group", "cpus", [], Torch(2), From.MACHINE) == 2


def test_names_of_this_machine_are_not_recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.conformance import record as module

    monkeypatch.setattr(module, "_common", lambda: {"torchs-recorder": "<host name>", "/opt/bin": "<bin>"})
    monkeypatch.setattr(module, "_restored", lambda: {"<host name>": "elsewhere", "<bin>": "/usr/bin"})
    monkeypatch.setattr("socket.gethostname", lambda: "torchs-recorder")
    monkeypatch.setattr("socket.getfqdn", lambda: "torchs-recorder.invalid")
    Record(tmp_path, Mode.WRITE, DAY).answer("group", "name", "/opt/bin/x", Torch({"/opt/bin/a": ["torchs-recorder"]}))
    assert "torchs-recorder" not in (tmp_path / "group.json").read_text()
    read = Record(tmp_path, Mode.DAILY, ANOTHER).answer("group", "name", "/opt/bin/x", never)
    assert read == {"/usr/bin/a": ["elsewhere"]}


@pytest.fixture
def newer(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same record beside that of a newer torch, which answers this question in another way, and one more."""
    asked = tmp_path_factory.mktemp("asked")
    entries = json.loads((folder / "group.json").read_text())
    alike = {**entries["name"], "question": "0" * 16}
    (folder / "group.json").write_text(json.dumps({**entries, "alike": alike}))
    entries["name"]["answer"] = [3]
    (asked / "group.json").write_text(json.dumps({**entries, "alike": alike, "since": entries["name"]}))
    (asked / VERSIONS).write_text(json.dumps({**versions(), "torch": "9.1.0"}))
    before = (folder / "group.json").read_text()
    assert keep_what_differs(asked, folder) == []
    assert (folder / "group.json").read_text() == before
    return folder


def test_what_a_newer_torch_answers_in_another_way_is_what_ours_is_compared_with(newer: Path) -> None:
    assert json.loads((newer / "9.1.0/group.json").read_text()).keys() == {"name", "since"}
    torch = Torch([1, "text"])
    assert Record(newer, Mode.RECORDED, DAY).answer("group", "name", ["question", 1], never) == [3]
    assert Record(newer, Mode.LIVE, DAY).answer("group", "name", ["question", 1], torch) == [3]
    assert torch.asked == 1, "the installed one is still compared with its own record"
    with pytest.raises(AssertionError, match=r"'name' has changed since torch 9\.1\.0 answered it"):
        Record(newer, Mode.RECORDED, DAY).answer("group", "name", ["question", 2], never)
    shutil.rmtree(newer / "9.1.0")


def test_a_question_for_a_newer_torch_is_not_asked_of_an_older_one(newer: Path) -> None:
    record = Record(newer, Mode.LIVE, DAY)
    assert record.answer("group", "since", ["question", 1], never, since="9.1") == [3]
    with pytest.raises(AssertionError, match=r"'other' is a question for torch 9\.2 or newer: run `make record WITH="):
        record.answer("group", "other", ["question", 1], never, since="9.2")
    shutil.rmtree(newer / "9.1.0")


def test_what_a_newer_torch_was_not_asked_is_named(newer: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    answers = json.loads((newer / "group.json").read_text())
    (newer / "group.json").write_text(json.dumps(answers | {"another": answers["name"]}))
    asked = tmp_path_factory.mktemp("nothing")
    (asked / VERSIONS).write_text((newer / "9.1.0" / VERSIONS).read_text())
    assert keep_what_differs(asked, newer) == ["another"]
    shutil.rmtree(newer / "9.1.0")


def test_an_answer_that_is_no_longer_another_one_goes(newer: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    asked = tmp_path_factory.mktemp("again")
    (asked / "group.json").write_text((newer / "group.json").read_text())
    (asked / VERSIONS).write_text((newer / "9.1.0" / VERSIONS).read_text())
    keep_what_differs(asked, newer)
    assert json.loads((newer / "9.1.0/group.json").read_text()).keys() == {"since"}
    shutil.rmtree(newer / "9.1.0")
