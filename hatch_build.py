"""What hatchling calls before it installs the package or makes a wheel: the store in C is built where it can be."""

from __future__ import annotations

import sys
import sysconfig
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class BuildNative(BuildHookInterface):
    """Adds the built module to the wheel, or leaves it beside the sources of an editable install."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build. Where that cannot be, say so and go on without: the package is whole in Python alone."""
        if self.target_name != "wheel":
            return
        sys.path.insert(0, self.root)
        import build_native

        try:
            built = build_native.build()
        except build_native.NotBuiltError as error:
            print(
                f"rallypoint: the store in C was not built, and the one in Python will serve: {error}", file=sys.stderr
            )
            return
        if version == "editable":
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["force_include"][str(built)] = f"rallypoint/store/{built.name}"
