"""Each transcript in this folder plays to the very text that it holds; `--rewrite-transcripts` makes it so."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.transcripts.player import Player, read, write

TRANSCRIPTS = sorted((Path(__file__).parent / "coordinator").glob("*.txt"))


@pytest.mark.parametrize("path", TRANSCRIPTS, ids=lambda path: path.stem)
def test_transcript(path: Path, request: pytest.FixtureRequest) -> None:
    blocks = read(path.read_text())
    player = Player()
    for block in blocks:
        block.effects = [line for command in block.commands for line in player.play(command)]
    if request.config.getoption("--rewrite-transcripts"):
        path.write_text(write(blocks))
    assert write(blocks) == path.read_text()


def test_there_are_transcripts() -> None:
    assert len(TRANSCRIPTS) >= 8
