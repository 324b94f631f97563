"""Variables of other frameworks: their values, the reserved ports, and the messages."""

from __future__ import annotations

import errno
import json
import socket
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager

import pytest

from rallypoint.agent.options import checked_frameworks
from rallypoint.agent.spec import Worker, WorkerGroup
from rallypoint.agent.workers import constant_environment, worker_environment
from rallypoint.base.clock import SYSTEM_CLOCK
from rallypoint.base.errors import UserError
from rallypoint.control.membership.state import NodeRanks
from rallypoint.control.protocol.messages import Placement
from rallypoint.features.preload.agent import per_worker_variables
from rallypoint.features.round_setup import PeerExchange, PeerRecord, RoundInSetup, RoundSetup, exchange_of
from rallypoint.features.worker_env import (
    KINDS,
    FrameworkVariables,
    ReservedPorts,
    WorkerPlace,
)
from tests.unit.agent.features import enter_round, with_features
from tests.unit.agent.thread_workers import ThreadWorkers
from tests.unit.compat.test_subclass import ours

RECORDS = {
    1: PeerRecord(1, "n1", "2001:db8::1", 2, 2, {"tf": (42, 43)}),
    0: PeerRecord(0, "n0", "node0", 0, 2, {"jax": (7000,), "tf": (40, 41)}),
}
PLACE = WorkerPlace(3, 4, 1, 2, RECORDS, {}, gpus=0, shares_gpus=True)


def variables_of(kind: str, place: WorkerPlace = PLACE) -> Mapping[str, str]:
    """The variables of a kind. All must be in its `names`: preloaded workers get no others."""
    found = KINDS[kind].variables(place)
    assert set(found) <= KINDS[kind].names
    return found


def test_jax() -> None:
    assert variables_of("jax") == {
        "JAX_COORDINATOR_ADDRESS": "node0:7000",
        "JAX_COORDINATOR_PORT": "7000",
        "JAX_NUM_PROCESSES": "4",
        "JAX_PROCESS_ID": "3",
        "OMPI_MCA_orte_hnp_uri": "0.0;tcp://node0:7000",
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    }
    over_ipv6 = variables_of("jax", PLACE._replace(records={0: RECORDS[0]._replace(address="2001:db8::2")}))
    assert over_ipv6["JAX_COORDINATOR_ADDRESS"] == "[2001:db8::2]:7000"
    assert over_ipv6["OMPI_MCA_orte_hnp_uri"] == "0.0;tcp6://[2001:db8::2]:7000"
    inherited = {"SLURM_PROCID": "0", "SLURM_LOCALID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}
    slurm = variables_of("jax", PLACE._replace(inherited=inherited))
    assert {name: value for name, value in slurm.items() if name.startswith("SLURM")} == {
        "SLURM_PROCID": "3",
        "SLURM_LOCALID": "1",
        "SLURM_NTASKS": "4",
    }, "the numbers of the worker, not those of the task"


@pytest.mark.parametrize(
    ("gpus", "workers", "local_rank", "shares", "devices"),
    [
        (8, 1, 0, True, "0,1,2,3,4,5,6,7"),
        (8, 2, 1, True, "4,5,6,7"),
        (8, 8, 7, True, "7"),
        (7, 2, 1, True, "3,4,5"),
        (1, 8, 0, False, "0"),
        (1, 2, 1, True, None),
        (0, 2, 1, True, None),
    ],
)
def test_jax_device_ids(gpus: int, workers: int, local_rank: int, shares: bool, devices: str | None) -> None:
    place = PLACE._replace(gpus=gpus, local_world_size=workers, local_rank=local_rank, shares_gpus=shares)
    assert variables_of("jax", place).get("JAX_LOCAL_DEVICE_IDS") == devices
    own = place._replace(inherited={"JAX_LOCAL_DEVICE_IDS": "1"})
    assert "JAX_LOCAL_DEVICE_IDS" not in variables_of("jax", own), "the user's choice counts"


def test_tf_config() -> None:
    assert json.loads(variables_of("tf")["TF_CONFIG"]) == {
        "cluster": {"worker": ["node0:40", "node0:41", "[2001:db8::1]:42", "[2001:db8::1]:43"]},
        "task": {"type": "worker", "index": 3},
    }


def test_ompi_agrees_with_jax() -> None:
    found = variables_of("ompi")
    assert found == {
        "OMPI_COMM_WORLD_RANK": "3",
        "OMPI_COMM_WORLD_SIZE": "4",
        "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
        "OMPI_COMM_WORLD_NODE_RANK": "1",
        "OMPI_UNIVERSE_SIZE": "4",
    }
    jax = variables_of("jax")
    assert found.items() & jax.items() == {item for item in found.items() if item[0] in jax}
    assert "OMPI_MCA_orte_hnp_uri" not in found, "it would mean mpirun to jax and Open MPI"


def test_checked_frameworks() -> None:
    assert checked_frameworks(["ompi", "torch", "jax", "ompi"]) == ("jax", "ompi")
    assert checked_frameworks(["torch"]) == ()
    with pytest.raises(UserError, match="'horovod' is not one of torch, jax, tf, ompi"):
        checked_frameworks(["horovod"])


@pytest.mark.parametrize("address", ["127.0.0.1", "::1"])
def test_reserved_ports_are_free_for_grpc(address: str) -> None:
    with closing(ReservedPorts()) as reserved:
        port, unused = first = reserved.reserve(2)
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.socket(family) as other, pytest.raises(OSError, match="in use") as refused:
            other.bind((address, port))
        assert refused.value.errno == errno.EADDRINUSE
        with socket.socket(family) as worker, socket.socket(family) as client:
            worker.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            worker.bind((address, port))
            worker.listen()
            client.connect((address, port))
            with worker.accept()[0] as accepted:
                accepted.sendall(b"here")
            assert client.recv(9) == b"here"
        second = reserved.reserve(2)
        assert len({*first, *second}) == 4, "each round has its own ports"
        with socket.socket() as other:
            other.bind(("127.0.0.1", unused))


@contextmanager
def entered(*kinds: str, nodes: int = 1) -> Iterator[ThreadWorkers]:
    """Workers of an agent that has entered a round of one node."""
    workers = ThreadWorkers(lambda rank, start, stopping: rank, ours())
    with closing(workers):
        workers.max_nodes = nodes
        with_features(workers, worker_env=kinds)
        enter_round(workers, Placement(0, 0, 1, NodeRanks(0, 1, 0, 1), "127.0.0.1", 1, 0))
        yield workers


def environment(group: WorkerGroup) -> dict[str, str]:
    return worker_environment(group, group.workers[0], constant_environment(group.spec, {}), {})


def test_workers_get_the_variables_of_all_kinds() -> None:
    with entered("torch", "jax", "tf", "ompi") as workers:
        found = environment(workers.group)
        assert found["MASTER_ADDR"] == "127.0.0.1"
        assert found["JAX_COORDINATOR_ADDRESS"].startswith("127.0.0.1:")
        (tf,) = json.loads(found["TF_CONFIG"])["cluster"]["worker"]
        assert tf != found["JAX_COORDINATOR_ADDRESS"]
        assert found["OMPI_UNIVERSE_SIZE"] == "1"
        sources = workers.group.variable_sources
        own = per_worker_variables(workers.group.spec, ()).union(*(source.names for source in sources))
        constant = {"ROLE_NAME", "LOCAL_WORLD_SIZE", "PYTHONFAULTHANDLER"}
        assert all(name in constant or name.startswith(("TORCH", "LOCAL")) for name in set(found) - own)
        (setup,) = workers.preparations
        assert isinstance(setup, RoundSetup)
        (exchange,) = setup.steps
        assert isinstance(exchange, PeerExchange)
        assert exchange_of(workers, 1, "a check") is exchange, "there is one exchange"
        assert [user.use for user in exchange.users] == ["jax", "tf"]
        assert workers.group.placement is not None
        enter_round(workers, workers.group.placement._replace(round=1))
        address = environment(workers.group)["JAX_COORDINATOR_ADDRESS"]
        assert address != found["JAX_COORDINATOR_ADDRESS"], "each round has its own coordinator"


@pytest.mark.parametrize("kind", ["torch", "ompi"])
def test_torch_and_ompi_need_no_exchange(kind: str) -> None:
    with entered(kind, nodes=2) as workers:
        assert not workers.preparations


def test_a_node_without_the_flag_is_named() -> None:
    with entered() as workers:
        round_ = RoundInSetup(workers.group, SYSTEM_CLOCK)
        round_.records = {**RECORDS, 1: RECORDS[1]._replace(ports={"tf": (42,)})}
        with pytest.raises(ValueError, match="n1 reported no port for tf; start all nodes with the same --worker-env"):
            FrameworkVariables("tf", KINDS["tf"], workers.group).take(round_)


def test_without_a_shared_store_an_exchange_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    with (
        pytest.raises(UserError, match=r"--worker-env=jax.*TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1.*unset"),
        entered("jax", nodes=2),
    ):
        pass
    with entered("ompi", nodes=2):
        pass


def test_virtual_local_ranks_see_one_gpu_each() -> None:
    with entered("jax") as workers:
        workers.group.spec.virtual_local_rank = True
        workers.group.workers = [Worker(0, 0, 0, 1, 1)]
        (source,) = workers.group.variable_sources
        assert source.variables(workers.group.workers[0], {"LOCAL_RANK": "0"})["OMPI_COMM_WORLD_LOCAL_RANK"] == "0"
