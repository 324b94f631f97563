"""What MPI launchers say, and how they are asked; variables and answers are those of Open MPI 4.1 and Hydra 4.0."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from rallypoint.base.errors import UsageError
from rallypoint.cluster import mpi
from rallypoint.cluster.ask import Answer, ask
from rallypoint.cluster.findings import Cluster, Machine, Nothing, Refusal

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "593362945",
}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1", "PMI_FD": "6"}


def found(environ: dict[str, str]) -> Cluster:
    finding = mpi.find(environ, Machine())
    assert isinstance(finding, Cluster)
    return finding


def test_each_family() -> None:
    first, second = found(OPEN_MPI), found(HYDRA)
    assert (first.nodes, first.index, first.ask, first.job_id) == (2, 1, "pmix", "mpi-593362945")
    assert (second.nodes, second.index, second.ask, second.job_id) == (2, 0, "pmi", "")
    assert first.port != found({**OPEN_MPI, "PMIX_NAMESPACE": "593362946"}).port
    without = found({name: text for name, text in OPEN_MPI.items() if name != "PMIX_NAMESPACE"})
    assert (without.ask, without.host) == ("", "")
    assert "--rdzv-backend=c10d --rdzv-endpoint=HOST:29400" in without.wanted["rdzv_endpoint"]


def test_several_ranks_on_a_host() -> None:
    finding = mpi.find({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, Machine())
    assert isinstance(finding, Refusal)
    assert "2 ranks on this host (OMPI_COMM_WORLD_LOCAL_SIZE=2)" in finding.sentence
    assert "mpirun --map-by ppr:1:node --bind-to none rallyrun --nproc-per-node=2" in finding.sentence


def test_what_no_launcher_has_set() -> None:
    assert isinstance(mpi.find({}, Machine()), Nothing)
    assert isinstance(mpi.find({"PMI_SIZE": "2", "PMI_RANK": "0"}, Machine()), Nothing)  # as by srun --mpi=pmi2
    contradiction = mpi.find({**HYDRA, "PMI_RANK": "2"}, Machine())
    assert isinstance(contradiction, Refusal)
    with pytest.raises(UsageError, match="PMI_SIZE='many'"):
        mpi.find({**HYDRA, "PMI_SIZE": "many"}, Machine())


@contextmanager
def launcher(*answers: bytes) -> Iterator[tuple[str, list[bytes]]]:
    """A socket whose other end gives these answers, one for each line that it is sent."""
    ours, theirs = socket.socketpair()
    heard: list[bytes] = []

    def answer() -> None:
        with theirs, theirs.makefile("rb") as lines:
            for each in answers:
                heard.append(lines.readline())
                theirs.sendall(each)

    thread = threading.Thread(target=answer)
    thread.start()
    ours.set_inheritable(True)
    with ours:
        yield str(ours.fileno()), heard
        ours.shutdown(socket.SHUT_RDWR)
        thread.join()


_BEGIN = (
    b"cmd=response_to_init pmi_version=1 pmi_subversion=1 rc=0\n",
    b"cmd=my_kvsname kvsname=kvs_7_0_n1\n",
)
_MET = b"cmd=barrier_out\n"
_END = b"cmd=finalize_ack\n"


def got(value: str) -> bytes:
    return f"cmd=get_result rc=0 msg=success value={value}\n".encode()


@pytest.mark.parametrize(
    ("value", "host"),
    [
        ("no-such-host.invalid/10.0.0.7", "10.0.0.7"),
        ("no-such-host.invalid/fd00::7", "fd00::7"),
        ("10.0.0.8/10.0.0.7", "10.0.0.8"),
        ("localhost/10.0.0.7", "10.0.0.7"),
        ("no-such-host.invalid/a;b", ""),
        ("nothing", ""),
    ],
)
def test_another_rank_hears_the_host_of_rank_0(value: str, host: str) -> None:
    with launcher(*_BEGIN, _MET, got(value), _END) as (descriptor, heard):
        assert ask("pmi", 1, {"PMI_FD": descriptor}) == Answer(host, "kvs_7_0_n1")
    assert heard[0] == b"cmd=init pmi_version=1 pmi_subversion=1\n"
    assert heard[2:] == [b"cmd=barrier_in\n", b"cmd=get kvsname=kvs_7_0_n1 key=rallypoint-host\n", b"cmd=finalize\n"]


def test_rank_0_puts_its_own() -> None:
    put = b"cmd=put_result rc=0 msg=success\n"
    with launcher(*_BEGIN, put, _MET, got("10.0.0.8/10.0.0.7"), _END) as (descriptor, heard):
        ask("pmi", 0, {"PMI_FD": descriptor})
    assert heard[2].startswith(f"cmd=put kvsname=kvs_7_0_n1 key=rallypoint-host value={socket.gethostname()}/".encode())


@pytest.mark.parametrize(
    "answers",
    [
        (),
        (b"",),
        (b"cmd=response_to_init rc=1\n",),
        (_BEGIN[0], b"cmd=my_kvsname kvsname=a;b\n"),
        (*_BEGIN, b"cmd=get_result rc=0\n"),
        (*_BEGIN, _MET, b"cmd=get_result rc=-1 msg=key_not_found\n"),
        (b"x" * 5000,),
        (b"\xff\xfe\n",),
    ],
)
def test_a_launcher_that_does_not_answer_is_told_of_in_a_sentence(answers: tuple[bytes, ...]) -> None:
    with launcher(*answers) as (descriptor, _):
        with pytest.raises(UsageError, match="does not say where rank 0 is") as caught:
            ask("pmi", 1, {"PMI_FD": descriptor})
        assert str(caught.value).isprintable()


def test_a_descriptor_of_our_own_is_left_alone() -> None:
    """A wrapper may close the launcher's; its number is then another's."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        with pytest.raises(UsageError, match="nothing was inherited there"):
            ask("pmi", 1, {"PMI_FD": str(ours.fileno())})
        theirs.setblocking(False)
        with pytest.raises(BlockingIOError):
            theirs.recv(1)


@pytest.mark.parametrize("descriptor", ["", "x", "-1", "99999", "1e3", "9" * 40])
def test_a_descriptor_that_is_none(descriptor: str) -> None:
    with pytest.raises(UsageError, match="--rdzv-endpoint=HOST:29400"):
        ask("pmi", 1, {"PMI_FD": descriptor})
