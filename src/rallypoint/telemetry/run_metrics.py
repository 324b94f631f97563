"""The metrics of an agent's run: their names and values (contract section 5.9)."""

from __future__ import annotations

from rallypoint.telemetry.lazy import put_metric_if_wanted


def put_worker_state(role: str, state: str, remaining_restarts: int) -> None:
    """The agent has polled its workers: the state of their group, and the failures that the job would still survive."""
    put_metric_if_wanted(f"workers.{role}.remaining_restarts", remaining_restarts)
    put_metric_if_wanted(f"workers.{role}.{state.lower()}", 1)


def put_run_result(role: str, failed: bool, remaining_restarts: int, max_restarts: int) -> None:
    """The run has ended: whether it failed, and how many of its restarts remained."""
    retried = remaining_restarts < max_restarts
    put_metric_if_wanted(f"workers.{role}.flakiness", flakiness(failed, remaining_restarts, max_restarts))
    put_metric_if_wanted(f"workers.{role}.run_total", 1)
    for outcome, holds in (("success", not failed), ("failed", failed)):
        put_metric_if_wanted(f"workers.{role}.run_{outcome}_with_retries", int(holds and retried))
        put_metric_if_wanted(f"workers.{role}.run_{outcome}_no_retries", int(holds and not retried))


def flakiness(failed: bool, remaining_restarts: int, max_restarts: int) -> int:
    """The share of its restarts that a job used, in percent: 0 without any, 100 if it failed."""
    return 100 if failed else int(100 - 100 * (remaining_restarts + 1) / (max_restarts + 1))
