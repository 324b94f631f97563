"""What MPI launchers say; variables are those of Open MPI 4.1 and Hydra 4.0."""

from __future__ import annotations

import pytest

from rallypoint.base.errors import UsageError
from rallypoint.clusters.detect import Cluster, Machine, Nothing, Refusal, find

OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "2",
    "OMPI_COMM_WORLD_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "1",
    "PMIX_NAMESPACE": "593362945",
}
HYDRA = {"PMI_SIZE": "2", "PMI_RANK": "0", "MPI_LOCALNRANKS": "1"}


def found(environ: dict[str, str]) -> Cluster:
    finding = find("mpi", environ, Machine())
    assert isinstance(finding, Cluster)
    return finding


def test_each_family() -> None:
    first, second = found(OPEN_MPI), found(HYDRA)
    assert (first.nodes, first.index, first.host, first.job_id) == (2, 1, "", "mpi-593362945")
    assert (second.nodes, second.index, second.host, second.job_id) == (2, 0, "", "")
    assert first.port != found({**OPEN_MPI, "PMIX_NAMESPACE": "593362946"}).port
    assert "--rdzv-backend=c10d --rdzv-endpoint=HOST:29400" in first.wanted["rdzv_endpoint"]


def test_a_single_rank_meets_itself() -> None:
    finding = find(
        "mpi", {**OPEN_MPI, "OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"}, Machine(hostname="n1")
    )
    assert isinstance(finding, Cluster)
    assert (finding.nodes, finding.host, finding.hosts_here) == (1, "n1", True)
    assert finding.port > 0


def test_several_ranks_on_a_host() -> None:
    finding = find("mpi", {**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, Machine())
    assert isinstance(finding, Refusal)
    assert "2 ranks on this host (OMPI_COMM_WORLD_LOCAL_SIZE=2)" in finding.sentence
    assert "mpirun --map-by ppr:1:node --bind-to none rallyrun --nproc-per-node=2" in finding.sentence


def test_what_no_launcher_has_set() -> None:
    assert isinstance(find("mpi", {}, Machine()), Nothing)
    assert isinstance(find("mpi", {"PMI_SIZE": "2", "PMI_RANK": "0"}, Machine()), Nothing)  # as by srun --mpi=pmi2
    contradiction = find("mpi", {**HYDRA, "PMI_RANK": "2"}, Machine())
    assert isinstance(contradiction, Refusal)
    with pytest.raises(UsageError, match="PMI_SIZE='many'"):
        find("mpi", {**HYDRA, "PMI_SIZE": "many"}, Machine())
