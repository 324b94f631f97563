"""Where `RoundEnded` is raised: never between an acquisition and its release, wherever the signal arrives."""

from __future__ import annotations

import contextlib
import multiprocessing
import queue
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

import pytest

from rallypoint.inprocess.interruption import Place, cuts_in_between
from tests.interrupts import interrupt_everywhere


class Switch:
    """Is switched on and off by calls."""

    def __init__(self) -> None:
        self.on = 0
        self.reached = 0

    def set(self, change: int) -> None:
        self.on += change

    def change(self) -> None:
        self.reached += 1

    def acquire(self) -> bool:
        self.set(1)
        self.change()
        return True

    def release(self) -> None:
        self.change()
        self.set(-1)

    def __enter__(self) -> Switch:
        self.change()
        self.set(1)
        self.change()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.change()
        self.set(-1)

    @contextlib.contextmanager
    def generator(self) -> Iterator[None]:
        self.change()
        self.set(1)
        try:
            self.change()
            yield
        finally:
            self.change()
            self.set(-1)


class Guard:
    """Switches when it is made, as `torch.set_grad_enabled` does."""

    def __init__(self, switch: Switch) -> None:
        self.switch = switch
        switch.set(1)

    def __enter__(self) -> None:
        self.switch.change()

    def __exit__(self, *_: object) -> None:
        self.switch.set(-1)


def in_with(switch: Switch) -> None:
    with switch:
        switch.change()
    switch.change()


def in_one_line(switch: Switch) -> None:
    with switch: switch.change()  # noqa: E701 # fmt: skip


def in_several(switch: Switch) -> None:
    with (
        switch,
        Guard(switch),
        switch.generator(),
    ):
        switch.change()


def nested(switch: Switch) -> None:
    for _ in range(2):
        with switch.generator():
            with Guard(switch):
                switch.change()
            if switch.reached:
                continue
        switch.change()


def in_stack(switch: Switch) -> None:
    with contextlib.ExitStack() as stack:
        stack.enter_context(switch)
        stack.enter_context(switch.generator())
        switch.change()


def returned(switch: Switch) -> int:
    with switch:
        try:
            return switch.reached
        finally:
            switch.change()


def paired(switch: Switch) -> None:
    switch.acquire()
    try:
        switch.change()
    finally:
        switch.change()
        switch.release()


def paired_by_other_names(switch: Switch) -> None:
    """Like much of torch's code."""
    switch.change()
    switch.on = before = sum((switch.on, 1))
    try:
        switch.change()
    finally:
        for _ in range(1):
            switch.change()
        switch.on = before - 1


def tried(switch: Switch) -> None:
    if not switch.acquire():
        raise queue.Empty
    try:
        switch.change()
    except LookupError:
        switch.change()
    finally:
        switch.release()


def caught(switch: Switch) -> None:
    with switch:
        try:
            raise LookupError
        except LookupError:
            switch.change()
        switch.change()


def comprehended(switch: Switch) -> None:
    with switch:
        switch.reached = sum([number + len(str(number)) for number in range(3)])


FUNCTIONS = [in_with, in_one_line, in_several, nested, in_stack, returned, paired, paired_by_other_names, tried]
FUNCTIONS += [caught, comprehended]


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda function: function.__name__)
def test_switches_are_switched_back_wherever_the_interruption_comes(function: Callable[[Switch], object]) -> None:
    switches: list[Switch] = []

    def call() -> None:
        switches.append(Switch())
        function(switches[-1])

    def spares(places: list[Place]) -> bool:
        return sys.exc_info()[1] is not None or cuts_in_between(places[:-1])  # without `call`

    bodies = 0
    for place, _ in interrupt_everywhere(call, spares):
        if switches:
            assert switches[-1].on == 0, place
            bodies += switches[-1].reached > 0
    assert bodies, "the bodies are interrupted"
    switches.clear()
    left_on = [bool(switches) and switches[-1].on != 0 for _ in interrupt_everywhere(call)]
    assert any(left_on), "without `spares`"


LOCKS = [threading.Lock, threading.RLock, threading.Condition, multiprocessing.Lock]


@pytest.mark.parametrize("kind", LOCKS, ids=["lock", "rlock", "condition", "process_lock"])
def test_no_lock_is_left_held(kind: Callable[[], threading.Lock]) -> None:
    lock = kind()
    done: list[int] = []

    def call() -> None:
        with lock:
            done.append(1)
        if not lock.acquire(timeout=5):
            raise TimeoutError
        try:
            done.append(2)
        finally:
            lock.release()

    def is_free() -> bool:
        if free := lock.acquire(timeout=0.01):
            lock.release()
        return free

    def spares(places: list[Place]) -> bool:
        return sys.exc_info()[1] is not None or cuts_in_between(places)

    with ThreadPoolExecutor(1) as another_thread:
        for place, _ in interrupt_everywhere(call, spares):
            assert another_thread.submit(is_free).result(), place
