"""`Round.agree`, with workers as threads and a group that passes objects on, in place of torch's."""

from __future__ import annotations

import copy
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest

from rallypoint.base.errors import UserError
from rallypoint.inprocess import Round, agreement


class Part:
    """An object with a state, like a module of torch."""

    def __init__(self, value: object) -> None:
        self.value = value

    def state_dict(self) -> object:
        return copy.deepcopy(self.value)

    def load_state_dict(self, state: object) -> None:
        self.value = state


class Groups:
    """Collectives of workers that are threads, with their ranks in `local`."""

    def __init__(self, size: int) -> None:
        self._barrier, self._objects = threading.Barrier(size), [None] * size
        self.local, self.size = threading.local(), size
        self.broadcasts = 0

    def is_initialized(self) -> bool:
        return True

    def get_world_size(self) -> int:
        return self.size

    def get_rank(self) -> int:
        return int(self.local.rank)

    def all_gather_object(self, found: list[Any], own: Any) -> None:
        self._objects[self.get_rank()] = own
        self._barrier.wait(30)
        found[:] = self._objects
        self._barrier.wait(30)

    def broadcast_object_list(self, sent: list[Any], source: int) -> None:
        if self.get_rank() == source:
            self._objects[source] = sent[0]
            self.broadcasts += 1
        self._barrier.wait(30)
        sent[0] = copy.deepcopy(self._objects[source])
        self._barrier.wait(30)


def agreed(
    monkeypatch: pytest.MonkeyPatch, steps: list[int | None], state: Callable[[int], Any]
) -> tuple[list[int | None], list[dict[str, Any]], list[Any], Groups]:
    """The result, the memory and the state of each worker."""
    groups = Groups(len(steps))
    monkeypatch.setattr(agreement, "c10d", lambda: groups)
    memories = [{} if step is None else {"step": step} for step in steps]
    states, results = [state(rank) for rank in range(len(steps))], list[int | None]([None] * len(steps))

    def work(rank: int) -> None:
        groups.local.rank = rank
        results[rank] = Round(False, memories[rank], 0).agree(states[rank])

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(len(steps))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results, memories, states, groups


def test_workers_behind_get_the_latest_state(monkeypatch: pytest.MonkeyPatch) -> None:
    results, memories, states, groups = agreed(
        monkeypatch, [4, None, 5, 5], lambda rank: {"model": Part([rank]), "optimizer": Part({"rank": rank})}
    )
    assert results == [5] * 4
    assert memories == [{"step": 5}] * 4
    assert [state["model"].value for state in states] == [[2], [2], [2], [3]]
    assert [state["optimizer"].value["rank"] for state in states] == [2, 2, 2, 3]
    assert groups.broadcasts == 1


@pytest.mark.parametrize("step", [7, None])
def test_nothing_is_sent_at_the_same_step(monkeypatch: pytest.MonkeyPatch, step: int | None) -> None:
    results, _, states, groups = agreed(monkeypatch, [step, step], Part)
    assert (results, [state.value for state in states], groups.broadcasts) == ([step, step], [0, 1], 0)


def test_sharded_states_are_kept_only_at_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert agreed(monkeypatch, [3, 3], lambda _: None)[0] == [3, 3]
    cases: list[list[int | None]] = [[3, 4], [3, None]]
    for steps in cases:
        results, memories, _, _ = agreed(monkeypatch, steps, lambda _: None)
        assert (results, memories) == ([None, None], [{}, {}])


def test_attributes_of_a_state_are_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A module's state has the versions of its parts in `_metadata`, by which newer ones migrate it."""

    class State(OrderedDict[str, object]):
        _metadata: dict[str, int]

    def part(rank: int) -> Part:
        state = State(weight=rank, inner=OrderedDict(bias=[rank]))
        state._metadata = {"version": 2}
        return Part(state)

    _, _, states, _ = agreed(monkeypatch, [5, 4], part)
    received = states[1].value
    assert (received, type(received), received._metadata) == (states[0].value, State, {"version": 2})


def test_without_a_group(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"there are 2 workers; call .*init_process_group"):
        Round(False, {"step": 85}, 0).agree(Part(1))
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert Round(False, {"step": 3}, 0).agree(Part(1)) == 3
    assert Round(False, {}, 0).agree(Part(1)) is None
