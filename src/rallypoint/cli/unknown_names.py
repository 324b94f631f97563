"""Warnings for names that torchrun ignores silently: unknown keys in `--rdzv-conf`, and unknown `PET_*` variables.

They stay ignored, as the contract requires. A variable that is almost one of ours gets a warning too, since a job
without its secret would run unprotected.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rallypoint.base.log import get_logger
from rallypoint.cli.flags import FLAGS

_log = get_logger(__name__)

_SIMILARITY = 0.5
"""The similarity of two names, from 0 to 1, above which one counts as a misspelling of the other."""

OURS = frozenset(
    f"RALLYPOINT_{name}"
    for name in (
        *("SECRET", "SECRET_FILE", "ETCD_PASSWORD", "ETCD_PASSWORD_FILE"),
        *("STORE", "NOTICES", "TERMINATION_GRACE"),
        *("VERDICT_FILE", "TERMINATION_LOG", "HTTP_TOKEN_FILE", "INCIDENT_ENV", "SERVICE"),
    )
)
"""The variables that this program reads."""
_ALMOST = 0.8
"""The same for one of `OURS`; it is higher, since Kubernetes makes variables of similar names for services."""


def warn_of_variables(environ: Mapping[str, str]) -> None:
    """Warn of variables that look like those of flags (`PET_NNODE`) or like one of `OURS`, and are not."""
    flags = {flag.variable: flag for flag in FLAGS}
    for name in sorted(name for name in environ if name.startswith("PET_")):
        flag = flags.get(name)
        if flag is None:
            known = {each.variable.removeprefix("PET_"): each.variable for each in FLAGS if each.from_environment}
            meant = closest_match(name.removeprefix("PET_"), known)
            _log.warning(
                "%s has no effect: no flag reads it%s", name, f"; did you mean {known[meant]}?" if meant else ""
            )
        elif not flag.from_environment:
            _log.warning("%s has no effect: %s is read from the command line only; give it there", name, flag.name)
    ours = {name.removeprefix("RALLYPOINT_"): name for name in OURS}
    for name in sorted(name for name in environ if name.startswith("RALLYPOINT_") and name not in OURS):
        meant = closest_match(name.removeprefix("RALLYPOINT_"), ours, _ALMOST)
        if meant:
            _log.warning("%s has no effect: nothing reads it; did you mean %s?", name, ours[meant])


def warn_of_options(source: str, given: Collection[str], backend: str, known: Collection[str]) -> None:
    """Warn of options in `source` (`--rdzv-conf` or `PET_RDZV_CONF`) that the backend does not know."""
    for name in sorted(set(given).difference(known)):
        meant = _MEANT.get(name, "")
        if meant not in known and not meant.startswith("--"):
            meant = closest_match(name, known)
        hint = f"; did you mean {meant}?" if meant else ""
        _log.warning("%s: the option %r has no effect with the backend %s%s", source, name, backend, hint)


_MEANT = {"timeout": "join_timeout", "join_timeout": "timeout", "rank": "--node-rank"}
"""Other backends' names for an option, and options that have a flag, which takes precedence."""


def closest_match(name: str, known: Collection[str], least: float = _SIMILARITY) -> str:
    """The known name that is most similar to `name`, ignoring case; empty if none is as similar as `least`, from 0 to
    1.
    """
    from difflib import SequenceMatcher

    def likeness(other: str) -> float:
        return SequenceMatcher(None, name.lower(), other.lower()).ratio()

    best = max(sorted(known), key=likeness, default="")
    return best if best and likeness(best) >= least else ""
