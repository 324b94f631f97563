"""Counts a node's workers if `--nproc-per-node` names a kind of device."""

from __future__ import annotations

from collections.abc import Mapping

from rallypoint.base.devices import Root, best, cpu_count, seen, trouble_of
from rallypoint.base.errors import UserError
from rallypoint.base.vendors import VENDORS

_KINDS = {"gpu": "cuda"} | {vendor.kind: vendor.kind for vendor in VENDORS if vendor.kind != "cuda"}
"""Names that `--nproc-per-node` accepts, and torch's name for the devices to count."""


def count_devices(text: str, environ: Mapping[str, str], source: str, root: Root = "/") -> int:
    """Count the devices that `--nproc-per-node` names (contract section 1.6). Raises UserError: the name is unknown,
    or no such device exists, or the devices cannot be counted.
    """
    if text == "cpu":
        return cpu_count()
    if text == "auto":
        return count_accelerators(environ, f"{source}=auto", root) or cpu_count()
    if text not in _KINDS:
        others = ", ".join(kind for kind in _KINDS if kind not in ("gpu", "xpu"))
        raise UserError(
            f"{source}={text!r} is not a number of workers; use a number, cpu, gpu, xpu, auto, or another torch device "
            f"({others})"
        )
    vendors = [vendor for vendor in VENDORS if vendor.kind == _KINDS[text]]
    rows = seen(environ, root, vendors)
    for row in rows:
        if row.devices:
            return len(row.devices)
    what = "GPUs" if text == "gpu" else vendors[0].devices
    trouble = next((row for row in rows if row.trouble), None)
    if trouble is not None:
        raise UserError(
            f"{source}={text} cannot count {what}: {trouble.trouble}; set the number of workers, or "
            f"{trouble.vendor.advice}"
        )
    hiding = [f"{row.variable}={environ[row.variable]!r}" for row in rows if row.variable]
    where = f" with {hiding[0]}" if hiding else " on this machine"
    raise UserError(f"{source}={text} counts {what}, but none could be opened{where}; use a number, cpu or auto")


def count_accelerators(environ: Mapping[str, str], source: str, root: Root = "/") -> int:
    """The number of accelerators that a job uses by default. Raises UserError if some exist but cannot be counted;
    processors are no substitute for them.
    """
    rows = seen(environ, root)
    row = best(rows)
    if row is not None:
        return len(row.devices)
    trouble, advice = trouble_of(rows, root)
    if trouble:
        more = f"; {advice}" if advice else ""
        raise UserError(f"{source} cannot count the accelerators: {trouble}; set the number of workers, or cpu{more}")
    return 0
