"""Signals that arrive while a launch is prepared."""

from __future__ import annotations

import asyncio
import signal

import pytest

from rallypoint.base.errors import SignalException
from rallypoint.clusters.remote.inputs import Host
from rallypoint.clusters.remote.job import Plan, _Launch
from rallypoint.clusters.remote.ssh import SshOptions


@pytest.mark.parametrize("last", [True, False], ids=["with the end of the preparation", "before it"])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=str)
def test_a_signal_before_the_start_ends_the_launch(number: signal.Signals, last: bool) -> None:
    launch = _Launch(Plan([Host("node1")], ["true"], "/", {}, SshOptions((), "python3", 10, 30), 30.0))

    async def prepared() -> None:
        launch._heard(signal.SIGUSR1)  # for the workers, of which there are none yet
        launch._heard(number)
        if not last:
            await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt if number == signal.SIGINT else SignalException):
        asyncio.run(launch._until_signalled(prepared()))


def test_other_signals_do_not_end_it() -> None:
    launch = _Launch(Plan([Host("node1")], ["true"], "/", {}, SshOptions((), "python3", 10, 30), 30.0))

    async def prepared() -> None:
        launch._heard(signal.SIGUSR1)

    asyncio.run(launch._until_signalled(prepared()))
