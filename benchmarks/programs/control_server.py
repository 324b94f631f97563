"""Our control server alone in its process: `control_server NODES RUN_ID [PROTECTED [LEASE [many]]]`. Prints its port;
serves until stdin ends; with `many` any job, as `rallyctl serve` does.

torch's counterpart is its store server: there the nodes do the rest among themselves.
"""

from __future__ import annotations

import sys

from benchmarks.messages import Protected, Serving, decode, encode
from benchmarks.protected import key_of, tls_of
from benchmarks.system import raise_file_limit
from rallypoint.base.endpoint import listening_socket
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.jobs import ManyJobs
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.rendezvous.backends.options import settings_of
from rallypoint.rendezvous.params import RendezvousParameters


def main(nodes: int, run_id: str, protected: Protected, lease: float, many: bool) -> None:
    """Serve until standard input ends."""
    raise_file_limit()
    settings = settings_of(RendezvousParameters("c10d", "127.0.0.1:0", run_id, nodes, nodes, lease=lease))
    key = key_of(protected, run_id)
    keys = None if key is None else lambda _job: (key,)
    jobs = ManyJobs() if many else Dispatcher(settings)
    server = ControlServer(jobs, listening_socket("127.0.0.1", 0), keys=keys, tls=tls_of(protected))
    print(encode(Serving(server.port)).decode(), flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    nodes, run_id, protected, lease, many = (*sys.argv[1:], *("{}", "3", "")[len(sys.argv) - 3 :])
    main(int(nodes), run_id, decode(protected, Protected), float(lease), many == "many")
