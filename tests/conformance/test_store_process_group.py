"""Two real processes initialize torch's process group over our server, like workers of an agent (contract 2.4)."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from rallypoint.store.client import TCPStore
from rallypoint.store.server import StoreServer

pytestmark = pytest.mark.torch

WORKER = """
import json, os, torch, torch.distributed as dist
dist.init_process_group("gloo", init_method="env://")
rank, tensor = dist.get_rank(), torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(tensor)
gathered = [None] * dist.get_world_size()
dist.all_gather_object(gathered, f"rank {rank}")
dist.barrier()
if rank == 0:
    print(json.dumps({"sum": tensor.item(), "gathered": gathered}), flush=True)
dist.destroy_process_group()
"""


@pytest.mark.timeout(180)
def test_a_process_group_forms_over_our_server() -> None:
    with StoreServer("127.0.0.1") as server:
        common = {
            **os.environ,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(server.port),
            "WORLD_SIZE": "2",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RUN_ID": "test",
            "OMP_NUM_THREADS": "1",
        }
        workers = [
            subprocess.Popen(
                [sys.executable, "-c", WORKER],
                env={**common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            out = [worker.communicate(timeout=120)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
        assert [worker.returncode for worker in workers] == [0, 0]
        assert json.loads(out[0]) == {"sum": 3.0, "gathered": ["rank 0", "rank 1"]}
        with TCPStore("127.0.0.1", server.port) as store:
            assert store.num_keys() > store.num_keys() - len(store.list_keys()) == 1  # init/ is the one not listed
            assert any(key.startswith("default_pg/") for key in store.list_keys())
