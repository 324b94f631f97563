"""Clients of the real cluster, and unique prefixes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator

import pytest

from tests.etcd_client import WritingClient as EtcdClient
from tests.etcd_cluster import EtcdCluster, Member


@pytest.fixture(name="prefix")
def _prefix() -> bytes:
    return f"/{uuid.uuid4().hex}/".encode()


@pytest.fixture(name="client")
def _client(etcd: EtcdCluster) -> Iterator[EtcdClient]:
    client = EtcdClient(etcd.endpoints, timeout_s=20.0)
    yield client
    client.close()


@pytest.fixture(name="used")
def _used(etcd: EtcdCluster, client: EtcdClient) -> Callable[[], Member]:
    """Finds the member that `client` is connected to. Each request may change it."""

    def find() -> Member:
        while (endpoint := client.connected_to) is None:
            client.range(b"?")
        return etcd.at(endpoint)

    return find
