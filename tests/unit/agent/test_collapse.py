"""Equal lines of several ranks show once; no line is lost, and each rank's lines stay in order."""

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


def shown(groups: LineGroups, wrote: Sequence[tuple[int, bytes, float]]) -> list[tuple[float, Group]]:
    out, now = [], 0.0
    for rank, text, later in wrote:
        now += later
        out += [(now, each) for each in groups.due(now)]
        groups.add(rank, text, now)
        out += [(now, each) for each in groups.due(now)]
    return out + [(now, each) for each in groups.flush()]


@given(steps)
def test_no_line_is_lost_and_no_order_changes_within_a_rank(wrote: list[tuple[int, bytes, float]]) -> None:
    groups = LineGroups(SECONDS, RANKS)
    out = shown(groups, wrote)
    for rank in range(RANKS):
        came = [group.text for _, group in out if rank in group.ranks]
        assert came == [text for each, text, _ in wrote if each == rank]
    assert all(len(set(group.ranks)) == len(group.ranks) for _, group in out)
    assert (groups.waiting, groups.deadline(), groups.flush()) == (0, None, [])


@given(steps)
def test_no_line_waits_longer_than_it_may(wrote: list[tuple[int, bytes, float]]) -> None:
    groups, now = LineGroups(SECONDS, RANKS), 0.0
    for rank, text, later in wrote:
        now += later
        groups.due(now)
        deadline = groups.deadline()
        assert deadline is None or now < deadline <= now + SECONDS
        groups.add(rank, text, now)


def test_what_all_have_written_waits_no_longer() -> None:
    groups = LineGroups(SECONDS, 2)
    groups.add(0, b"epoch 1\n", 0.0)
    assert groups.due(0.0) == []
    groups.add(1, b"epoch 1\n", 0.5)
    assert groups.due(0.5) == [Group(b"epoch 1\n", (0, 1))]


def test_ranks_that_run_ahead_are_joined_line_by_line() -> None:
    groups = LineGroups(SECONDS, 2)
    for text in (b"a\n", b"b\n", b"a\n"):
        groups.add(0, text, 0.0)
    for text in (b"a\n", b"b\n", b"a\n"):
        groups.add(1, text, 1.0)
    assert groups.due(1.0) == [Group(each, (0, 1)) for each in (b"a\n", b"b\n", b"a\n")]


def test_many_lines_do_not_fill_the_memory() -> None:
    groups = LineGroups(3600.0, 2)
    for number in range(5000):
        groups.add(0, b"%d %s\n" % (number, b"x" * 1000), 0.0)
        groups.due(0.0)
    assert groups.waiting < 1_100_000


def collapsed(folder: Path, written: dict[int, bytes]) -> tuple[str, dict[int, bytes]]:
    """What the console shows, and what is in the files."""
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


def test_the_console_shows_equal_lines_once_with_global_ranks(tmp_path: Path) -> None:
    written = {0: b"same\nmine\n", 1: b"same\n", 2: b"same\nunfinished"}
    console, files = collapsed(tmp_path, written)
    assert console == "[8-10]: same\n[default0]:mine\n[default2]:unfinished\n"
    assert files == written


def test_a_very_long_line_is_shown_whole_and_in_its_place(tmp_path: Path) -> None:
    long = b"y" * 300_000 + b"\n"
    console, files = collapsed(tmp_path, {0: b"before\n" + long + b"after\n", 1: b"before\nafter\n"})
    lines = console.splitlines()
    assert f"[default0]:{'y' * 300_000}" in lines
    of_first = [each for each in lines if each.startswith(("[default0]:", "[8-9]:"))]
    assert [each[-5:] for each in of_first][-1] == "after"
    assert sum(each.endswith("before") for each in lines) in {1, 2}
    assert files[0].endswith(long + b"after\n")


def test_lines_of_a_ranks_own_do_not_keep_later_ones_apart() -> None:
    groups = LineGroups(SECONDS, 3)
    for rank in range(3):
        for text in (b"epoch 1\n", b"I am %d\n" % rank, b"epoch 2\n"):
            groups.add(rank, text, float(rank))
    shown = groups.flush()
    assert shown[0] == Group(b"epoch 1\n", (0, 1, 2))
    assert shown[-1] == Group(b"epoch 2\n", (0, 1, 2))
    assert sorted(each.ranks for each in shown[1:-1]) == [(0,), (1,), (2,)]
