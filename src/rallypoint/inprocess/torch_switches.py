"""torch's temporary switches: read before the function is called, and restored after it leaves its round.

`interruption` never cuts the code that sets switches back. This file is for other cuts: an error in the function
itself, or a switch that neither `with` nor `finally` sets back. A round that continued with autocast, or without
gradients, would silently train another model. torch is looked up, and never imported.

A switch that the function sets permanently, such as a default type, lasts until its round ends: the next call sets it
again. Switches that `prepare` set stay.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, NamedTuple

_DEVICES = ("cpu", "cuda")
"""The device types with autocast, if this torch does not list them."""
_guards: list[Any] = []
"""Keeps the objects that switch inference mode, since it switches back when they are collected."""


class Switches(NamedTuple):
    """`autocast`: whether it is on, and its type, by device type; `nesting`: how many autocast blocks were open."""

    gradients: bool
    inference: bool
    autocast: dict[str, tuple[bool, Any]]
    nesting: int
    autocast_cache: bool
    anomaly: tuple[bool, bool]
    default_dtype: Any


def read() -> Switches | None:
    """This thread's switches; None if torch has not been imported."""
    torch = _torch()
    if torch is None:
        return None
    autocast = {device: _autocast(torch, device) for device in _devices(torch)}
    return Switches(
        gradients=torch.is_grad_enabled(),
        inference=torch.is_inference_mode_enabled(),
        autocast=autocast,
        nesting=_nesting(torch),
        autocast_cache=torch.is_autocast_cache_enabled(),
        anomaly=(torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()),
        default_dtype=torch.get_default_dtype(),
    )


def restore(before: Switches | None) -> None:
    """Restore this thread's switches. If torch was imported only since (None), set them as in a new process, except
    for the default type, which importing a module may have set permanently.
    """
    torch, now = _torch(), read()
    if torch is None or now is None or now == before:
        return
    if before is None:
        off = {device: (False, dtype) for device, (_, dtype) in now.autocast.items()}
        before = Switches(True, False, off, 0, True, (False, True), now.default_dtype)
    if now.inference != before.inference:
        guard = torch._C._InferenceMode(before.inference)
        guard.__enter__()
        _guards.append(guard)
    torch.set_grad_enabled(before.gradients)
    for device, (is_on, dtype) in before.autocast.items():
        torch.set_autocast_enabled(device, is_on)
        torch.set_autocast_dtype(device, dtype)
    for _ in range(now.nesting, before.nesting):
        torch.autocast_increment_nesting()
    for _ in range(before.nesting, now.nesting):
        torch.autocast_decrement_nesting()
    # It contains old copies of weights. Normally the end of the outermost block clears it, but that was cut.
    torch.clear_autocast_cache()
    torch.set_autocast_cache_enabled(before.autocast_cache)
    torch.set_anomaly_enabled(*before.anomaly)
    torch.set_default_dtype(before.default_dtype)


def _torch() -> Any:
    """torch's module; None if it has not been (completely) imported."""
    module = sys.modules.get("torch")
    return module if hasattr(module, "set_grad_enabled") and hasattr(module, "set_default_dtype") else None


def _devices(torch: Any) -> Iterator[str]:
    list_ = getattr(torch._C, "_autocast_supported_devices", None)
    for device in _DEVICES if list_ is None else list_():
        with suppress(RuntimeError, TypeError):  # no autocast for it in this build, or one switch for all
            _autocast(torch, device)
            yield device


def _autocast(torch: Any, device: str) -> tuple[bool, Any]:
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _nesting(torch: Any) -> int:
    nesting = int(torch.autocast_increment_nesting()) - 1
    torch.autocast_decrement_nesting()
    return nesting
