"""Consequences of other failures."""

from __future__ import annotations

import pytest

from rallypoint.agent.spec import RunResult, WorkerState
from rallypoint.failures.cause import Cause
from rallypoint.failures.failure import ProcessFailure
from rallypoint.failures.kinds import is_consequence

CLOSED = "RuntimeError: [../third_party/gloo/transport/tcp/pair.cc:544] Connection closed by peer [127.0.0.1]:29671"

WATCHDOG = (
    "[rank0]:[E] [Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=3, OpType=ALLREDUCE)\n"
    "Fatal Python error: Aborted"
)
CONSEQUENCES = (
    (1, CLOSED),
    (1, "RuntimeError: [pair.cc:534] Read error [10.0.0.2]:4711: Connection reset by peer"),
    (1, "RuntimeError: [unbound_buffer.cc:81] Timed out waiting 4000ms for recv operation to complete"),
    (1, "torch.distributed.DistNetworkError: The client socket has timed out after 60000ms"),
    (1, "torch.distributed.DistBackendError: NCCL communicator was aborted on rank 1."),
    (1, "RuntimeError: Rank 1 failed to pass monitoredBarrier in 5000 ms"),
    (-6, WATCHDOG),
)
ORIGINALS = (
    (1, "ValueError: bad batch 17"),
    (1, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB"),
    (1, "ConnectionResetError: [Errno 104] Connection reset by peer"),
    (1, "RuntimeError: DataLoader worker (pid 7) is killed by signal: Killed."),
    (-11, "Fatal Python error: Segmentation fault"),
    (-9, ""),
)


@pytest.mark.parametrize(
    ("exitcode", "text", "expected"), [(*row, True) for row in CONSEQUENCES] + [(*row, False) for row in ORIGINALS]
)
def test_is_consequence(exitcode: int, text: str, expected: bool) -> None:
    cause = Cause(0, 0, "n1", 7, exitcode, text.partition("\n")[0], text, 1.0, "")
    assert is_consequence(cause) is expected


def test_the_first_cause_is_no_consequence() -> None:
    def failure(rank: int, text: str, at: float) -> ProcessFailure:
        lines = f'Traceback (most recent call last):\n  File "x.py", line 1, in f\n{text}\n'.encode()
        return ProcessFailure(rank, rank, 1, "", last_lines=lines, noticed_at=at)

    closed, boom = failure(0, CLOSED, 10.0), failure(1, "ValueError: boom", 10.4)
    assert RunResult(WorkerState.FAILED, failures={0: closed, 1: boom}).first_cause().message == "ValueError: boom"
    assert RunResult(WorkerState.FAILED, failures={0: closed}).first_cause().message == CLOSED
