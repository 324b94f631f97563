"""What the workers of `tests.gpu` run. Only these import torch."""
