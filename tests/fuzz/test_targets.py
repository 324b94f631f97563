"""A few seconds of `make fuzz`: each target over its corpus, its valid inputs, and mutations."""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

import rallypoint
from tests.effort import examples
from tests.fuzz.store import CannotFuzzError, build, run, seeds
from tests.fuzz.table import TARGETS, TRUSTED
from tests.fuzz.target import CORPUS, BrokenError, Target, run_bounded, run_many, valid_inputs

SEED = int(os.environ.get("FUZZ_SEED") or 0)
PACKAGE = Path(next(iter(rallypoint.__path__)))


@pytest.mark.parametrize("name", TARGETS)
def test_no_input_breaks(name: str) -> None:
    """What breaks is told with the input and the seed."""
    target = TARGETS[name]
    valid = len(valid_inputs(name, target))
    assert run_many(name, target, SEED, valid + examples(target.executions), seconds=90) >= valid, (
        "the machine is too slow"
    )


_DECODING = re.compile(
    r"json\.loads?\(|\bDecoder\(|marshal\.load|pickle\.load|Unpickler\(|\bunpack(_from)?\(|from_bytes\(|\.decode\(|b64decode\("
)


@pytest.mark.parametrize("name", ["evidence", "remote-messages"])
def test_what_is_nested_too_deeply_to_decode_is_refused(name: str) -> None:
    TARGETS[name].run(b'{"unknown":' + b"[" * 100_000)


def test_each_file_that_decodes_is_fuzzed_or_trusted_for_a_reason() -> None:
    decoding = {
        str(path.relative_to(PACKAGE))
        for path in PACKAGE.rglob("*.py")
        if any(_DECODING.search(line) for line in path.read_text().splitlines())
    }
    fuzzed = {each for target in TARGETS.values() for each in target.reads}
    assert not [each for each in fuzzed if not (PACKAGE / each).exists()]
    assert not sorted(TRUSTED.keys() - decoding), "these decode nothing any more"
    assert not fuzzed & set(TRUSTED)
    missing = sorted(each for each in decoding - fuzzed - set(TRUSTED))
    assert not missing, f"give each a target, or a reason in table.TRUSTED: {missing}"


def test_the_corpus_is_small_and_of_targets_that_there_are() -> None:
    files = list(CORPUS.iterdir())
    assert {path.name for path in files} <= {f"{name}.txt" for name in TARGETS}
    assert sum(path.stat().st_size for path in files) < 300_000


def test_what_breaks_is_told_with_its_input() -> None:
    def run(data: bytes) -> None:
        if data[:1] == b"x":
            raise KeyError("oh")
        if data[:1] == b"m":
            bytearray(64 * 1024 * 1024)

    target = Target(run, lambda: [b"a"], ())
    run_bounded("it", target, "an input", b"a", measure=True)
    with pytest.raises(BrokenError, match=r"it is broken by an input: KeyError: 'oh'\nkeep it: echo NAME eA== >> "):
        run_bounded("it", target, "an input", b"x", measure=False)
    with pytest.raises(BrokenError, match=r"AssertionError: it took 67\d+ bytes"):
        run_bounded("it", target, "an input", b"m", measure=True)


# Some seconds of what `make fuzz` does for longer


@pytest.mark.process
def test_arbitrary_clients_do_not_break_the_store_in_c(tmp_path: Path) -> None:
    try:
        build(tmp_path / "fuzzer")
    except CannotFuzzError as error:
        pytest.skip(str(error))
    seeds(tmp_path / "corpus")
    executed, end = 0, time.monotonic() + 120
    while executed <= 100 and time.monotonic() < end:  # once, but on a machine that lets the fuzzer wait
        executed += run(tmp_path / "fuzzer", tmp_path / "corpus", 5)
    assert executed > 100
