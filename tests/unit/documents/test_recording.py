"""The recorded session of the README: recorded on a terminal, drawn as it was seen, and up to date with its file."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from docs.recording import __main__ as recording
from docs.recording.cast import Cast, RecordingError, read_cast, record
from docs.recording.frames import FAST, Frame, Run, frames_of
from docs.recording.svg import draw

SVG = "{http://www.w3.org/2000/svg}"
README = Path(__file__).parents[3] / "README.md"


def cast_of(*events: tuple[float, str]) -> Cast:
    return Cast(40, 5, "a title", "a command", 0, events)


def words(picture: str) -> list[str]:
    return [each.text or "" for each in ElementTree.fromstring(picture).iter(f"{SVG}text")]


@pytest.mark.process
def test_a_command_is_recorded_and_drawn(tmp_path: Path) -> None:
    """It is on a terminal of the size that was asked for, and what it writes is in the file and in the picture."""
    script = "import os, sys; print('\\x1b[32mgrün\\x1b[0m', sys.stdout.isatty(), *os.get_terminal_size())"
    assert recording.main(["--out", str(tmp_path / "made"), "--timeout=60", "--", sys.executable, "-c", script]) == 0
    cast = read_cast(tmp_path / "made.cast")
    assert cast.command.startswith(sys.executable)
    assert "Python 3." in cast.title
    assert [at for at, _ in cast.events] == sorted(at for at, _ in cast.events)
    assert "\x1b[32mgrün\x1b[0m True 80 26" in "".join(text for _, text in cast.events)
    picture = (tmp_path / "made.svg").read_text()
    assert "grün" in words(picture)
    assert "True 80 26" in words(picture)


@pytest.mark.process
def test_a_command_that_fails_or_takes_too_long_is_no_recording(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(RecordingError, match="exit code 3"):
        record([sys.executable, "-c", "exit(3)"], (80, 26), "", 60.0)
    with pytest.raises(RecordingError, match="within 0 s"):
        record([sys.executable, "-c", "input()"], (80, 26), "", 0.2)


def test_a_frame_is_what_the_terminal_showed() -> None:
    cast = cast_of((0.0, "one\r\n\x1b[1mtwo\x1b[0m"), (1.0, "\r\x1b[33mthree \x1b[2mfour\x1b[0m\x1b[K"), (2.0, ""))
    assert frames_of(cast) == [
        Frame(0.0, ((Run(0, "one", ""),), (Run(0, "two", "bold"),), (), (), ())),
        Frame(1.0, ((Run(0, "one", ""),), (Run(0, "three", "brown"), Run(6, "four", "brightblack")), (), (), ())),
    ]


def test_a_long_wait_is_played_fast_and_says_so() -> None:
    """Four seconds are shown as they were; then figures alone change, until something else does."""
    cast = cast_of(*((float(at), f"\rwaiting {at} s") for at in range(45)), (45.0, "\rdone\x1b[K"))
    frames = frames_of(cast)
    assert [frame.fast for frame in frames] == [False] * 5 + [True] * (len(frames) - 6) + [False]
    assert frames[4].at == 4.0
    assert frames[-1].at == pytest.approx(4 + 40 / FAST + 1)
    assert f"{FAST}x" in words(draw(cast, frames))


def test_each_row_shows_at_each_moment_what_was_there() -> None:
    """What an animation without steps between would show: the strip's place at the time, and what is drawn there."""
    cast = cast_of((0.0, "one ━━─"), (1.0, "\rtwo"), (3.0, "\rone"))
    root = ElementTree.fromstring(draw(cast, frames_of(cast)))
    (style,) = [each.text or "" for each in root.iter(f"{SVG}style")]
    (keyframes,) = re.findall(r"@keyframes r0\{(.*)\}", style)
    assert re.findall(r"([\d.]+%|to)\{transform:(?:translateY\((-\d+)px\)|none)\}", keyframes) == [
        ("0%", ""),
        ("0%", ""),
        ("9.09%", "-19"),
        ("27.27%", ""),
        ("to", ""),
    ]
    (strip,) = root.iter(f"{SVG}g")
    assert [(each.text, each.get("y")) for each in strip.iter(f"{SVG}text")] == [("one", "14"), ("two", "33")]
    assert [each.get("d") for each in strip.iter(f"{SVG}path")][:2] == ["M33.6 10H50.4", "M50.4 10H58.8"]


def test_the_recording_of_the_readme_is_drawn_of_its_file_and_says_what_made_it() -> None:
    """Renew it by `make recording`, or, where only the drawing has changed, by `make recording ARGS=--draw`."""
    file, picture = (recording.PLACE.with_name(f"demo.{ending}") for ending in ("cast", "svg"))
    cast, text = read_cast(file), picture.read_text(encoding="utf-8")
    assert draw(cast, frames_of(cast)) == text
    assert len(text) < 150_000
    description = ElementTree.fromstring(text).findtext(f"{SVG}desc") or ""
    assert re.match(r"rallyctl demo \(rallypoint \S+, torch \S+, Python \S+, \d+ cores\): recorded on 20", description)
    shown = "\n".join(words(text))
    assert "went on after" in shown
    assert "torchrun" in shown
    assert "docs/demo.svg" in README.read_text()
