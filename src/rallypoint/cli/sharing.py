"""Warns about workers that outnumber their node's processors or accelerators."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rallypoint.base.light_typing import TYPE_CHECKING
from rallypoint.base.log import get_logger
from rallypoint.clusters.processors import processors, shortage

if TYPE_CHECKING:
    from rallypoint.base.devices import Root

_log = get_logger(__name__)

_NODES = (
    *("nvidia", "nvgpu", "nvhost-gpu", "dxg", "kfd", "dri", "mxcd", "iluvatar", "davinci", "accel", "neuron", "vfio"),
    *("mtgpu", "cambricon_dev"),
)
"""Prefixes of names in /dev, for drivers whose devices `base.vendors` can count."""


def warn_of_sharing(workers: int, environ: Mapping[str, str], *, each_gets_one: bool) -> None:
    """Warn, in one line each, if several workers outnumber the processors or devices that they see.

    `each_gets_one`: each worker gets one device from a list of checked length (`--virtual-local-rank`).
    """
    short = shortage(workers, processors(), environ)
    if short is not None:
        _log.warning("%s; %s", *short)
    if any(name.startswith(_NODES) for name in os.listdir("/dev")):
        line = shared_devices(workers, environ, each_gets_one=each_gets_one)
        if line:
            _log.warning("%s", line)


def shared_devices(workers: int, environ: Mapping[str, str], root: Root = "/", *, each_gets_one: bool = False) -> str:
    """The line about devices; empty if each worker can have one, or none exist. `root` has `dev`, `sys` and `proc`."""
    from rallypoint.base.devices import best, counted, seen

    row = best(seen(environ, root))
    if row is None or workers <= len(row.devices) or (each_gets_one and row.variable):
        return ""
    fact = f"{workers} workers share {counted(len(row.devices), row.vendor)}"
    if not row.variable:
        return f"{fact}; start fewer workers, or hide the devices from workers that do not use them"
    given = f"{row.variable}={environ[row.variable]!r}"
    if environ[row.variable].startswith("MIG-"):
        each = "use --virtual-local-rank to give each worker its own"
        return f"{fact}, since a program sees one MIG instance of {given}; {each}"
    return f"{fact} of {row.listed}, because of {given}; list more devices there, or start fewer workers"
