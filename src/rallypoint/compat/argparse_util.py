"""In the place of `torch.distributed.argparse_util`: flags that may also come from `PET_<NAME>`."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

__all__ = ["check_env", "env"]


class _Set(argparse.Action):
    """Sets the flag's constant, or where it has none its value."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: str | Sequence[Any] | None,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, self.const or values)


class env(_Set):
    """An action for a flag with a value: where the flag is not given, `PET_<DEST>` counts, then the default."""

    def __init__(self, dest: str, default: Any = None, required: bool = False, **kwargs: Any) -> None:
        default = os.environ.get(f"PET_{dest.upper()}", default)
        super().__init__(dest=dest, default=default, required=required and not default, **kwargs)


class check_env(_Set):
    """An action for a flag without a value: where it is not given, `PET_<DEST>` is 0 or 1, else the default counts."""

    def __init__(self, dest: str, default: Any = False, **kwargs: Any) -> None:
        found = os.environ.get(f"PET_{dest.upper()}")
        value = default if found is None else bool(int(found))
        super().__init__(dest=dest, const=True, default=value, nargs=0, **kwargs)
