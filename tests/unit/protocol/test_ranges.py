"""One table limits the numbers of users and those in messages, so that each side accepts what the other sends."""

from __future__ import annotations

from typing import Any

import pytest

from rallypoint.base.endpoint import Endpoint
from rallypoint.base.errors import UsageError, UserError
from rallypoint.cli.convert import config_from_options
from rallypoint.cli.parse import parse
from rallypoint.control.client.dialing import DialTarget
from rallypoint.control.membership.state import Settings
from rallypoint.control.protocol import codec
from rallypoint.control.protocol.messages import CollectKind
from rallypoint.control.protocol.ranges import NUMBERS, is_in_range
from rallypoint.control.protocol.validation import ValidationError, validated
from rallypoint.observe.watching.client import WatcherSession
from rallypoint.observe.watching.messages import CollectCommand, ResizeCommand
from rallypoint.rendezvous.backends.options import rank_hint, settings_of
from rallypoint.rendezvous.params import RendezvousParameters

VALUES: dict[str, Any] = Settings("j", 1, 1)._asdict()
OPTIONS = [name for name, value in VALUES.items() if type(value) in {int, float}]
"""The numbers in the settings."""


@pytest.mark.parametrize("argument", ["--max-restarts=3000000000", "--nproc-per-node=65537", "--nnodes=1:65537"])
def test_flags_out_of_range_are_refused(argument: str) -> None:
    def launched(*arguments: str) -> None:
        config, _, _ = config_from_options(parse([*arguments, "s.py"], {}), {})
        RendezvousParameters("c10d", "h:1", "job", config.min_nodes, config.max_nodes)

    with pytest.raises(UserError, match=r"out of range|requests|cannot have"):
        launched(argument)
    launched("--max-restarts=2147483648", "--nproc-per-node=65536", "--nnodes=1:65536")


OF_OTHERS = {"min_nodes", "max_nodes", "restart_window", "restarts_in_window"}
"""Settings that have no key of their own; the last two have `restart_budget`."""


@pytest.mark.parametrize("name", [each for each in OPTIONS if each not in OF_OTHERS])
def test_options_out_of_range_are_refused(name: str) -> None:
    def settings(value: Any) -> Settings:
        return settings_of(RendezvousParameters("c10d", "h:1", "job", 1, 65536, **{name: value}))

    with pytest.raises(UserError, match=name):
        settings(1 << 41)
    assert validated(settings(1)) == settings(1)
    assert all(is_in_range(each, value) for each, value in settings(1)._asdict().items() if each in OPTIONS)


@pytest.mark.parametrize("name", OPTIONS)
def test_settings_out_of_range_are_refused_on_receipt(name: str) -> None:
    least, most = NUMBERS[name]
    for value in (least - 1, most + 1):
        with pytest.raises(ValidationError, match=name):
            validated(Settings(**(VALUES | {name: value})))


def test_ranks_out_of_range_are_refused() -> None:
    with pytest.raises(UsageError, match="node rank 65536 is out of range; the maximum is 65535"):
        rank_hint(RendezvousParameters("c10d", "h:1", "job", 1, 65536, rank=65536))
    assert rank_hint(RendezvousParameters("c10d", "h:1", "job", 1, 65536, rank=65535)) == 65535


@pytest.mark.parametrize(
    "request_",
    [CollectCommand("a@b", CollectKind.LOGS, (), 1 << 40), ResizeCommand("a@b", 1, 1 << 20)],
)
def test_requests_out_of_range_are_not_sent(request_: Any) -> None:
    session = WatcherSession(DialTarget(Endpoint("h", 1)), "job")
    with pytest.raises(UsageError, match="is refused; it must be from"):
        session.send(request_)
    with pytest.raises(codec.NotSendable):
        codec.sendable(request_)
