"""A parameter gets no gradient: torch's own error, in all ranks."""

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return torch.Tensor.sum(self.used(batch))


dist.init_process_group("gloo")
model = DistributedDataParallel(Model())
for _ in range(2):
    model(torch.ones(2, 4)).backward()
