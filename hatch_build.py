"""What hatchling calls before it installs the package or makes a wheel.

The page of the package index is made of README.md. The store in C is built where it can be. A wheel has
completion scripts, made by shtab, and manual pages if `make man` or a source archive has put them into `build/share`;
an editable install has neither, for they would soon be older than the sources.

The variable `RALLYPOINT_BUILD` decides otherwise: `pure` leaves the store in C out, so that the wheel fits every
system; `native` fails where it cannot be built.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import sysconfig
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

_WANTED = ("", "pure", "native")
_COMMENT = re.compile(r"^<!--.*?-->\n", re.MULTILINE | re.DOTALL)
_PICTURE = re.compile(r"^!\[[^\]]*\]\((?!https:)[^)]*\)\n+", re.MULTILINE)
_LINK = re.compile(r"\[((?:[^\]\[]|\[[^\]]*\])*)\]\((?![a-z]+:)[^)\s]+\)")


def long_description(readme: str) -> str:
    """README.md for the package index, which has none of the files that its links and pictures name."""
    return _LINK.sub(r"\1", _PICTURE.sub("", _COMMENT.sub("", readme)))


class LongDescription(MetadataHookInterface):
    """Gives the package its long description."""

    PLUGIN_NAME = "custom"

    def update(self, metadata: dict[str, Any]) -> None:
        """Set `readme`, which pyproject.toml leaves to this."""
        text = long_description((Path(self.root) / "README.md").read_text(encoding="utf-8"))
        metadata["readme"] = {"content-type": "text/markdown", "text": text}


class BuildNative(BuildHookInterface[Any]):
    """Adds the built module to the wheel, or leaves it beside the sources of an editable install."""

    PLUGIN_NAME = "custom"
    _scripts: Path | None = None

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build. Where that cannot be, say so and go on without: the package is whole in Python alone."""
        wanted = os.environ.get("RALLYPOINT_BUILD", "")
        if wanted not in _WANTED:
            raise ValueError(f"RALLYPOINT_BUILD={wanted!r} is unknown; set it to pure or native, or leave it unset")
        if self.target_name != "wheel":
            return
        sys.path[:0] = [self.root, str(Path(self.root, "src"))]
        if version != "editable" and sys.platform != "win32":  # where the commands refuse to be imported
            self._share(build_data)
        if wanted == "pure":
            return
        import build_native

        try:
            built = build_native.build()
        except build_native.NotBuiltError as error:
            if wanted == "native":
                raise
            print(
                f"rallypoint: the store in C was not built, and the one in Python will serve: {error}", file=sys.stderr
            )
            return
        if version == "editable":
            return
        build_data["pure_python"] = False
        build_data["tag"] = f"cp311-abi3-{sysconfig.get_platform().replace('-', '_').replace('.', '_')}"
        build_data["force_include"][str(built)] = f"rallypoint/store/{built.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove what was written for the wheel."""
        if self._scripts is not None:
            shutil.rmtree(self._scripts)

    def _share(self, build_data: dict[str, Any]) -> None:
        """Manual pages, which a source archive has, and completion scripts, which are made now."""
        pages = sorted(Path(self.root, "build", "share", "man", "man1").glob("*.1"))
        build_data["shared_data"] |= {str(page): f"share/man/man1/{page.name}" for page in pages}
        if not pages:
            print(
                "rallypoint: without manual pages; a source archive has them, and 'make man' writes them",
                file=sys.stderr,
            )
        from rallypoint.cli import completion, parse, rallyctl

        self._scripts = Path(tempfile.mkdtemp(prefix="rallypoint-completion-"))
        try:
            texts = {
                shell: completion.completion_script(
                    shell, {"rallyrun": parse.build_parser(), "rallyctl": rallyctl.build_parser()}
                )
                for shell in completion.SHELLS
            }
        except ImportError:
            print("rallypoint: without completion scripts, which shtab makes: it is not installed", file=sys.stderr)
            return
        for shell, text in texts.items():
            (self._scripts / shell).write_text(text, "utf-8")
            build_data["force_include"][str(self._scripts / shell)] = f"rallypoint/cli/completions/{shell}"
            for name in completion.SHELLS[shell]:
                copy = self._scripts / name.replace("/", "-")
                copy.write_text(text, "utf-8")
                build_data["shared_data"][str(copy)] = name
