"""Timers that workers set and the agent enforces, and workers that are stuck in the kernel (contract 5.11 and 5.12)."""
