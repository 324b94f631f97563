"""Whether several agents of one job share this machine's processors, which `OMP_NUM_THREADS` should then divide.

Each agent holds an abstract socket while it runs: the first the one of place 0, the second that of place 1, all others
none. So exactly one of them finds that it is the second, and warns for all. The socket's name has the job, the port
where its nodes meet, and the processors that the agent may use: agents that a scheduler has bound apart do not meet.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from zlib import crc32

from rallypoint.base.log import get_logger
from rallypoint.rendezvous.params import RendezvousParameters

log = get_logger(__name__)


@contextmanager
def register_on_host(parameters: RendezvousParameters, environ: Mapping[str, str]) -> Iterator[None]:
    """Register with other agents of the job on this machine; warn if this is the second and threads are not limited.

    Args:
        parameters: of the rendezvous.
        environ: the environment of the workers.
    """
    cpus = sorted(os.sched_getaffinity(0))
    where = parameters.endpoint.rpartition(":")[2]
    name = f"rallypoint-{crc32(repr((parameters.run_id, where, cpus)).encode()):08x}"
    with socket.socket(socket.AF_UNIX) as place:
        if _is_second(place, name) and "OMP_NUM_THREADS" not in environ and len(cpus) > 1:
            log.warning(
                "another agent of job %r runs on this machine, and OMP_NUM_THREADS is not set: each worker starts "
                "threads for all %d processors; set it to a worker's share, such as OMP_NUM_THREADS=%d",
                parameters.run_id,
                len(cpus),
                len(cpus) // 2,
            )
        yield


def _is_second(place: socket.socket, name: str) -> bool:
    """Take the first free place. Returns whether that is the second."""
    for number in range(2):
        try:
            place.bind(f"\0{name}-{number}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:  # abstract sockets do not exist here
                return False
        else:
            return number == 1
    return False
