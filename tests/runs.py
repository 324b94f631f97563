"""The lists of long tests, which only `make test-all` runs.

`make test` runs all other tests: eight minutes on two cores, with the same result for the same commit. A name in a list
is a folder, a file, a test, or a test with its parameters. If several names match a test, the longest decides; a test
without a match belongs to `make test`. Rules for the choice:

1. `make test` has all pure tests, and one real launch for each outcome that a user can meet.
2. It has a handful of faults: in a worker, an agent, a host, etcd's leader, a silent node, another user.
3. Tests that must wait for seconds, that train, or that need a service of the machine (Slurm, a browser) are long.
"""

from __future__ import annotations

import pytest

MARKER = "long"

LEFT_TO_ALL = (
    "tests/aarch64",
    "tests/chaos/test_chaos.py::test_a_job_survives_random_faults",
    "tests/deploy",
    "tests/documents",
    "tests/faults",
    "tests/frameworks",
    "tests/packaging",
    "tests/slurm",
    "tests/conformance/test_compat_programs.py::test_a_program_that_holds_no_store",
    "tests/conformance/test_examples.py",
    "tests/conformance/test_functions.py::test_a_tensor_is_handed_over",
    "tests/conformance/test_functions.py::test_the_same_comes_of_functions[spawn-process_group]",
    "tests/conformance/test_hang_evidence.py",
    "tests/conformance/test_inprocess.py",
    "tests/conformance/test_jax.py",
    "tests/conformance/test_preload.py",
    "tests/conformance/test_shim.py",
    "tests/conformance/test_store_clients.py::test_64_clients_at_once",
    "tests/conformance/test_torch_workers.py",
    "tests/conformance/test_watchdog.py",
    "tests/fuzz/test_targets.py::test_arbitrary_clients_do_not_break_the_store_in_c",
    "tests/fuzz/test_targets.py::test_no_input_breaks",
    "tests/jobs/test_checkpoints.py",
    "tests/jobs/test_control_plane.py::test_servers_outside_the_job_that_come_go_and_stay_away",
    "tests/jobs/test_demo.py",
    "tests/jobs/test_denied.py",
    "tests/jobs/test_etcd.py::test_an_etcd_that_is_away_or_full_or_has_forgotten_everything",
    "tests/jobs/test_etcd.py::test_jobs_that_an_etcd_coordinates_beside_one_another",
    "tests/jobs/test_etcd_bad_input.py",
    "tests/jobs/test_hangs.py::test_a_job_that_gives_signs_of_life_is_left_alone",
    "tests/jobs/test_idle.py",
    "tests/jobs/test_pages.py",
    "tests/jobs/test_shim.py",
    "tests/jobs/test_watchers.py::test_a_job_survives_each_watcher_failing_alone",
    "tests/sim/test_many_nodes.py",
    "tests/unit/cli/test_completion.py",
)
KEPT = (
    "tests/conformance/test_shim.py::test_what_is_torchs_may_be_given_and_caught",
    "tests/documents/test_commands.py::test_the_commands_of[docs-tutorials-first-job]",
    "tests/faults/test_etcd.py::test_the_coordinator_and_another_are_killed_at_once",
    "tests/faults/test_intruders.py",
    "tests/faults/test_kills.py::test_of_a_worker_takes_its_loaders_along",
    "tests/faults/test_kills.py::test_of_the_agent_that_hosts_the_control_plane",
    "tests/faults/test_launch.py::test_a_job_survives_a_host",
    "tests/faults/test_links.py::test_down_for_more_than_the_lease[default]",
    "tests/faults/test_other_users.py",
    "tests/faults/test_pauses.py::test_longer_than_the_lease",
    "tests/fuzz/test_targets.py::test_each_file_that_decodes_is_fuzzed_or_trusted_for_a_reason",
    "tests/jobs/test_pages.py::test_an_agent_shows_the_job_to_who_has_the_token",
    "tests/jobs/test_shim.py::test_a_launch_is_ours_until_it_is_switched_off[by_venv]",
)


def is_long(name: str) -> bool:
    """Whether only `make test-all` runs this test."""
    longest = max((each for each in (*LEFT_TO_ALL, *KEPT) if _begins(name, each)), key=len, default="")
    return longest in LEFT_TO_ALL


def mark(items: list[pytest.Item]) -> None:
    """Mark the tests that only `make test-all` runs."""
    for item in items:
        if is_long(item.nodeid):
            item.add_marker(MARKER)


def _begins(name: str, prefix: str) -> bool:
    return name == prefix or (name.startswith(prefix) and name[len(prefix)] in "/:[")
