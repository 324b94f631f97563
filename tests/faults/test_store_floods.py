"""Floods of requests to the worker store cost that connection, and never the job.

The attacker is on the host of a member, whose address the store admits: torch's clients cannot authenticate.
"""

from __future__ import annotations

import os
import socket
import time
from contextlib import ExitStack

import pytest

from tests import typed_requests as wire
from tests.faults.cluster import Cluster
from tests.faults.intruder import dial
from tests.faults.test_intruders import Job, open_files, started
from tests.processes import resident

SERVED_WITHIN = 10.0
"""Seconds, on a machine where ten others run."""


@pytest.fixture
def job(cluster: Cluster) -> Job:
    cluster.within = ["prlimit", "--nofile=1024:1024"]
    return started(cluster, "")


def store_of(job: Job) -> tuple[str, int]:
    up = job.agents[1].ups[-1]
    return up["MASTER_ADDR"], int(up["MASTER_PORT"])


def client(job: Job, *requests: wire.Request) -> socket.socket:
    """A client on the second node's host, that has greeted and sent these."""
    made = dial(job.agents[1].host, store_of(job))
    made.sendall(wire.encode(wire.Validate()) + b"".join(map(wire.encode, requests)))
    return made


def is_served(asking: socket.socket) -> bool:
    begun = time.monotonic()
    asking.sendall(wire.encode(wire.Ping(7)))
    assert asking.recv(4, socket.MSG_WAITALL) == b"\7\0\0\0"
    return time.monotonic() - begun < SERVED_WITHIN


def test_floods_of_requests_hold_up_nobody(job: Job) -> None:
    agent = next(each for each in job.agents if each.host.address == store_of(job)[0])
    before = resident(agent.job.pid)
    keys = [(b"%06d" % number * 10, b"") for number in range(50_000)]
    with ExitStack() as stack:
        other = stack.enter_context(client(job))
        filling = [wire.MultiSet(keys[at : at + 10_000]) for at in range(0, len(keys), 10_000)]
        stack.enter_context(client(job, wire.Set(b"large", os.urandom(16_000)), *filling))
        assert is_served(other)
        for _ in range(4):  # each would have two gigabytes of replies
            stack.enter_context(client(job, wire.MultiGet([b"large"] * wire.MAX_KEYS)))
            assert is_served(other)
        for _ in range(50):  # and each of these 250 MB
            stack.enter_context(client(job, *[wire.ListKeys()] * 84))
        assert is_served(other)
        assert resident(agent.job.pid) - before < 100 << 20
    job.is_as_it_was()


def test_connections_that_use_up_all_descriptors_keep_the_next_round_from_nothing(job: Job) -> None:
    with open_files(4096), ExitStack() as stack:
        for _ in range(1100):
            stack.enter_context(dial(job.agents[1].host, store_of(job)))
        job.is_as_it_was()
