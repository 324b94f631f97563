from __future__ import annotations

import pytest

from rallypoint.base.errors import UserError
from rallypoint.cli.later import refuse_unfinished
from rallypoint.cli.parse import parse


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--rdzv-backend=etcd"], "--rdzv-backend=etcd does"),
        (["--rdzv-backend=etcd-v2"], "--rdzv-backend=etcd-v2 does"),
    ],
)
def test_refused(arguments: list[str], said: str) -> None:
    with pytest.raises(UserError, match=f"^{said}"):
        refuse_unfinished(parse([*arguments, "s.py"], {}))


def test_refused_from_the_environment() -> None:
    with pytest.raises(UserError, match=r"^PET_RDZV_BACKEND=etcd does not work"):
        refuse_unfinished(parse(["s.py"], {"PET_RDZV_BACKEND": "etcd"}))


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--logs-specs=default"],
        ["--event-log-handler=null"],
        ["--start-method=forkserver", "--monitor-interval=3"],
        ["--standalone", "--rdzv-backend=etcd"],
    ],
)
def test_accepted(arguments: list[str]) -> None:
    refuse_unfinished(parse([*arguments, "s.py"], {"PET_VIRTUAL_LOCAL_RANK": "0"}))
