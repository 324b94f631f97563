"""In the place of `torch.distributed.elastic.rendezvous.etcd_rendezvous_backend`."""

from __future__ import annotations

from typing import Any

from rallypoint.compat.elastic.rendezvous.etcd_store import EtcdStore, given_client
from rallypoint.compat.reexports import reexports_of
from rallypoint.etcd.api import EtcdError
from rallypoint.protocol.errors import RendezvousConnectionError
from rallypoint.rendezvous.backends.etcd_v2 import DEFAULT_PREFIX, DEFAULT_TTL, EtcdV2Backend, client_of
from rallypoint.rendezvous.params import RendezvousParameters

__all__ = ["EtcdRendezvousBackend", "create_backend"]

__getattr__ = reexports_of(__name__)

_STORE_PREFIX = "/torch/elastic/store"


class EtcdRendezvousBackend(EtcdV2Backend):
    """The state in one key of an etcd with the v2 API.

    Args:
        client: of the etcd, such as `EtcdServer.get_client` gives.
        run_id: the job's id.
        key_prefix: what the key begins with; nothing where it is not given.
        ttl: seconds after the last write for which etcd keeps the state; 7200 where it is not given.

    Raises:
        UserError: an empty run id.
    """

    def __init__(self, client: Any, run_id: str, key_prefix: str | None = None, ttl: int | None = None) -> None:
        life = DEFAULT_TTL if ttl is None or ttl <= 0 else ttl
        super().__init__(given_client(client), run_id, key_prefix or "", life)


def create_backend(params: RendezvousParameters) -> tuple[EtcdRendezvousBackend, EtcdStore]:
    """A backend and a store in the same etcd, from the options of `etcd-v2` (contract section 4.2).

    Raises:
        UserError: an option cannot work.
        RendezvousConnectionError: there is no etcd with the v2 API.
    """
    client = client_of(params)
    backend = EtcdRendezvousBackend(client, params.run_id, str(params.get("etcd_prefix", DEFAULT_PREFIX)))
    try:
        client.get("/")
    except EtcdError as error:
        raise RendezvousConnectionError(str(error)) from error
    finally:
        client.close()
    return backend, EtcdStore(client, _STORE_PREFIX)
