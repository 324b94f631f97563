"""In the place of `torch.distributed.elastic.rendezvous.etcd_rendezvous`.

The names and what they are made of are torch's; what stands in etcd is Rallypoint's state, over the v2 API, so that a
job's nodes all run the one or the other. Rallypoint's own `--rdzv-backend=etcd` speaks v3 and is another thing.
"""

from __future__ import annotations

from typing import Any

from rallypoint.base.errors import UserError
from rallypoint.compat.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler
from rallypoint.compat.elastic.rendezvous.etcd_rendezvous_backend import EtcdRendezvousBackend
from rallypoint.compat.elastic.rendezvous.etcd_store import EtcdStore
from rallypoint.compat.reexports import reexports_of
from rallypoint.rendezvous.backends.etcd_v2 import client_of
from rallypoint.rendezvous.params import RendezvousParameters

__all__ = [
    "EtcdRendezvous",
    "EtcdRendezvousHandler",
    "EtcdRendezvousRetryImmediately",
    "EtcdRendezvousRetryableFailure",
    "create_rdzv_handler",
]

__getattr__ = reexports_of(__name__)

_DEFAULT_PREFIX = "/torchelastic/p2p"
_DEFAULT_TIMEOUT, _DEFAULT_LAST_CALL_TIMEOUT = 600, 30


class EtcdRendezvousRetryableFailure(Exception):
    """A step of torch's protocol in etcd that can be tried again. Never raised here."""


class EtcdRendezvousRetryImmediately(Exception):
    """A step of torch's protocol in etcd that must be retried at once. Never raised here."""


class EtcdRendezvous:
    """The parameters of a rendezvous in etcd.

    Args:
        client: of the etcd, such as `EtcdServer.get_client` gives.
        prefix: what its keys begin with.
        run_id: the job's id.
        num_min_workers: the number of nodes that a round needs at least.
        num_max_workers: the number of nodes that a round takes at most.
        timeout: seconds for the minimal number of nodes to join.
        last_call_timeout: seconds for more to join after that.

    Raises:
        UserError: a number is out of range.
    """

    def __init__(
        self,
        client: Any,
        prefix: str,
        run_id: str,
        num_min_workers: int,
        num_max_workers: int,
        timeout: int,
        last_call_timeout: int,
    ) -> None:
        self.client = client
        self.prefix = prefix
        self.params = RendezvousParameters(
            "etcd",
            "",
            run_id,
            num_min_workers,
            num_max_workers,
            join_timeout=timeout,
            last_call_timeout=last_call_timeout,
        )


class EtcdRendezvousHandler(DynamicRendezvousHandler):
    """One node's part in a rendezvous in etcd.

    Args:
        rdzv_impl: what it is made of.
        local_addr: this node's address as others reach it; None to find it out.
    """

    def __init__(self, rdzv_impl: EtcdRendezvous, local_addr: str | None) -> None:
        made = rdzv_impl.params
        params = RendezvousParameters(
            made.backend, made.endpoint, made.run_id, made.min_nodes, made.max_nodes, local_addr, **made.config
        )
        root = f"{rdzv_impl.prefix.rstrip('/')}/run_{made.run_id}"
        self._own_backend = EtcdRendezvousBackend(rdzv_impl.client, "rdzv", root)
        self._own_store = EtcdStore(rdzv_impl.client, f"{root}/kv")
        super().__init__(params, self._own_store, self._own_backend)

    def shutdown(self) -> bool:
        """Leave, and close the connections. The job goes on without this node."""
        self._own_backend.cancel_waits()
        left = super().shutdown()
        self._own_backend.close()
        self._own_store.close()
        return left


def create_rdzv_handler(params: RendezvousParameters) -> EtcdRendezvousHandler:
    """The handler for the parameters of torch's `etcd`, over the v2 API (contract sections 4.2 and 4.11).

    Raises:
        UserError: an option cannot work.
    """
    timeout = params.get_as_int("timeout", _DEFAULT_TIMEOUT)
    last_call = params.get_as_int("last_call_timeout", _DEFAULT_LAST_CALL_TIMEOUT)
    if not params.run_id:
        raise UserError("a rendezvous in etcd needs a run id that is not empty")
    assert timeout is not None
    assert last_call is not None
    return EtcdRendezvousHandler(
        EtcdRendezvous(
            client_of(params),
            str(params.get("etcd_prefix", _DEFAULT_PREFIX)),
            params.run_id,
            params.min_nodes,
            params.max_nodes,
            timeout,
            last_call,
        ),
        params.local_addr,
    )
