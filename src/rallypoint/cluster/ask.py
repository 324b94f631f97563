"""Asking an MPI launcher on which host rank 0 is. All ranks ask at once.

Hydra speaks PMI-1, lines of text on a socket that each rank inherits (`PMI_FD`): rank 0 puts its name and address
there, and all wait for one another. Open MPI's PMIx knows the host of each rank; it is asked through its own library,
in a process of its own, so that nothing of it stays in the agent.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

from rallypoint.base.endpoint import outward_address, resolve
from rallypoint.base.errors import UsageError
from rallypoint.base.log import printable
from rallypoint.cluster.findings import is_host_name

TIMEOUT = 300.0
"""Seconds that the slowest rank may take to start."""
_KEY = "rallypoint-host"
_LONGEST_LINE = 4096
_KVSNAME = re.compile(r"[\w.@:-]{1,120}", re.ASCII)


class Answer(NamedTuple):
    """The host of rank 0, empty if the launcher did not say; and the launcher's name for the job, if it has told it."""

    host: str
    name: str = ""


def ask(how: str, rank: int, environ: Mapping[str, str]) -> Answer:
    """Ask the launcher.

    Args:
        how: pmi or pmix.
        rank: this process's.
        environ: where the launcher has said how it can be reached.

    Raises:
        UsageError: it does not answer as it should; it cannot be asked again.
    """
    return _ask_pmi(rank, environ) if how == "pmi" else _ask_pmix(environ)


def _ask_pmix(environ: Mapping[str, str]) -> Answer:
    command = [sys.executable, "-I", "-m", "rallypoint.cluster.pmix", environ.get("PMIX_NAMESPACE", "")]
    try:
        done = subprocess.run(
            command, env=dict(environ), stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return Answer("")
    host = done.stdout[:512].decode("ascii", "replace").strip()
    return Answer(host if done.returncode == 0 and is_host_name(host) else "")


def _ask_pmi(rank: int, environ: Mapping[str, str]) -> Answer:
    descriptor = environ.get("PMI_FD", "")
    try:
        if not os.get_inheritable(int(descriptor)):  # a number that is one of our own by now
            raise ValueError("nothing was inherited there")
        with socket.socket(fileno=os.dup(int(descriptor))) as connection:
            connection.settimeout(TIMEOUT)
            return _exchange(Pmi(connection), rank)
    except (OSError, ValueError, OverflowError) as error:
        raise UsageError(
            f"the MPI launcher does not say where rank 0 is (PMI_FD={printable(descriptor, 20)}: {error}); give "
            "--rdzv-endpoint=HOST:29400 with the host of rank 0"
        ) from None


def _exchange(pmi: Pmi, rank: int) -> Answer:
    pmi.call("response_to_init", "init", pmi_version="1", pmi_subversion="1")
    name = pmi.call("my_kvsname", "get_my_kvsname").get("kvsname", "")
    if not _KVSNAME.fullmatch(name):
        raise ValueError(f"its name for the job, {printable(name, 60)!r}, is none")
    if rank == 0:
        pmi.call("put_result", "put", kvsname=name, key=_KEY, value=f"{socket.gethostname()}/{outward_address()}")
    pmi.call("barrier_out", "barrier_in")
    told = pmi.call("get_result", "get", kvsname=name, key=_KEY).get("value", "")
    pmi.call("finalize_ack", "finalize")  # else the launcher takes the end of this process for a crash
    host, _, address = told.partition("/")
    if is_host_name(host) and _resolves(host):
        return Answer(host, name)
    return Answer(address if is_host_name(address) or ":" in address else "", name)


def _resolves(host: str) -> bool:
    try:
        return any(not address.startswith("127.") and address != "::1" for address in resolve(host))
    except OSError:
        return False


class Pmi:
    """PMI-1 from the side of a rank: one line is sent, and one comes back."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def call(self, expected: str, command: str, **values: str) -> dict[str, str]:
        """Send a command, and return the values of the answer.

        Raises:
            OSError: the launcher has gone, or does not answer in time.
            ValueError: it answers something else, or that it cannot.
        """
        words = [f"cmd={command}", *(f"{name}={value}" for name, value in values.items())]
        self._connection.sendall((" ".join(words) + "\n").encode())
        line = b""
        while not line.endswith(b"\n"):  # byte by byte, since the descriptor is the launcher's, and so is what follows
            byte = self._connection.recv(1)
            if not byte or len(line) >= _LONGEST_LINE:
                raise ValueError(f"{command} was not answered by a line")
            line += byte
        answer = dict(word.split("=", 1) for word in line.decode("ascii", "replace").split() if "=" in word)
        if answer.get("cmd") != expected or answer.get("rc", "0") != "0":
            raise ValueError(f"{command} was answered by {printable(line.decode('ascii', 'replace').strip(), 120)!r}")
        return answer
