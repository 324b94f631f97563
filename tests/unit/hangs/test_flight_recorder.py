"""Dumps of flight recorders: read without trust, compared over ranks, and requested from outside."""

from __future__ import annotations

import io
import itertools
import json
import os
import pickle
import socket
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from rallypoint.observe.hangs.dumps import (
    DUMP,
    OLD_NAMES,
    PIPE,
    SOCKET,
    Dump,
    Recorder,
    read_dump,
    record_of,
    recorder_of,
    take_dumps,
)
from rallypoint.observe.hangs.messages import NodeEvidence, RankEvidence, RankRecord, decode_evidence, encode_evidence
from rallypoint.observe.hangs.report import MAX_FINDINGS, findings, report_lines
from rallypoint.observe.hangs.unpickle import PlainUnpickler, unpickled

RECORDED = Path(__file__).parent / "recorded"
"""Dumps of real torch, made by `recorded/train.py`."""


def dumped(entries: Sequence[object], **more: object) -> Dump:
    return read_dump(json.dumps({"entries": [*entries], **more}).encode())


def json_of(data: bytes) -> bytes:
    """The JSON of a pickle, as the child that reads it makes it."""
    return json.dumps(PlainUnpickler(io.BytesIO(data)).load()).encode()


def recorded(case: str, ranks: Sequence[int] = range(4)) -> list[RankRecord]:
    return [record_of(rank, read_dump(json_of((RECORDED / f"{case}_{rank}").read_bytes()))) for rank in ranks]


def findings_of(case: str, ranks: Sequence[int] = range(4)) -> list[str]:
    return findings(recorded(case, ranks), range(4))


JOINED = "all_reduce #3 of default_pg (train.py:46): joined by "


def test_findings_of_recorded_dumps() -> None:
    assert findings_of("missing") == [JOINED + "ranks 0-2, not by rank 3"]
    differs = "#3 of default_pg differs between ranks: all_reduce on ranks 0-2, broadcast on rank 3"
    assert findings_of("mismatch") == [differs]
    assert findings_of("group") == [
        JOINED + "ranks 2-3, not by ranks 0-1",
        "barrier #2 of process group 1 (train.py:45): joined by rank 0, not by rank 1",
    ]
    incomplete = "all with a dump, ranks 0-2, not complete on any; no dump from rank 3"
    assert findings_of("missing", range(3)) == [JOINED + incomplete]
    assert findings_of("missing", [2, 3]) == [JOINED + "rank 2, not by rank 3; no dump from ranks 0-1"]
    assert findings_of("missing", [3]) == findings_of("missing", []) == []


def test_the_answer_of_a_worker_server_has_the_same_findings() -> None:
    def calls(record: RankRecord) -> list[list[tuple[object, ...]]]:
        return [[(call.sequence, call.operation, call.done) for call in group.last] for group in record.groups]

    server = record_of(3, read_dump((RECORDED / "server_3.json").read_bytes()))
    assert calls(server) == calls(*recorded("missing", [3]))
    assert findings([*recorded("missing", range(3)), server], range(4)) == findings_of("missing")


def nccl(rank: int, last: str, *, sequence: int = 41, members: Sequence[int] = (0, 1), **more: Any) -> RankRecord:
    """A dump of NCCL, with members and states."""

    def entry(number: int, state: str) -> dict[str, Any]:
        return {
            "frames": [{"name": "all_reduce", "filename": "/venv/lib/python3.12/site-packages/torch/x.py", "line": 1}],
            "process_group": ("0", "default_pg"),
            "collective_seq_id": number,
            "profiling_name": "nccl:all_reduce",
            "state": state,
            "retired": state == "completed",
            "is_p2p": False,
        }

    entries = [entry(number, "completed") for number in range(max(1, sequence - 3), sequence)] + [entry(sequence, last)]
    config = {"0": {"name": "0", "desc": "default_pg", "ranks": str([*members])}}
    return record_of(rank, dumped([*entries, *more.get("entries", ())], pg_config=config))


RECEIVES = {
    "process_group": ("0", "default_pg"),
    "collective_seq_id": 41,
    "profiling_name": "nccl:recv 1<-0",
    "state": "started",
    "is_p2p": True,
}


def test_findings_with_nccl() -> None:
    def found(first: RankRecord, second: RankRecord) -> list[str]:
        return findings([first, second], range(2))

    joined = "all_reduce #41 of default_pg: joined by all, "
    assert found(nccl(0, "started"), nccl(1, "started")) == [joined + "not complete on any"]
    assert found(nccl(0, "completed"), nccl(1, "started")) == [joined + "not complete on rank 1"]
    assert found(nccl(0, "completed"), nccl(1, "completed")) == []
    receives = nccl(1, "completed", entries=[RECEIVES])
    assert found(nccl(0, "completed"), receives) == ["rank 1 is waiting in recv 1<-0 of default_pg"]
    assert found(nccl(0, "started", sequence=900), nccl(1, "completed", sequence=41)) == [
        "a collective #42 of default_pg: joined by rank 0, not by rank 1"
    ]


def test_findings_are_limited() -> None:
    def entries(count: int) -> list[dict[str, Any]]:
        return [
            {"process_group": (str(at), "p"), "collective_seq_id": n, "profiling_name": "gloo:x", "retired": True}
            for at in range(30)
            for n in range(1, count + 1)
        ]

    records = [record_of(rank, dumped(entries(1 + rank))) for rank in range(2)]
    lines = findings(records, range(2))
    assert len(lines) == MAX_FINDINGS + 1
    assert lines[-1] == "and 18 more such lines"


@pytest.mark.process
def test_pickles_are_read_by_a_child_that_executes_nothing(tmp_path: Path) -> None:
    made = tmp_path / "made"

    class Reduced:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(made),)

    text, nested = "x" * 100_000, ["x"]
    for _ in range(24):
        nested = [nested, nested]  # type: ignore[list-item]
    bad = [
        pickle.dumps({"entries": [Reduced()]}),
        pickle.dumps({"entries": [Path("x")]}, 2),
        b"cposix\nsystem\n(S'id'\ntR.",
        b"\x80\x02}r\xff\xff\xff\x7f.",  # a large index of the memo
        b"\x80\x05\x96\xff\xff\xff\xff\xff\x00\x00\x00.",  # a terabyte
        (RECORDED / "missing_0").read_bytes()[:-10],
        b"",
        pickle.dumps({"entries": [text] * 1000}),  # which JSON repeats
        pickle.dumps({"entries": nested}),
    ]
    assert max(map(len, bad)) < 110_000
    with ThreadPoolExecutor(2) as pool:
        answers = list(pool.map(lambda data: of_child(tmp_path, data), [(RECORDED / "missing_0").read_bytes(), *bad]))
    assert answers == [
        json_of((RECORDED / "missing_0").read_bytes()),
        *[b"it is not a pickle of plain values"] * len(bad),
    ]
    assert not made.exists()


def of_child(folder: Path, data: bytes) -> bytes:
    path = folder / f"{hash(data)}"
    path.write_bytes(data)
    with path.open("rb") as file:
        try:
            return unpickled(file, 60)
        except ValueError as error:
            return str(error).encode()


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b"[" * 100_000, b'{"entries":{}}', b"{}"])
def test_other_data_is_no_dump(data: bytes) -> None:
    with pytest.raises(ValueError, match="it is not a valid flight recorder dump"):
        read_dump(data)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        {"process_group": ("0",), "collective_seq_id": 1, "profiling_name": "x"},
        {"process_group": ("0", "a"), "collective_seq_id": True, "profiling_name": "x"},
        {"process_group": ("0", "a"), "collective_seq_id": -1, "profiling_name": "x"},
        {"process_group": ("0", "a"), "collective_seq_id": 1, "profiling_name": None},
    ],
)
def test_invalid_entries_are_refused(entry: object) -> None:
    with pytest.raises(ValueError, match=r"it is not a valid flight recorder dump: .*entries\[0\]"):
        dumped([entry])


def test_unprintable_text_is_not_sent() -> None:
    entry = {
        "process_group": ("0", "\x1b[2J"),
        "collective_seq_id": 1,
        "profiling_name": "nccl:\x07",
        "state": "started",
    }
    record = record_of(0, dumped([entry], pg_config={"0": {"name": "0", "desc": "\x1b[2J", "ranks": "[0]"}}))
    node = NodeEvidence("n", (RankEvidence(0, "running"),), records=(record,), dumps="/logs/flight_recorder/rank_")
    assert decode_evidence(encode_evidence(node)) == node
    assert all(line.isprintable() for line in report_lines([node]))


def test_the_report_has_findings_missing_ranks_and_a_command() -> None:
    ranks = tuple(RankEvidence(rank, "sleeping") for rank in range(4))
    records = (*recorded("missing", range(3)), RankRecord(3, why_none="it did not answer"))
    lines = report_lines([NodeEvidence("n", ranks, records=records, dumps="/logs/flight_recorder/rank_")])
    assert lines[1].startswith(
        "  flight recorder: all_reduce #3 of default_pg (train.py:46): joined by all with a dump"
    )
    assert lines[2:4] == [
        "  no flight recorder dump from 1 rank (3): it did not answer",
        "  analysis: torchfrtrace --prefix rank_ /logs/flight_recorder",
    ]


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    yield tmp_path
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("answers")]


def process_group(path: Path, writes: Sequence[bytes]) -> threading.Thread:
    """Read a pipe as a process group does, and write the dump as torch does: into the file, part by part."""
    os.mkfifo(f"{path}.pipe")
    fd = os.open(f"{path}.pipe", os.O_RDONLY | os.O_NONBLOCK)

    def run() -> None:
        while not os.read(fd, 128):
            time.sleep(0.01)
        with path.open("wb") as file:
            for part in writes:
                file.write(part)
                file.flush()
                time.sleep(0.1)
        os.close(fd)

    thread = threading.Thread(target=run, name="answers")
    thread.start()
    return thread


@pytest.mark.process
def test_dumps_are_requested_by_the_pipe_and_awaited(folder: Path) -> None:
    data = (RECORDED / "missing_0").read_bytes()
    (folder / "rank_0").write_bytes(b"an old dump")
    thread = process_group(folder / "rank_0", [data[:700], data[700:]])
    environ = {OLD_NAMES[DUMP]: f"{folder}/rank_", PIPE: f"{folder}/rank_"}
    recorder = recorder_of(0, environ)
    assert recorder == Recorder(f"{folder}/rank_0", f"{folder}/rank_0.pipe", "")
    assert take_dumps({0: recorder}, "") == recorded("missing", [0])
    thread.join()


@pytest.mark.process
def test_ranks_that_cannot_be_asked_or_do_not_answer(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.observe.hangs.dumps.TIMEOUT", 2.0)
    thread = process_group(folder / "rank_0", [b"half a dump"])
    os.mkfifo(folder / "rank_1.pipe")
    (folder / "rank_2.pipe").write_text("no pipe")
    (folder / "rank_3.pipe").symlink_to(folder / "rank_2.pipe")
    environ = {DUMP: f"{folder}/rank_", PIPE: f"{folder}/rank_"}
    recorders = {rank: recorder for rank in range(5) if (recorder := recorder_of(rank, environ))}
    late, *others = take_dumps(recorders, "")
    thread.join()
    assert "but wrote an incomplete dump (it is not a pickle of plain values) within 2 s" in late.why_none
    why = "there is neither an NCCL process group nor a torch worker server to ask"
    assert {record.why_none for record in others} == {why}
    assert (folder / "rank_2.pipe").read_text() == "no pipe"
    assert recorder_of(0, {PIPE: "/x"}) is None


def test_dumps_are_requested_from_the_worker_server(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.observe.hangs.dumps.TIMEOUT", 1.0)
    data = (RECORDED / "server_3.json").read_bytes()
    answers = {
        3: b"HTTP/1.1 200 OK\r\n\r\n" + data,
        4: b"HTTP/1.1 404 Not Found\r\n\r\nno such handler",
        5: b"",
        6: None,  # no answer
        7: itertools.repeat(b"x"),  # another program, which sends slowly and without end
    }

    def serve(listener: socket.socket, answer: Iterable[bytes]) -> None:
        connection, _ = listener.accept()
        with connection, suppress(BrokenPipeError, ConnectionResetError):
            assert connection.recv(1000).startswith(b"POST /handler/fr_trace_json ")
            for part in answer:
                connection.sendall(part)
                threading.Event().wait(0.02)

    recorders, threads = {}, []
    with ExitStack() as stack:
        for rank, answer in answers.items():
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(f"{folder}/{rank}")
            listener.listen()
            recorders[rank] = recorder_of(rank, {SOCKET: f"{folder}/{rank}"}) or Recorder("", "", "")
            if answer is not None:
                parts = [answer] if isinstance(answer, bytes) else answer
                threads.append(threading.Thread(target=serve, args=(listener, parts), name="answers"))
                threads[-1].start()
        found = take_dumps(recorders, str(folder))
        for thread in threads:
            thread.join()
    assert found[0] == record_of(3, read_dump(data))
    assert (folder / "worker_server_3.json").read_bytes() == data
    assert [record.why_none.removeprefix("torch's worker server sent no dump: ") for record in found[1:]] == [
        "it does not support the flight recorder",
        "it does not support the flight recorder",
        "timed out",
        "it takes too long",
    ]
