"""Mistakes of users: one clear sentence, the exit code of the contract, no hang."""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rallypoint.store.server import StoreServer
from tests.jobs.launching import RALLYRUN, Job, Launcher
from tests.ports import free_port

FINE = "print('ran')"


def refused(job: Job, *words: str, code: int = 1) -> None:
    """The job ends with this code, and one sentence with these words; its workers never ran."""
    assert job.ends() == code, job.err
    assert "ran" not in job.out
    assert "Traceback" not in job.err
    (sentence,) = re.findall(r"^.*error: (.*)$", job.err, re.MULTILINE)
    for word in words:
        assert word in sentence, (word, sentence)


# The command line


def test_a_script_that_does_not_exist_is_refused_before_the_rendezvous(rallyrun: Launcher) -> None:
    """Nobody else of the job is there, and this node does not wait for it."""
    (rallyrun.folder / "train_all.py").touch()
    alone = "--nnodes=2", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{free_port()}"
    refused(
        rallyrun(*alone, "train_al.py"),
        f"the script train_al.py does not exist in {rallyrun.folder};",
        "did you mean train_all.py?",
    )
    refused(rallyrun(*alone, "there/x.py"), "the script x.py does not exist in", "check the path")


def test_a_script_that_another_interpreter_finds_is_not_looked_for(rallyrun: Launcher) -> None:
    there = rallyrun.script("#!/bin/sh\n", "elsewhere")
    Path(there).chmod(0o700)
    assert rallyrun("--standalone", "in_the_container.py", env={"PYTHON_EXEC": there}).ends() == 0


def test_more_workers_than_descriptors_are_refused_with_the_limit(rallyrun: Launcher) -> None:
    command = [*RALLYRUN, "--standalone", "--nproc-per-node=60", rallyrun.script(FINE)]
    job = rallyrun.command(["bash", "-c", 'ulimit -n 100; exec "$@"', "-", *command])
    refused(job, "Too many open files", "fewer workers", "ulimit -n")


# Places that cannot be had or found


@contextmanager
def listening(answer: Callable[[socket.socket], None]) -> Iterator[int]:
    """A service that gives each who comes its answer; yields the port."""
    import threading

    def serve() -> None:
        while True:
            try:
                peer, _ = listener.accept()
            except OSError:
                return
            with peer:
                answer(peer)

    with socket.create_server(("", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()


def hello(peer: socket.socket) -> None:
    peer.recv(100)
    peer.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")


def at(port: int, *flags: str) -> list[str]:
    return ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-id=x", f"--rdzv-endpoint=127.0.0.1:{port}", *flags]


def test_a_port_in_use_is_named_by_who_would_host(rallyrun: Launcher) -> None:
    with listening(hello) as port:
        script = rallyrun.script(FINE)
        static = rallyrun("--nnodes=2", f"--rdzv-endpoint=127.0.0.1:{port}", script)
        for job in (rallyrun(*at(port, "--rdzv-conf=is_host=true"), script), static):
            refused(job, f"127.0.0.1:{port}", "in use")


def test_a_foreign_service_on_the_port_is_told_apart(rallyrun: Launcher) -> None:
    """A static job is told of the option or variable that it was given."""
    with listening(hello) as port:
        script, node_1 = rallyrun.script(FINE), ("--nnodes=2", "--node-rank=1")
        variables = {"PET_MASTER_ADDR": "127.0.0.1", "PET_MASTER_PORT": str(port)}
        jobs = {
            "": rallyrun(*at(port), script),
            "set --master-port to an unused port": rallyrun(*node_1, f"--master-port={port}", script),
            "set PET_MASTER_PORT to an unused port": rallyrun(*node_1, script, env=variables),
            "set --rdzv-endpoint to an unused port": rallyrun(*node_1, f"--rdzv-endpoint=127.0.0.1:{port}", script),
        }
        for words, job in jobs.items():
            refused(job, f"127.0.0.1:{port}", "not Rallypoint's control plane", words)


def test_a_torch_store_on_the_port_is_told_apart(rallyrun: Launcher) -> None:
    server = StoreServer()
    try:
        refused(rallyrun(*at(server.port), rallyrun.script(FINE)), f"127.0.0.1:{server.port}", "TCPStore")
    finally:
        server.close()
