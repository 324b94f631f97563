"""What is fuzzed: a function that takes any bytes, and raises nothing. One table of them is in `table`."""

from __future__ import annotations

import base64
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

from tests.fuzz.mutation import mutated

CORPUS = Path(__file__).resolve().parent / "corpus"
"""Inputs that are kept, by target: those that have broken something, and those by which the fuzzers find their way."""

_SECONDS = 5.0
"""Processor time that one input may take, on a busy machine."""
_MEMORY = 32 * 1024 * 1024
"""Bytes that one input may take."""
_MEASURED = 16
"""Of so many inputs one is looked at for its memory, which costs time."""


class Target(NamedTuple):
    """One decoder, or a whole that decodes.

    `run` swallows what it may raise. `seeds` are valid inputs. `reads` are the files of the package whose decoding of
    foreign bytes it covers. `executions` is how often the test runs it.
    """

    run: Callable[[bytes], None]
    seeds: Callable[[], Sequence[bytes]]
    reads: tuple[str, ...]
    executions: int = 3000


class BrokenError(AssertionError):
    """An input has broken a target; the text says how to see it again."""


def kept(name: str) -> list[tuple[Path, bytes]]:
    """The corpus of a target."""
    return [(path, path.read_bytes()) for path in sorted((CORPUS / name).glob("*"))]


def inputs(name: str, target: Target, seed: int) -> Iterator[tuple[str, bytes]]:
    """What to run, and what it is called: the corpus, the seeds, then mutations without an end."""
    for path, data in kept(name):
        yield f"{path}", data
    seeds = list(target.seeds())
    for number, data in enumerate(seeds):
        yield f"valid input {number}", data
    valid = [*seeds, *(data for _, data in kept(name))]
    random = Random(f"{name} {seed}")
    number = 0
    while True:
        number += 1
        yield f"input {number} of seed {seed}", mutated(random, valid)


def run_bounded(name: str, target: Target, what: str, data: bytes, measure: bool) -> None:
    """Run a target once.

    Raises:
        BrokenError: it raised something, took too long, or too much memory.
    """
    if measure:
        tracemalloc.start()
    began = time.thread_time()
    try:
        target.run(data)
        seconds = time.thread_time() - began
        peak = tracemalloc.get_traced_memory()[1] if measure else 0
        assert seconds < _SECONDS, f"it took {seconds:.1f} s of processor time"
        assert peak < _MEMORY, f"it took {peak} bytes"
    except Exception as error:
        text = base64.b64encode(data).decode()
        raise BrokenError(
            f"{name} is broken by {what}: {type(error).__name__}: {error}\n"
            f"keep it: echo {text} | base64 -d > tests/fuzz/corpus/{name}/NAME"
        ) from error
    finally:
        if measure:
            tracemalloc.stop()


def run_many(name: str, target: Target, seed: int, executions: float, seconds: float) -> int:
    """Run a target until there were so many executions or the time is over. Returns how many there were.

    Raises:
        BrokenError: see `run_bounded`.
    """
    end = time.monotonic() + seconds
    count = 0
    for what, data in inputs(name, target, seed):
        if count >= executions or time.monotonic() > end:
            break
        run_bounded(name, target, what, data, measure=count % _MEASURED == 0)
        count += 1
    return count
