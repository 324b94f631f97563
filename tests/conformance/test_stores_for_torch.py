"""Our stores in place of torch's: `to_torch`, and the store of a rendezvous."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import completed

pytestmark = pytest.mark.torch

PROGRAM = """
import gc, sys
import torch
import torch.distributed as dist
from rallypoint.compat import FileStore, HashStore, PrefixStore, TCPStore
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.compat.handlers import C10dRendezvousBackend
from rallypoint.compat.handlers import create_handler
from rallypoint.rendezvous.handler import get_rendezvous_handler

PARAMS = RendezvousParameters("c10d", "localhost:0", "job", 1, 1)


def met(handler):
    info = handler.next_rendezvous()
    kept.append(handler)
    return info.store


kept = []
MADE = {
    "tcp": lambda: TCPStore("localhost", 0, is_master=True).to_torch(),
    "hash": lambda: HashStore().to_torch(),
    "file": lambda: FileStore(sys.argv[1]).to_torch(),
    "nested": lambda: PrefixStore("b", PrefixStore("a", HashStore())).to_torch(),
    "rendezvous": lambda: met(get_rendezvous_handler(PARAMS)),
    "over ours": lambda: met(create_handler(HashStore(), C10dRendezvousBackend(HashStore(), "job"), PARAMS)),
    "over torch's": lambda: met(create_handler(dist.HashStore(), C10dRendezvousBackend(dist.HashStore(), "j"), PARAMS)),
}
for kind, make in MADE.items():
    store = make()
    gc.collect()
    assert isinstance(store, dist.Store)
    inner = dist.PrefixStore("inner", store)
    inner.set("key", "value")
    assert store.get("inner/key") == b"value"
    assert inner.add("number", 2) == 2
    inner.wait(["key"])
    assert inner.check(["key"]) and not inner.check(["other"])
    dist.init_process_group("gloo", store=inner, rank=0, world_size=1)
    ones = torch.ones(2)
    dist.all_reduce(ones)
    dist.barrier()
    dist.destroy_process_group()
    while kept:
        kept.pop().shutdown()
    print(kind, "is taken")
"""


def test_torch_takes_each(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, str(tmp_path / "file")]
    done = completed(command)
    kinds = ["tcp", "hash", "file", "nested", "rendezvous", "over ours", "over torch's"]
    assert (done.returncode, done.stdout) == (0, "".join(f"{kind} is taken\n" for kind in kinds)), done.stderr


def test_without_torch_it_says_so() -> None:
    program = (
        "import sys\nfrom rallypoint.store.plain import HashStore\n"
        "try: HashStore().to_torch()\nexcept ValueError as error: print(error, 'torch' in sys.modules)"
    )
    said = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert "torch.distributed is not imported" in said
    assert said.endswith("False\n")
