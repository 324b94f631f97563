"""Finds a job's coordinator for watchers, which are not part of the job."""

from __future__ import annotations

from rallypoint.base.endpoint import parse_endpoint
from rallypoint.base.errors import RallypointError
from rallypoint.control.client.dialing import DialTarget
from rallypoint.rendezvous.backends.options import control_tls, job_key
from rallypoint.rendezvous.params import C10D_PORT, ON_ETCD, RendezvousParameters


def coordinators(params: RendezvousParameters) -> list[DialTarget]:
    """List the possible places of the job's coordinator, the likeliest first.

    Raises:
        UserError: the endpoint or an option cannot work.
        RallypointError: no coordinator is running, or this cannot be determined.
    """
    if params.backend in ON_ETCD:
        return _elected(params)
    endpoint = parse_endpoint(params.endpoint, C10D_PORT)
    return [DialTarget(endpoint, job_key(params.run_id), control_tls(params.config))]


def _elected(params: RendezvousParameters) -> list[DialTarget]:
    from rallypoint.base.endpoint import Endpoint
    from rallypoint.control.election.keys import ElectionKeys, decode_leader
    from rallypoint.control.etcd.client import EtcdClient
    from rallypoint.rendezvous.backends.etcd import credentials_of, endpoints_of, prefix_of, tls_of

    if not params.run_id:
        raise RallypointError("etcd can host many jobs; set the job's --rdzv-id")
    keys = ElectionKeys.for_job(prefix_of(params), params.run_id)
    client = EtcdClient(endpoints_of(params.endpoint), tls_of(params), credentials_of(params), 3.0)
    try:
        found = client.range(keys.leader).kvs
    finally:
        client.close()
    record = decode_leader(found[0].value) if found else None
    if record is None:
        raise RallypointError(f"job {params.run_id!r} has no coordinator at the moment; check that the job is running")
    tls = control_tls(params.config)
    return [DialTarget(Endpoint(address, record.port), record.secret.encode(), tls) for address in record.addresses]
