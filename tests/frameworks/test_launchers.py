"""Other people's launchers under `rallyctl shim run`: the numbers are torch's, and a killed worker comes back."""

from __future__ import annotations

import pytest

from tests.frameworks.launchers import EVERY, LAUNCHERS, UNLOCKED, Launcher, run


@pytest.mark.parametrize("launcher", LAUNCHERS, ids=lambda launcher: launcher.name)
@pytest.mark.timeout(900)
def test_the_numbers_are_torchs(launcher: Launcher) -> None:
    if launcher.version() is None:
        pytest.skip(
            f"{launcher.package} is not installed: {UNLOCKED.get(launcher.package, 'make .venv-frameworks/.ready')}"
        )
    torchs, ours = run(launcher, shim=False, kill=False), run(launcher, shim=True, kill=False)
    assert torchs.code == ours.code == 0, ours.said
    assert torchs.final == ours.final != "", ours.said
    assert (torchs.is_ours, ours.is_ours) == (False, launcher.restarts)

    killed = run(launcher, shim=True, kill=True)
    if not launcher.restarts:
        assert killed.begun == [0]
        return
    assert killed.begun == [0, EVERY], killed.said
    assert killed.final == torchs.final, killed.said
