"""Programs for the workers of `tests.gpu`. Only these import torch."""
