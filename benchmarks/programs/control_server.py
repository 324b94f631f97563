"""Our control server alone in its process: `control_server NODES RUN_ID LEASE [many]`. Prints its port;
serves until stdin ends; with `many` any job, as `rallyctl serve` does.

torch's counterpart is its store server: there the nodes do the rest among themselves.
"""

from __future__ import annotations

import sys

from benchmarks.messages import Serving, encode
from benchmarks.system import raise_file_limit
from rallypoint.base.endpoint import listening_socket
from rallypoint.control.coordinator.dispatcher import Dispatcher
from rallypoint.control.coordinator.jobs import ManyJobs
from rallypoint.control.coordinator.server import ControlServer
from rallypoint.rendezvous.backends.options import settings_of
from rallypoint.rendezvous.params import RendezvousParameters


def main(nodes: int, run_id: str, lease: float, many: bool) -> None:
    """Serve until standard input ends."""
    raise_file_limit()
    settings = settings_of(RendezvousParameters("c10d", "127.0.0.1:0", run_id, nodes, nodes, lease=lease))
    jobs = ManyJobs() if many else Dispatcher(settings)
    server = ControlServer(jobs, listening_socket("127.0.0.1", 0))
    print(encode(Serving(server.port)).decode(), flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], float(sys.argv[3]), "many" in sys.argv[4:])
