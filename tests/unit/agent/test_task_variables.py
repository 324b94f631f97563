"""Variables by which an MPI launcher marks the agent as its task, and which of them workers see."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from rallypoint.features.table import OF_A_TASK
from rallypoint.features.task_variables import of_the_task
from tests.environment import undisturbed
from tests.jobs.launching import RALLYRUN
from tests.processes import completed

OPEN_MPI = [
    *("PRTE_LAUNCHED", "PMIX_NAMESPACE", "PMIX_RANK", "PMIX_SERVER_URI41", "PMIX_GDS_MODULE", "PMIX_SERVER_TMPDIR"),
    *("OMPI_UNIVERSE_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE", "OMPI_FILE_LOCATION", "OMPI_ARGV"),
    *("OMPI_MCA_initial_wdir", "OMPI_MCA_num_procs", "OMPI_MCA_orte_hnp_uri", "OMPI_MCA_ess_base_jobid"),
    *("OMPI_MCA_pmix", "OMPI_MCA_shmem_RUNTIME_QUERY_hint", "OMPI_MCA_hwloc_base_binding_policy"),
]
HYDRA = ["HYDI_CONTROL_FD", "PMI_HOSTNAME", "MPI_LOCALNRANKS", "MPI_LOCALRANKID", "PMI_RANK", "PMI_FD", "PMI_SIZE"]
PALS = ["PALS_RANKID", "PALS_APID", "PALS_SPOOL_DIR", "PMI_CONTROL_PORT", "PMI_LOCAL_RANK", "PMI_SHARED_SECRET"]
FLUX = ["FLUX_TASK_RANK", "FLUX_TASK_LOCAL_ID", "PMI_FD", "PMI_RANK"]
SRUN = ["SLURM_PMIX_MAPPING_SERV", "SLURM_PMIXP_ABORT_AGENT_PORT", "SLURM_PMI2_RANK", "PMIX_RANK"]
OTHERS = [
    *("OMPI_MCA_btl", "OMPI_MCA_coll_hcoll_enable", "PMIX_MCA_gds", "PRTE_MCA_rmaps_default_mapping_policy"),
    *("OMPI_CC", "OMPI_CXXFLAGS", "OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "OMPI_DIR"),
    *("PMIX_HOME", "PMIX_ROOT", "PMIX_PREFIX", "PMI_ROOT", "I_MPI_FABRICS", "MPICH_GPU_SUPPORT_ENABLED", "MPI_HOME"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_MPI_TYPE", "FLUX_JOB_ID", "FLUX_URI"),
    *("SLINGSHOT_SVC_IDS", "MV2_USE_CUDA", "UCX_TLS"),
]


@pytest.mark.parametrize("names", [OPEN_MPI, HYDRA, PALS, FLUX, SRUN])
def test_variables_of_a_task(names: list[str]) -> None:
    assert of_the_task([*names, *OTHERS]) == sorted(names)
    assert set(names) & set(OF_A_TASK)


TASK = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-7@1", "OMPI_COMM_WORLD_RANK": "0", "OMPI_MCA_btl": "tcp"}
SHOW = "import json, os\nprint(json.dumps({k: v for k, v in os.environ.items() if k.startswith(('PMI', 'OMPI'))}))\n"
KEPT = {"OMPI_MCA_btl": "tcp"}


@pytest.mark.process
@pytest.mark.parametrize(
    ("flags", "more", "seen", "lines"),
    [
        (["--nproc-per-node=2"], {}, KEPT, 1),
        (["--max-restarts=1"], {}, KEPT, 1),
        (["--max-restarts=1"], {"PMIX_RANK": "3"}, KEPT, 0),
        ([], {}, TASK, 0),
        ([], {"PMI_FD": "9"}, KEPT, 1),
        (["--max-restarts=1", "--worker-env=inherit"], {}, TASK, 0),
        (["--max-restarts=1", "--preload=json"], {}, KEPT, 1),
        (["--nproc-per-node=2", "--worker-env=ompi"], {}, None, 0),
    ],
)
def test_variables_of_workers(
    flags: list[str], more: dict[str, str], seen: dict[str, str] | None, lines: int, tmp_path: Path
) -> None:
    (tmp_path / "show.py").write_text(SHOW)
    env = undisturbed("PMI", "OMPI") | TASK | more
    ran = completed([*RALLYRUN, "--standalone", *flags, "show.py"], env=env, cwd=tmp_path, check=True)
    workers = [json.loads(line) for line in ran.stdout.splitlines()]
    if seen is None:
        assert {worker["OMPI_COMM_WORLD_RANK"] for worker in workers} == {"0", "1"}
        assert not any("PMIX_RANK" in worker for worker in workers)
    else:
        assert workers == [seen] * len(workers)
        assert workers
        assert ran.stderr.count("workers do not inherit PMIX_RANK and ") == lines, ran.stderr
