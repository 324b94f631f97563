"""A hook of autograd raises in the backward pass of rank 1."""

import os
import time

import torch


def check(gradient: torch.Tensor) -> None:
    raise ArithmeticError("the gradient of layer 3 is not finite")


if os.environ["RANK"] == "1":
    weight = torch.ones(3, requires_grad=True)
    weight.register_hook(check)
    (weight * 2).sum().backward()
time.sleep(60)
