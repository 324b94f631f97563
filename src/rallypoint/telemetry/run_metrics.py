"""The metrics of an agent's run: their names and how they are reckoned (contract section 5.9)."""

from __future__ import annotations

from rallypoint.telemetry.lazy import put_metric_if_wanted


def put_worker_state(role: str, state: str, remaining_restarts: int) -> None:
    """The agent has looked at its workers.

    Args:
        role: of the workers.
        state: of their group.
        remaining_restarts: how many failures the job would survive yet.
    """
    put_metric_if_wanted(f"workers.{role}.remaining_restarts", remaining_restarts)
    put_metric_if_wanted(f"workers.{role}.{state.lower()}", 1)


def put_run_result(role: str, failed: bool, remaining_restarts: int, max_restarts: int) -> None:
    """The run is over.

    Args:
        role: of the workers.
        failed: whether the job failed.
        remaining_restarts: how many failures it would have survived yet.
        max_restarts: how many it was given.
    """
    retried = remaining_restarts < max_restarts
    put_metric_if_wanted(f"workers.{role}.flakiness", flakiness(failed, remaining_restarts, max_restarts))
    put_metric_if_wanted(f"workers.{role}.run_total", 1)
    for outcome, this in (("success", not failed), ("failed", failed)):
        put_metric_if_wanted(f"workers.{role}.run_{outcome}_with_retries", int(this and retried))
        put_metric_if_wanted(f"workers.{role}.run_{outcome}_no_retries", int(this and not retried))


def flakiness(failed: bool, remaining_restarts: int, max_restarts: int) -> int:
    """How much of its restarts a job needed, in percent: 0 without any, 100 if it failed."""
    return 100 if failed else int(100 - 100 * (remaining_restarts + 1) / (max_restarts + 1))
