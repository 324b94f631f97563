"""Names of backends: ours, registered ones, and those of installed packages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from rallypoint.base.errors import UserError
from rallypoint.rendezvous.handler import RendezvousHandler, RendezvousHandlerRegistry, get_rendezvous_handler
from rallypoint.rendezvous.params import RendezvousParameters
from rallypoint.store.plain import HashStore
from tests.unit.agent.third_party import CountingHandler


def params(backend: str) -> RendezvousParameters:
    return RendezvousParameters(backend, "localhost:0", "job", 1, 1, rank=0)


def counting(params: RendezvousParameters) -> RendezvousHandler:
    return CountingHandler(HashStore(), params.run_id, params.max_nodes)


def another(params: RendezvousParameters) -> RendezvousHandler:
    return counting(params)


@pytest.mark.parametrize("name", ["c10d", "static", "etcd", "etcd-v2"])
def test_our_backends(name: str) -> None:
    handler = get_rendezvous_handler(params(name))
    assert handler.get_backend() == name
    assert handler.shutdown()


def test_registered_backends() -> None:
    registry = RendezvousHandlerRegistry()
    registry.register("counting", counting)
    registry.register("counting", counting)  # the same again is no mistake
    registry.register("mine", counting)
    registry.register("late", "no_such_module:factory")  # it costs nothing until it is used
    assert registry.create_handler(params("counting")).get_run_id() == "job"
    with pytest.raises(UserError, match="'counting' is already registered"):
        registry.register("counting", another)
    with pytest.raises(UserError, match="must not be empty"):
        registry.register("", counting)
    with pytest.raises(RuntimeError, match="'mine' reports the name 'counting'"):
        registry.create_handler(params("mine"))
    with pytest.raises(ImportError, match="no_such_module"):
        registry.create_handler(params("late"))
    with pytest.raises(UserError, match=r"'zookeeper' is unknown; choose one of .*c10d.*static"):
        get_rendezvous_handler(params("zookeeper"))


def install(folder: Path, monkeypatch: pytest.MonkeyPatch, code: str) -> None:
    """Install a package with an entry point `counting`, as pip does."""
    (folder / "visiting_backend.py").write_text(code)
    metadata = folder / "visiting_backend-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: visiting-backend\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[torchrun.handlers]\ncounting = visiting_backend:offer\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "visiting_backend", raising=False)


def test_a_backend_of_an_installed_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The entry point's value is a function that returns the creator (contract section 1.11)."""
    code = "from tests.unit.rendezvous.test_registry import counting\ndef offer(): return counting\n"
    install(tmp_path, monkeypatch, code)
    assert RendezvousHandlerRegistry().create_handler(params("counting")).get_backend() == "counting"
    with pytest.raises(UserError, match="counting"):  # among those that are offered
        RendezvousHandlerRegistry().create_handler(params("missing"))


@pytest.mark.parametrize("code", ["raise ImportError('a rare library')", "def offer(): raise OSError('no licence')"])
def test_a_broken_plug_in_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: str
) -> None:
    install(tmp_path, monkeypatch, code)
    with pytest.raises(UserError, match="'counting'"):
        RendezvousHandlerRegistry().create_handler(params("counting"))
    assert "plug-in 'counting' cannot be loaded" in caplog.text
    assert "a rare library" in caplog.text or "no licence" in caplog.text


@pytest.mark.parametrize(
    ("backend", "flag", "least", "refused"),
    [
        ("c10d", "--rdzv-endpoint", 2, "set the same port on all nodes with --rdzv-endpoint"),
        ("static", "--master-addr", 2, "set the same port on all nodes with --master-port"),
        ("static", "PET_MASTER_ADDR", 1, "set the same port on all nodes with PET_MASTER_PORT"),  # it waits for all
        ("c10d", "--rdzv-endpoint", 1, ""),  # one node is enough, and it knows the port
    ],
)
def test_a_port_unknown_to_required_nodes_is_refused(backend: str, flag: str, least: int, refused: str) -> None:
    """The nodes would wait for one another until the join timeout."""
    parameters = RendezvousParameters(backend, "127.0.0.1:0", "job", least, 2, rank=0)
    parameters.endpoint_flag = flag
    if not refused:
        get_rendezvous_handler(parameters)
        return
    with pytest.raises(UserError, match=f"cannot know the port that the kernel chooses on 127.0.0.1 .*; {refused}"):
        get_rendezvous_handler(parameters)
