"""Our control server alone in its process: `control_server NODES RUN_ID`. Prints its port; serves until stdin ends.

torch's counterpart is its store server: there the nodes do the rest among themselves.
"""

from __future__ import annotations

import sys

from benchmarks.limits import raise_file_limit
from benchmarks.messages import Serving, encode
from rallypoint.base.endpoint import listening_socket
from rallypoint.rendezvous.backends.options import settings_of
from rallypoint.rendezvous.hub import Hub
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.rendezvous.server import ControlServer


def main(nodes: int, run_id: str) -> None:
    """Serve one job until standard input ends."""
    raise_file_limit()
    settings = settings_of(RendezvousParameters("c10d", "127.0.0.1:0", run_id, nodes, nodes))
    server = ControlServer(Hub(settings), listening_socket("127.0.0.1", 0))
    print(encode(Serving(server.port)).decode(), flush=True)
    sys.stdin.read()
    server.close()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2])
