"""Stacks of many ranks in a few lines."""

from __future__ import annotations

from itertools import chain

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.observe.hangs.evidence import WorkerStacks, decode_stacks, encode_stacks
from rallypoint.observe.hangs.messages import (
    Collective,
    EvidenceReader,
    GroupRecord,
    NodeEvidence,
    ProcessEvidence,
    RankEvidence,
    RankRange,
    RankRecord,
    check_evidence,
    decode_evidence,
    deflated,
    encode_evidence,
    inflated,
    ranks_of,
    runs_of,
)
from rallypoint.observe.hangs.report import MAX_LINES, GatheredStacks, groups_of, ranks_text, report_lines
from rallypoint.observe.stacks import Frame, calls_of, main_frames, short_lines, summary_of

PACKAGES = "/opt/env/lib/python3.12/site-packages"
WRAPPER = Frame("_exception_logger.<locals>.wrapper", f"{PACKAGES}/torch/distributed/c10d_logger.py", 83)
ALL_REDUCE = Frame("all_reduce", f"{PACKAGES}/torch/distributed/distributed_c10d.py", 3252)
IN_TRAIN = (ALL_REDUCE, WRAPPER, Frame("<module>", "/home/me/job/train.py", 41))
IN_LOAD = (Frame("load", "/home/me/job/data.py", 12), Frame("<module>", "/home/me/job/train.py", 38))

DUMP = """Process 8328: python -u train.py
Python v3.12.1 (/usr/bin/python3.12)

Thread 8340 (idle): "pin memory"
    wait (/usr/lib/python3.12/threading.py:355)
Thread 8328 (active+gil): "MainThread"
    all_reduce (/opt/env/lib/python3.12/site-packages/torch/distributed/distributed_c10d.py:3252)
    Trainer.step (/home/me/my (old) job/train.py:41)
    <module> (/home/me/my (old) job/train.py:60)
Process 8350: python -c child
Python v3.12.1 (/usr/bin/python3.12)

Thread 8350 (idle): "MainThread"
    other (/home/me/other.py:1)
"""


def lines_of(*ranks: RankEvidence) -> list[str]:
    return [group.line for group in groups_of(ranks)]


def test_equal_ranks_are_one_line_and_a_minority_is_marked() -> None:
    ranks = [RankEvidence(rank, "sleeping", frames=IN_TRAIN) for rank in (0, 2, 1)]
    assert lines_of(*ranks, RankEvidence(3, "sleeping", frames=IN_LOAD)) == [
        "3 ranks (0-2): all_reduce, train.py:41",
        "1 rank (3): load, data.py:12  <- differs",
    ]
    assert lines_of(*(RankEvidence(rank, "", frames=IN_LOAD if rank < 2 else IN_TRAIN) for rank in range(4))) == [
        "2 ranks (0-1): load, data.py:12",
        "2 ranks (2-3): all_reduce, train.py:41",
    ]


def test_states_make_groups_and_lines_of_libraries_do_not() -> None:
    elsewhere = (Frame("all_reduce", ALL_REDUCE.file, 3260), *IN_TRAIN[1:])
    assert lines_of(
        RankEvidence(0, "sleeping", where="futex_do_wait, futex", frames=IN_TRAIN),
        RankEvidence(1, "running", frames=elsewhere),
        RankEvidence(2, "stopped by a signal", frames=IN_TRAIN),
        RankEvidence(3, "ended", 0),
        RankEvidence(4, "in uninterruptible sleep", where="nfs_wait, read", why_none="not permitted"),
    ) == [
        "2 ranks (0-1): all_reduce, train.py:41",
        "1 rank (2): stopped by a signal, all_reduce, train.py:41  <- differs",
        "1 rank (3): ended with exit code 0  <- differs",
        "1 rank (4): in uninterruptible sleep (nfs_wait, read)  <- differs",
    ]


def test_main_frames_of_py_spy() -> None:
    frames = main_frames(DUMP)
    assert [(frame.function, frame.file.rpartition("/")[2], frame.line) for frame in frames] == [
        ("all_reduce", "distributed_c10d.py", 3252),
        ("Trainer.step", "train.py", 41),
        ("<module>", "train.py", 60),
    ]
    assert summary_of(calls_of(frames)) == "all_reduce, train.py:41"
    assert '  Thread "pin memory"' in short_lines(DUMP)
    assert "    wait (threading.py:355)" in short_lines(DUMP)
    assert "    Trainer.step (train.py:41)" in short_lines(DUMP)
    assert main_frames("") == ()


def test_summaries_name_the_call_of_the_users_code() -> None:
    def name(*frames: Frame) -> str:
        return summary_of(calls_of(frames))

    script = Frame("<module>", "/home/me/job/train.py", 9)
    model = Frame("Net.forward", "/home/me/job/nets/net.py", 7)
    next_batch = Frame("_BaseDataLoaderIter.__next__", f"{PACKAGES}/torch/utils/data/dataloader.py", 700)
    get = Frame("Queue.get", "/usr/lib/python3.12/queue.py", 171)
    call = Frame("Module._call_impl", f"{PACKAGES}/torch/nn/modules/module.py", 1500)
    assert name(get, next_batch, script) == "__next__ of dataloader.py, train.py:9"
    assert name(model, call, script) == "forward, nets/net.py:7"
    assert name(call, script) == "<module>, train.py:9"
    sync = Frame("sync", f"{PACKAGES}/torch/x.py", 1)
    assert name(ALL_REDUCE, WRAPPER, call, sync, script) == "all_reduce, train.py:9"
    assert name(get) == "get (queue.py)"
    assert name(Frame("helper", "/srv/shared/lib/tools.py", 3), script) == "helper, lib/tools.py:3"
    load = Frame("_find_and_load", "<frozen importlib._bootstrap>", 3)
    assert name(Frame("f", f"{PACKAGES}/torch/__init__.py", 3), load, script) == "import, train.py:9"


_NAMES = st.text(st.characters(categories=["L", "N", "P", "Zs"]), max_size=30).filter(str.isprintable)
_FRAMES = st.lists(st.builds(Frame, _NAMES, _NAMES, st.integers(0, 10**6)), max_size=5).map(tuple)
_RANKS = st.lists(
    st.builds(
        RankEvidence,
        st.integers(0, 4000),
        _NAMES,
        st.none() | st.integers(-64, 255),
        frames=_FRAMES,
        children=st.lists(st.builds(ProcessEvidence, _NAMES, _NAMES, _FRAMES), max_size=2).map(tuple),
    ),
    max_size=25,
    unique_by=lambda evidence: evidence.rank,
)


@settings(max_examples=25)
@given(_RANKS)
def test_laws_of_groups_and_reports(ranks: list[RankEvidence]) -> None:
    groups = groups_of(ranks)
    assert sorted(chain.from_iterable(group.ranks for group in groups)) == sorted(rank.rank for rank in ranks)
    assert len({group.situation for group in groups}) == len(groups)
    assert groups == groups_of(reversed(ranks))
    most = max((len(group.ranks) for group in groups), default=0)
    assert all(group.differs == (len(group.ranks) < most) for group in groups)
    node = NodeEvidence("n1", tuple(ranks), "/tmp/hang.0.txt")
    assert decode_evidence(encode_evidence(node)) == node
    lines = report_lines([node], ["n2"])
    assert len(lines) <= MAX_LINES
    assert all(line.isprintable() for line in lines)
    assert lines[-1] == "  full evidence: /tmp/hang.0.txt on n1"
    assert "  no evidence from n2" in lines


def test_the_report_of_a_thousand_different_ranks_is_short() -> None:
    ranks = tuple(
        RankEvidence(rank, "sleeping", frames=tuple(Frame(f"f{rank}", "/a/b.py", n + 1) for n in range(30)))
        for rank in range(1000)
    )
    lines = report_lines([NodeEvidence(f"n{at}", ranks[at : at + 8], "/x") for at in range(0, 1000, 8)])
    assert len(lines) <= MAX_LINES
    assert "  984 more ranks in 984 other places" in lines
    assert lines[-1].endswith("and on 121 more nodes")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "truncated"),
        (b"[]", "Expected `object`"),
        (b'{"host":"a\\u001b[2J"}', "unprintable text"),
        (b'{"host":"a","ranks":[{"rank":-1,"state":"x"}]}', ">= 0"),
        (b'{"host":"a","ranks":[{"rank":0,"state":"x","exit_code":1e99}]}', "int"),
        (b'{"host":"a","ranks":[{"rank":0,"state":"x","frames":[["f","a\\u0000.py",1]]}]}', "unprintable text"),
        (b'{"host":"' + b"a" * 301 + b'"}', "<= 300"),
    ],
)
def test_invalid_evidence_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(ValueError, match=why):
        check_evidence(data)
    with pytest.raises(ValueError, match=why):
        EvidenceReader().read(deflated(data))


def test_compressed_data_that_is_not_whole_or_too_large_is_refused() -> None:
    for data, why in ((b"", "incomplete"), (b"no", "incorrect header"), (deflated(b"{}")[:-1], "incomplete")):
        with pytest.raises(ValueError, match=why):
            decode_evidence(data)
    with pytest.raises(ValueError, match="larger than 1000 bytes"):
        inflated(deflated(bytes(1001)), 1000)
    assert inflated(deflated(bytes(1000)), 1000) == bytes(1000)


@given(st.lists(st.integers(0, 200)))
def test_runs_of_ranks(ranks: list[int]) -> None:
    assert ranks_of(runs_of(ranks)) == tuple(sorted(set(ranks)))
    assert runs_of(range(100_000)) == (RankRange(0, 100_000, 1),)
    assert runs_of(range(3, 100_000, 8)) == (RankRange(3, 12_500, 8),), "a group of a mesh"


def node_of_large_job(node: int) -> NodeEvidence:
    """One of 12,500 nodes with eight ranks and the flight recorders of a mesh; rank 77,777 is elsewhere."""
    frames = [Frame(f"call_{at}", f"{PACKAGES}/torch/module_{at}.py", at + 1) for at in range(30)]
    world, last = (RankRange(0, 100_000),), tuple(Collective(at, "all_reduce", at < 7) for at in range(8))
    ranks = range(8 * node, 8 * node + 8)
    return NodeEvidence(
        f"node-{node:05}.cluster.example.org",
        tuple(
            RankEvidence(rank, "sleeping", frames=IN_LOAD if rank == 77_777 else (*IN_TRAIN[:2], *frames, IN_TRAIN[2]))
            for rank in ranks
        ),
        f"/var/log/job/{node}/hang.0.txt",
        tuple(
            RankRecord(
                rank,
                (
                    GroupRecord("0", "default_pg", world, last[:-1] if rank == 77_777 else last),
                    GroupRecord(str(rank % 8), "dp", (RankRange(rank % 8, 100, 8 * 125),), last),
                ),
            )
            for rank in ranks
        ),
    )


def test_the_report_of_a_hundred_thousand_ranks() -> None:
    few = [node for node in range(12_500) if node % 250 == 0 or node == 77_777 // 8]
    sent = {node: encode_evidence(node_of_large_job(node)) for node in few}
    assert max(map(len, sent.values())) < 2500, "all nodes fit into the limit"
    reader = EvidenceReader()
    found = [reader.read(data) for data in sent.values()]
    assert found == [node_of_large_job(node) for node in few]
    assert len({id(rank.frames) for node in found for rank in node.ranks}) == 2, "equal frames are kept once"
    lines = report_lines(found, ["n1"], more=12_000)
    assert "  1 rank (77777): load, data.py:12  <- differs" in lines
    assert any("all_reduce #7 of default_pg: joined by" in line and "not by rank 77777" in line for line in lines)
    assert "  no evidence from n1 and 12000 more" in lines
    assert len(lines) <= MAX_LINES
    assert max(map(len, lines)) < 1000


def test_stacks_of_many_nodes_are_grouped_one_by_one() -> None:
    text = DUMP.replace("8328", "{pid}")
    gathered = GatheredStacks()
    for node in range(1000):
        ranks = range(8 * node, 8 * node + 8)
        other = [WorkerStacks(7_777, 1, "", "py-spy did not answer")] if 7_777 in ranks else []
        stacks = [WorkerStacks(rank, rank, text.format(pid=rank)) for rank in ranks if rank != 7_777]
        sent = encode_stacks([*stacks, *other])
        assert len(sent) < 700
        gathered.add(decode_stacks(sent))
    lines = gathered.lines()
    assert lines[:2] == [
        "7999 ranks (0-7776, 7778-7999): all_reduce, train.py:41",
        "1 rank (7777): py-spy did not answer  <- differs",
    ]
    assert lines.count("    Trainer.step (train.py:41)") == 1


def test_ranks_text() -> None:
    assert ranks_text([0, 1, 5]) == "3 ranks (0-1, 5)"
    assert ranks_text([-1]) == "1 standby worker"
    assert ranks_text([3, -1, -2]) == "1 rank (3) and 2 standby workers"
