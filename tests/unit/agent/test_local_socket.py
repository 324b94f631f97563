"""Commands find the agents of this machine by their sockets, and believe nothing that is not one."""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rallypoint.agent.features.local_jobs import LocalSocket, local_jobs, local_token
from rallypoint.base.kernel import until_readable
from rallypoint.base.secrets import SECRET, Secret, new_secret, token
from rallypoint.rendezvous.handler import LocalJob

JOB = LocalJob(os.getpid(), "job", "c10d", "127.0.0.1:29400", "train.py", 1e9 + 0.25, os.getuid())


@contextmanager
def answering(job: LocalJob | None) -> Iterator[LocalSocket]:
    """An agent's socket, stepped as the agent's loop does it."""
    served = LocalSocket(lambda: job)
    served.open()
    ended = threading.Event()

    def serve() -> None:
        while not ended.is_set():
            until_readable(served.fds(), 0.05)
            served.step()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield served
    finally:
        ended.set()
        thread.join()
        served.close()


def mine() -> list[LocalJob]:
    return [each for each in local_jobs() if each.pid == os.getpid()]


def test_a_job_is_found_while_its_agent_runs() -> None:
    with answering(JOB):
        assert mine() == [JOB]
    assert mine() == []


@pytest.mark.parametrize("given", ["secret", "token"])
def test_who_is_answered_gets_the_jobs_token(monkeypatch: pytest.MonkeyPatch, given: str) -> None:
    """With it, commands are taken; the secret itself, which is other jobs' too, is not told."""
    text = new_secret()
    expected = token(Secret((text,)), "job")
    monkeypatch.setattr("rallypoint.base.secrets._taken", {SECRET: text if given == "secret" else expected})
    with answering(JOB):
        assert local_token(JOB) == expected
        assert local_token(JOB._replace(job="other")) == ""
        assert local_token(JOB._replace(pid=1)) == "", "another job may have the same id"
        assert text not in str(mine())
        assert expected not in str(mine())


def test_a_job_without_a_secret_has_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rallypoint.base.secrets._taken", {})
    with answering(JOB):
        assert local_token(JOB) == ""


def test_an_agent_that_knows_no_endpoint_yet_is_not_shown() -> None:
    with answering(None):
        assert mine() == []


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"\xff\xfe\0a\0b\0c",
        b"1\0job",
        b"x\0job\0c10d\0h:1\0s\x001.0\0",
        b"1\0\x1b[2J\0c10d\0h:1\0s\x001.0\0",
        b"1\0job\0c10d\0h:1\0s\0long ago\0",
    ],
)
def test_what_is_no_agents_answer_is_passed_over(answer: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(f"\0rallypoint/agent/{os.getpid()}.test")
        listener.listen()

        def serve() -> None:
            asking, _ = listener.accept()
            with asking:
                asking.sendall(answer)

        thread = threading.Thread(target=serve)
        thread.start()
        assert [each for each in local_jobs() if each.endpoint == "h:1" or each.pid == 1] == []
        thread.join()


def test_an_agent_that_does_not_answer_in_time_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("rallypoint.agent.features.local_jobs._TIMEOUT", 0.0)
    silent = LocalSocket(lambda: JOB)
    silent.open()
    assert mine() == []
    silent.close()
    assert f"the agent with process id {os.getpid()} on this machine has not answered within 0 s" in caplog.text


def test_a_closed_socket_has_nothing_to_wait_for() -> None:
    served = LocalSocket(lambda: JOB)
    served.open()
    assert len(served.fds()) == 1
    served.close()
    served.close()
    assert served.fds() == []
    served.step()


def test_an_agent_without_a_name_of_its_own_waits_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda count: b"\0" * count)
    first, second = LocalSocket(lambda: JOB), LocalSocket(lambda: JOB)
    for each in (first, second):
        each.open()
    assert len(first.fds()) == 1
    assert second.fds() == [], "a socket that does not listen is readable all the time"
    second.step()
    for each in (first, second):
        each.close()
