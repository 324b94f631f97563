"""The consequences of a node's check results: warnings, or a node that stays out of the job."""

from __future__ import annotations

from collections.abc import Sequence

from rallypoint.base.errors import PreflightError
from rallypoint.base.log import get_logger
from rallypoint.preflight.results import CheckResult, Status

WARN, REQUIRE = "warn", "require"
"""The values of `--preflight`."""

_log = get_logger(__name__)


def admit(results: Sequence[CheckResult], mode: str) -> None:
    """Log what has not passed, one line each, as a warning.

    Args:
        results: of the checks of this node.
        mode: `WARN` or `REQUIRE`.

    Raises:
        PreflightError: `mode` is `REQUIRE` and something has failed; this node is to stay out of the job.
    """
    failures = [each for each in results if each.status is Status.FAIL] if mode == REQUIRE else []
    told_by_error = failures if len(failures) == 1 else []
    for each in results:
        if each.status is not Status.PASS and each not in told_by_error:
            _log.warning("%s", each)
    if failures:
        raise PreflightError(_sentence(failures))


def _sentence(failures: Sequence[CheckResult]) -> str:
    if len(failures) == 1:
        return f"this node stays out of the job, by --preflight=require: {failures[0]}"
    names = ", ".join(each.name for each in failures)
    return f"this node stays out of the job, by --preflight=require: {len(failures)} checks failed ({names}), see above"
