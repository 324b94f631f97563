"""The store in C under libFuzzer: a build with sanitizers, initial inputs, and a run of some time."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import build_native

from tests import typed_requests as wire

HARNESS = Path(__file__).resolve().parent / "native" / "fuzz_store.c"

_FLAGS = [
    *("-std=c11", "-O1", "-g", "-Wall", "-Wextra", "-Werror"),
    *("-fsanitize=fuzzer,address,undefined", "-fno-sanitize-recover=undefined"),
    *("-DSTORE_MEMORY_FAILS=store_memory_fails", "-DSTORE_SLICE=4"),
]


class CannotFuzzError(Exception):
    """There is nothing to build it with; the text says what is missing."""


def build(target: Path) -> None:
    """Build the fuzzer.

    Raises:
        CannotFuzzError: there is no clang, or it has no libFuzzer.
    """
    if shutil.which("clang") is None:
        raise CannotFuzzError("there is no clang; install it with libFuzzer (Debian: clang)")
    probe = target.with_suffix(".c")
    probe.write_text("int LLVMFuzzerTestOneInput(const unsigned char *d, unsigned long n) { return !d || !n; }\n")
    if subprocess.run(["clang", *_FLAGS, probe, "-o", target], check=False, capture_output=True).returncode:
        raise CannotFuzzError("this clang cannot link libFuzzer; it needs libclang-rt-14-dev or newer")
    sources = [path for path in sorted(build_native.SOURCES.glob("*.c")) if path.name != "module.c"]
    subprocess.run(["clang", *_FLAGS, f"-I{build_native.SOURCES}", *sources, HARNESS, "-o", target], check=True)


def seeds(folder: Path) -> None:
    """Write an input for each kind of request: a client sends it, another sets a key, replies are read, memory ends."""
    folder.mkdir(parents=True, exist_ok=True)
    requests: list[wire.Request] = [
        *(wire.Set(b"a", b"7"), wire.CompareSet(b"a", b"", b"b"), wire.Get(b"a"), wire.Add(b"a", 1), wire.NumKeys()),
        *(wire.Check([b"a", b"b"]), wire.Wait([b"a", b"b"]), wire.DeleteKey(b"a"), wire.Append(b"a", bytes(200))),
        *(wire.MultiGet([b"a"] * 9), wire.MultiSet([(b"a", b"1"), (b"b", b"2")]), wire.CancelWait(), wire.Ping(1)),
        *(wire.QueuePush(b"a", b"x"), wire.QueuePop(b"a"), wire.QueueLen(b"a"), wire.ListKeys(), wire.Barrier(b"a", 2)),
    ]
    for number, request in enumerate(requests):
        data = wire.encode(request)[:255]
        other = wire.encode(wire.Set(b"a", b"5"))
        sent = bytes([1, len(data)]) + data + bytes([2, len(other)]) + other + bytes([1, len(data)]) + data
        (folder / f"seed-{number}").write_bytes(sent + bytes([41, 9, 53, 5]) + bytes([3, len(data)]) + data + sent)
    wait, change = wire.encode(wire.Wait([b"a"])), wire.encode(wire.Set(b"a", b"55"))
    assert len(change) % 4 == 0, "after which the harness lets the store have one turn"
    herd = [(1, wait), (2, wait), (3, wait), (3, change), (2, wire.encode(wire.Get(b"a")))]
    (folder / "seed-herd").write_bytes(b"".join(bytes([client, len(data)]) + data for client, data in herd))


def run(fuzzer: Path, corpus: Path, seconds: int) -> int:
    """Fuzz for so many seconds; what is new goes to the corpus.

    Returns:
        How many inputs were run.

    Raises:
        AssertionError: one of them broke the store; the text is what the sanitizer says.
    """
    command = [str(fuzzer), f"-max_total_time={seconds}", "-max_len=4096", "-timeout=60", "-print_final_stats=1"]
    command.append(f"-artifact_prefix={corpus.parent}/")
    ran = subprocess.run([*command, str(corpus)], check=False, capture_output=True, text=True, errors="replace")
    assert ran.returncode == 0, ran.stderr[-8000:]
    (count,) = re.findall(r"stat::number_of_executed_units:\s+(\d+)", ran.stderr)
    return int(count)
