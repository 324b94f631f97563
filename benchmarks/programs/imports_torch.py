"""A worker that imports torch, says who it is, then waits for its end."""

import os
import signal

import torch

assert torch.__version__
# One write for the whole line: with `python -u`, print makes two, and the other worker's line can come between.
os.write(1, f"worker rank={os.environ['RANK']} pid={os.getpid()}\n".encode())
signal.pause()
