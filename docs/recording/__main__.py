"""`make recording`: record the demo, and draw it."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from docs.recording.cast import RecordingError, read_cast, record
from docs.recording.frames import frames_of
from docs.recording.svg import draw

PLACE = Path(__file__).parents[1] / "demo"
"""Where both files are, without their endings."""
_COMMAND = ("rallyctl", "demo")
_SIZE = (80, 26)


def main(argv: list[str] | None = None) -> int:
    """Record and draw, or draw again; 0 if all went well."""
    parser = argparse.ArgumentParser(prog="python -m docs.recording", description="Record a command as an SVG.")
    parser.add_argument(
        "--out", type=Path, default=PLACE, metavar="PATH", help="files to write, without .cast and .svg"
    )
    parser.add_argument("--draw", action="store_true", help="draw the .cast that is there once more; record nothing")
    parser.add_argument(
        "--timeout", type=float, default=300.0, metavar="SECONDS", help="for the command (default: 300)"
    )
    parser.add_argument("command", nargs="*", default=_COMMAND, help="what to record (default: rallyctl demo)")
    options = parser.parse_args(argv)
    file, picture = (options.out.with_name(options.out.name + ending) for ending in (".cast", ".svg"))
    if not options.draw:
        beside = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
        try:
            cast = record(options.command, _SIZE, _title(options.command), options.timeout, {"PATH": beside})
        except RecordingError as error:
            print(f"recording: {error}", file=sys.stderr)
            return 1
        file.write_text(cast.text(), encoding="utf-8")
    cast = read_cast(file)
    picture.write_text(draw(cast, frames_of(cast)), encoding="utf-8")
    print(f"written: {file} ({file.stat().st_size // 1000} kB), {picture} ({picture.stat().st_size // 1000} kB)")
    return 0


def _title(command: list[str]) -> str:
    found = [f"Python {platform.python_version()}", f"{os.cpu_count()} cores"]
    for name in ("torch", "rallypoint"):
        try:
            found.insert(0, f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return f"{' '.join(command)} ({', '.join(found)})"


if __name__ == "__main__":
    sys.exit(main())
