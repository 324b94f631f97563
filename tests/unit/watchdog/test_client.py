"""`expires`, with a client that only records."""

from __future__ import annotations

import time

import pytest

from rallypoint.workers import timers as client
from rallypoint.workers.timers import TimerClient, configure, expires


class Notes(TimerClient):
    def __init__(self) -> None:
        self.lines: list[tuple[str, str]] = []
        self.expiration = 0.0

    def acquire(self, scope_id: str, expiration_time: float) -> None:
        self.lines.append(("acquire", scope_id))
        self.expiration = expiration_time

    def release(self, scope_id: str) -> None:
        self.lines.append(("release", scope_id))


@pytest.fixture(autouse=True)
def _unconfigured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "_configured", None)


def test_a_block_holds_its_timer() -> None:
    notes = Notes()
    configure(notes)
    before = time.time()
    with expires(after=60, scope="mine"):
        assert notes.lines == [("acquire", "mine")]
        assert before + 60 <= notes.expiration <= time.time() + 60
    assert notes.lines == [("acquire", "mine"), ("release", "mine")]


def test_it_lets_go_when_the_block_raises() -> None:
    notes = Notes()
    with pytest.raises(KeyError), expires(60, "mine", notes):
        raise KeyError
    assert notes.lines[-1] == ("release", "mine")


def test_a_timer_without_a_name_has_that_of_its_place() -> None:
    notes = Notes()
    with expires(60, client=notes):
        pass
    with expires(60, client=notes):
        pass
    one, other = notes.lines[0][1], notes.lines[2][1]
    assert one.startswith(f"{__file__}#")
    assert one != other


def test_without_a_client() -> None:
    with pytest.raises(RuntimeError, match="configure"), expires(60):
        pass
