"""A target of fuzzing: a function that takes any bytes and raises nothing. `table` lists them."""

from __future__ import annotations

import base64
import logging
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from random import Random
from typing import NamedTuple

_NUMBERS = (0, 1, 2, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
_WORDS = (
    *(b"\x00", b"\xc0", b"\xc2", b"\xc3", b"\xcb\x7f\xf0\0\0\0\0\0\0", b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\x90", b"\xa0"),
    *(b"1e999", b"-1", b"NaN", b"Infinity", b"null", b"{}", b"[]", b'""', b"\\ud800", b"\xed\xa0\x80", b"\x1b[31m"),
    *(b"9" * 20, b"9" * 5000, b"[" * 2000, b'{"a":' * 2000, b"\n", b"\r\n", b" ", b",", b"=", b":", b"--", b"%"),
)
"""What decoders stumble over: MessagePack's and JSON's edges, depths, texts that are none, what parts other things."""


def mutated(random: Random, valid: Sequence[bytes]) -> bytes:
    """One of the valid inputs with some damage, at most 4,096 bytes of it."""
    data = bytearray(random.choice(valid))
    for _ in range(random.choice((0, 1, 1, 1, 2, 3, 6))):
        at, end = sorted((random.randrange(len(data) + 1), random.randrange(len(data) + 1)))
        match random.randrange(8):
            case 0 if data:
                data[at % len(data)] ^= 1 << random.randrange(8)
            case 1 if data:
                data[at % len(data)] = random.randrange(256)
            case 2:
                del data[at : min(end, at + 16)]
            case 3:
                data[at:at] = data[at : min(end, at + 64)]
            case 4:
                data[at:at] = random.choice(_WORDS)
            case 5:
                width = random.choice((1, 2, 4, 8))
                number = random.choice(_NUMBERS) & ((1 << 8 * width) - 1)
                data[at : at + width] = number.to_bytes(width, random.choice(("little", "big")))
            case 6:
                other = random.choice(valid)
                start = random.randrange(len(other) + 1)
                data[at:end] = other[start : start + 256]
            case _:
                data[at:at] = random.randbytes(random.randrange(9))
    return bytes(data[:4096])


CORPUS = Path(__file__).resolve().parent / "corpus"
"""Inputs that are kept, a file for each target and a line for each input, its name and its bytes in base64: those that
have broken something, and some that the fuzzers have found, by which they know their way."""

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
    executions: int = 6000


class Errors(logging.Handler):
    """What is logged as an error: nothing that others say is one of ours."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.seen: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        """Note it, with the exception; but not what the collector finds, which may be another test's."""
        if "was destroyed but it is pending" not in record.getMessage():
            self.seen.append(logging.Formatter().format(record))


@contextmanager
def no_errors() -> Iterator[None]:
    """Fails if anything of Rallypoint, or its loop, logs an error; says nothing of what intruders may cause."""
    handler, loggers = Errors(), [logging.getLogger(name) for name in ("rallypoint", "asyncio")]
    before = [(each.propagate, each.level) for each in loggers]
    for each in loggers:
        each.addHandler(handler)
        each.propagate = False
        each.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for each, (propagate, level) in zip(loggers, before, strict=True):
            each.removeHandler(handler)
            each.propagate = propagate
            each.setLevel(level)
    assert not handler.seen, handler.seen[0]


class BrokenError(AssertionError):
    """An input has broken a target; the text says how to see it again."""


def kept(name: str) -> dict[str, bytes]:
    """The corpus of a target, by the names of its inputs."""
    file = CORPUS / f"{name}.txt"
    lines = file.read_text().splitlines() if file.exists() else []
    parts = (line.partition(" ") for line in lines)
    return {what: base64.b64decode(data, validate=True) for what, _, data in parts}


def valid_inputs(name: str, target: Target) -> dict[str, bytes]:
    """What there is to begin with."""
    return kept(name) | {f"valid-{number}": data for number, data in enumerate(target.seeds())}


def inputs(name: str, target: Target, seed: int) -> Iterator[tuple[str, bytes]]:
    """What to run, and what it is called: what there is to begin with, then mutations of it without an end."""
    valid = valid_inputs(name, target)
    yield from valid.items()
    random = Random(f"{name} {seed}")
    for number in count(1):
        yield f"input {number} of seed {seed}", mutated(random, list(valid.values()))


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
            f"keep it: echo NAME {text} >> tests/fuzz/corpus/{name}.txt"
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
    for number, (what, data) in enumerate(inputs(name, target, seed)):
        if number >= executions or time.monotonic() > end:
            return number
        run_bounded(name, target, what, data, measure=number % _MEASURED == 0)
    raise AssertionError("there are always more")
