"""The budgets of the design, measured against torchrun in turn in one run: `python -m benchmarks`."""
