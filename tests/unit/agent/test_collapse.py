"""Equal lines of several ranks are shown once; no line is lost, and each rank's lines stay in order."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from rallypoint.features.collapse.merging import CollapsingSink, Group, LineGroups
from rallypoint.workers.logs.specs import LogsDest
from tests.unit.logs.opened import Outputs

RANKS = 4
SECONDS = 2.0

steps = st.lists(
    st.tuples(
        st.integers(0, RANKS - 1),
        st.sampled_from([b"a\n", b"b\n", b"c\n", b"\n"]),
        st.sampled_from([0.0, 0.1, 1.0, 3.0]),
    ),
    max_size=60,
)


def shown_groups(groups: LineGroups, wrote: Sequence[tuple[int, bytes, float]]) -> list[tuple[float, Group]]:
    out, now = [], 0.0
    for rank, text, later in wrote:
        now += later
        out += [(now, group) for group in groups.due(now)]
        groups.add(rank, text, now)
        out += [(now, group) for group in groups.due(now)]
    return out + [(now, group) for group in groups.flush()]


@given(steps)
def test_no_line_is_lost_or_reordered_within_a_rank(wrote: list[tuple[int, bytes, float]]) -> None:
    groups = LineGroups(SECONDS, RANKS)
    out = shown_groups(groups, wrote)
    for rank in range(RANKS):
        came = [group.text for _, group in out if rank in group.ranks]
        assert came == [text for writer, text, _ in wrote if writer == rank]
    assert all(len(set(group.ranks)) == len(group.ranks) for _, group in out)
    assert (groups.waiting, groups.deadline(), groups.flush()) == (0, None, [])


@given(steps)
def test_lines_wait_no_longer_than_the_limit(wrote: list[tuple[int, bytes, float]]) -> None:
    groups, now = LineGroups(SECONDS, RANKS), 0.0
    for rank, text, later in wrote:
        now += later
        groups.due(now)
        deadline = groups.deadline()
        assert deadline is None or now < deadline <= now + SECONDS
        groups.add(rank, text, now)


def test_lines_that_all_ranks_wrote_are_joined_at_once() -> None:
    groups, lines = LineGroups(SECONDS, 2), (b"a\n", b"b\n", b"a\n")
    for line in lines:
        groups.add(0, line, 0.0)
    assert groups.due(0.0) == []
    for line in lines:
        groups.add(1, line, 1.0)
    assert groups.due(1.0) == [Group(line, (0, 1)) for line in lines]


def test_lines_of_one_rank_do_not_separate_later_equal_lines() -> None:
    groups = LineGroups(SECONDS, 3)
    for rank in range(3):
        for text in (b"epoch 1\n", b"I am %d\n" % rank, b"epoch 2\n"):
            groups.add(rank, text, float(rank))
    first, *own, last = groups.flush()
    assert (first, last) == (Group(b"epoch 1\n", (0, 1, 2)), Group(b"epoch 2\n", (0, 1, 2)))
    assert sorted(group.ranks for group in own) == [(0,), (1,), (2,)]


def test_memory_is_bounded() -> None:
    groups = LineGroups(3600.0, 2)
    for number in range(5000):
        groups.add(0, b"%d %s\n" % (number, b"x" * 1000), 0.0)
        groups.due(0.0)
    assert groups.waiting < 1_100_000


def collapsed(folder: Path, written: dict[int, bytes]) -> tuple[str, dict[int, bytes]]:
    """The text on the console and in the files."""
    paths = {rank: str(folder / f"{rank}.log") for rank in written}
    console = os.open(folder / "console", os.O_CREAT | os.O_RDWR)
    prefixes = {rank: f"[default{rank}]:" for rank in written}
    ranks = {rank: rank + 8 for rank in written}
    dest = LogsDest(stdouts=paths, stderrs=dict.fromkeys(paths, os.devnull), tee_stdouts=paths)
    outputs = Outputs(
        dest, range(len(written)), prefixes, console, console, merges=partial(CollapsingSink, 60.0), global_ranks=ranks
    )
    try:
        for rank, data in written.items():
            out, _ = outputs.of[rank].worker_ends
            assert out is not None
            os.write(out, data)
    finally:
        outputs.close()
        os.close(console)
    return (folder / "console").read_text(), {rank: Path(path).read_bytes() for rank, path in paths.items()}


def test_console_shows_equal_lines_once_with_global_ranks(tmp_path: Path) -> None:
    written = {0: b"same\nmine\n", 1: b"same\n", 2: b"same\nunfinished"}
    console, files = collapsed(tmp_path, written)
    assert console == "[8-10]: same\n[default0]:mine\n[default2]:unfinished\n"
    assert files == written


def test_long_lines_are_shown_whole_and_in_order(tmp_path: Path) -> None:
    long = b"y" * 300_000 + b"\n"
    console, files = collapsed(tmp_path, {0: b"before\n" + long + b"after\n", 1: b"before\nafter\n"})
    lines = console.splitlines()
    assert f"[default0]:{'y' * 300_000}" in lines
    of_first = [line for line in lines if line.startswith(("[default0]:", "[8-9]:"))]
    assert of_first[-1].endswith("after")
    assert sum(line.endswith("before") for line in lines) in {1, 2}
    assert files[0].endswith(long + b"after\n")
