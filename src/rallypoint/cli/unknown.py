"""What torchrun ignores in silence: names in `--rdzv-conf` and `PET_*` variables that mean nothing to anybody.

They stay ignored, since that is the contract, but a warning says so, with the name that was likely meant.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from rallypoint.base.log import get_logger
from rallypoint.cli.flags import FLAGS

_log = get_logger(__name__)

_LIKE = 0.5
"""How much two names must have in common, from 0 to 1, for one to be taken for the other."""


def warn_of_variables(environ: Mapping[str, str]) -> None:
    """Say which variables look like those of flags (`PET_NNODE`) and are none.

    Args:
        environ: the agent's environment.
    """
    flags = {flag.variable: flag for flag in FLAGS}
    for name in sorted(name for name in environ if name.startswith("PET_")):
        flag = flags.get(name)
        if flag is None:
            known = {each.variable.removeprefix("PET_"): each.variable for each in FLAGS if each.from_environment}
            meant = nearest(name.removeprefix("PET_"), known)
            _log.warning(
                "%s has no effect: no flag reads it%s", name, f"; did you mean {known[meant]}?" if meant else ""
            )
        elif not flag.from_environment:
            _log.warning("%s has no effect: %s is read from the command line alone; give it there", name, flag.name)


def warn_of_options(source: str, given: Collection[str], backend: str, known: Collection[str]) -> None:
    """Say which options of the rendezvous its backend does not know.

    Args:
        source: where they were written: `--rdzv-conf` or `PET_RDZV_CONF`.
        given: the names that the user wrote.
        backend: the backend's name.
        known: the names that it reads.
    """
    for name in sorted(set(given).difference(known)):
        meant = _MEANT.get(name, "")
        if meant not in known and not meant.startswith("--"):
            meant = nearest(name, known)
        hint = f"; did you mean {meant}?" if meant else ""
        _log.warning("%s: the option %r has no effect with the backend %s%s", source, name, backend, hint)


_MEANT = {"timeout": "join_timeout", "join_timeout": "timeout", "rank": "--node-rank"}
"""Names that two backends have for one thing, and what has a flag, which wins."""


def nearest(name: str, known: Collection[str]) -> str:
    """The known name that is most like `name`, in whatever case of letters; empty if none is."""
    from difflib import SequenceMatcher

    def likeness(other: str) -> float:
        return SequenceMatcher(None, name.lower(), other.lower()).ratio()

    best = max(sorted(known), key=likeness, default="")
    return best if best and likeness(best) >= _LIKE else ""
