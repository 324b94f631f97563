"""The variables in a worker's environment (contract section 2)."""

from __future__ import annotations

import pytest

from rallypoint.agent.spec import Worker, WorkerGroup, WorkerSpec
from rallypoint.agent.workers import constant_environment, worker_environment
from rallypoint.base.errors import UserError
from rallypoint.failures.record import VARIABLE as ERROR_FILE_VARIABLE
from rallypoint.features.preload.agent import per_worker_variables
from rallypoint.store.plain import HashStore
from rallypoint.workers.watchdog import FILE_VARIABLE
from tests.unit.agent.third_party import CountingHandler

HANDLER = CountingHandler(HashStore(), "job", 1)


def group() -> WorkerGroup:
    made = WorkerGroup(WorkerSpec("trainer", 2, HANDLER, entrypoint="/bin/true", max_restarts=4))
    made.group_rank, made.group_world_size = 1, 3
    made.master_addr, made.master_port = "10.0.0.7", 2345
    return made


WORKER = Worker(local_rank=1, global_rank=4, role_rank=2, world_size=6, role_world_size=5)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"local_world_size": 0}, "local_world_size=0 is out of range"),
        ({"monitor_interval": 0.0}, "monitor_interval=0.0 is out of range"),
        ({"entrypoint": None}, "needs an entry point"),
    ],
)
def test_invalid_specs(changes: dict[str, object], words: str) -> None:
    given: dict[str, object] = {"role": "r", "local_world_size": 1, "rdzv_handler": HANDLER, "entrypoint": "true"}
    with pytest.raises(UserError, match=words):
        WorkerSpec(**{**given, **changes})  # type: ignore[arg-type]


def test_fn_is_the_deprecated_name_of_entrypoint() -> None:
    with pytest.warns(DeprecationWarning, match="use entrypoint"):
        spec = WorkerSpec("r", 1, HANDLER, fn=print)
    assert spec.get_entrypoint_name() == "print"
    assert WorkerSpec("r", 1, HANDLER, entrypoint="/usr/bin/python3").get_entrypoint_name() == "python3"


@pytest.mark.parametrize(("workers", "virtual"), [(1, False), (2, False), (2, True)])
def test_per_worker_variables(workers: int, virtual: bool) -> None:
    """Each variable is either the same for all workers of the node in all rounds, or known not to be."""
    made = group()
    made.notices = "/tmp/rallypoint-notices-0"
    made.spec = spec = WorkerSpec("trainer", workers, HANDLER, entrypoint="/bin/true", virtual_local_rank=virtual)
    agent = {"CUDA_VISIBLE_DEVICES": "3,4"}
    constant = constant_environment(spec, agent)
    found = worker_environment(made, Worker(local_rank=0) if workers == 1 else WORKER, constant, agent)
    own = per_worker_variables(spec, constant)
    assert {name: found[name] for name in constant} == constant
    assert set(found) - set(constant) <= own
    assert not own & set(constant)
    assert ("LOCAL_RANK" in constant) == (workers == 1 or virtual)
    assert {ERROR_FILE_VARIABLE, FILE_VARIABLE} <= own
