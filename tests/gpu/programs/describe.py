"""Prints torch's view of this machine as one line of JSON. Creates a CUDA context."""

from __future__ import annotations

import torch

from tests.gpu.programs.telling import tell


def main() -> None:
    gpus = []
    for number in range(torch.cuda.device_count()) if torch.cuda.is_available() else ():
        found = torch.cuda.get_device_properties(number)
        bus = tuple(getattr(found, name, -1) for name in ("pci_domain_id", "pci_bus_id", "pci_device_id"))
        gpus.append(
            {
                "name": found.name,
                "uuid": f"GPU-{getattr(found, 'uuid', '')}",
                "address": f"{bus[0]:04x}:{bus[1]:02x}:{bus[2]:02x}.0" if min(bus) >= 0 else "",
                "memory": found.total_memory,
                "capability": f"{found.major}.{found.minor}",
            }
        )
    nccl = ".".join(map(str, torch.cuda.nccl.version())) if gpus else ""
    tell("torch", torch=torch.__version__, cuda=torch.version.cuda or "", nccl=nccl, gpus=gpus)


if __name__ == "__main__":
    main()
