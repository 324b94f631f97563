"""What a pod of an Indexed Job says."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rallypoint.base.errors import UsageError
from rallypoint.clusters.detect import Cluster, Machine, Nothing, Refusal, find
from tests.effort import examples

KUBELET = """# Kubernetes-managed hosts file.
127.0.0.1\tlocalhost
::1\tlocalhost ip6-localhost ip6-loopback
10.244.1.5\ttrain-1.workers.research.svc.cluster.local\ttrain-1
"""
POD = Machine(hostname="train-1", hosts_file=KUBELET, cpu_quota="250000 100000\n")
JOB = {"JOB_COMPLETION_INDEX": "1", "JOB_COMPLETIONS": "4"}


def found(environ: dict[str, str], machine: Machine = POD) -> Cluster:
    finding = find("k8s", environ, machine)
    assert isinstance(finding, Cluster)
    return finding


def test_a_pod_with_a_headless_service() -> None:
    cluster = found(JOB)
    assert (cluster.title, cluster.nodes, cluster.index) == ("Kubernetes Job train", 4, 1)
    assert (cluster.host, cluster.port) == ("train-0.workers.research.svc.cluster.local", 29400)
    assert (cluster.job_id, cluster.cpus, cluster.hosts_here) == ("k8s-train", 3, False)


def test_the_service_may_be_named() -> None:
    assert found({**JOB, "RALLYPOINT_SERVICE": "other"}).host == "train-0.other"
    without = found(JOB, Machine(hostname="train-1", hosts_file="10.244.1.5\ttrain-1\n"))
    assert without.host == ""
    assert "set subdomain in the pod's template" in without.wanted["rdzv_endpoint"]
    bad = found({**JOB, "RALLYPOINT_SERVICE": "a b\x1b"})
    assert bad.host == ""
    assert bad.wanted["rdzv_endpoint"].isprintable()


def test_what_the_pod_does_not_know() -> None:
    cluster = found({"JOB_COMPLETION_INDEX": "1"})
    assert cluster.nodes is None
    assert "set JOB_COMPLETIONS" in cluster.wanted["nnodes"]
    renamed = found(JOB, Machine(hostname="gpu17", hosts_file=KUBELET))
    assert (renamed.host, renamed.job_id) == ("", "")
    assert "'gpu17' is not <job>-1" in renamed.wanted["rdzv_endpoint"]


def test_a_pod_of_a_job_set() -> None:
    hosts = "10.244.1.9\ttune-workers-0-2.tune.default.svc.cluster.local\ttune-workers-0-2\n"
    cluster = found({**JOB, "JOB_COMPLETION_INDEX": "2"}, Machine(hostname="tune-workers-0-2", hosts_file=hosts))
    assert cluster.host == "tune-workers-0-0.tune.default.svc.cluster.local"


def test_what_is_no_indexed_job() -> None:
    assert isinstance(find("k8s", {"JOB_COMPLETIONS": "4"}, POD), Nothing)
    beyond = find("k8s", {**JOB, "JOB_COMPLETIONS": "1"}, POD)
    assert isinstance(beyond, Refusal)
    with pytest.raises(UsageError, match="JOB_COMPLETION_INDEX='one'"):
        find("k8s", {**JOB, "JOB_COMPLETION_INDEX": "one"}, POD)


@pytest.mark.parametrize(
    ("quota", "cpus"), [("max 100000\n", None), ("50000 100000\n", 1), ("0 0", None), ("", None), ("400000 100000", 4)]
)
def test_processors_by_quota(quota: str, cpus: int | None) -> None:
    assert found(JOB, Machine(hostname="train-1", hosts_file=KUBELET, cpu_quota=quota)).cpus == cpus


@settings(max_examples=examples(200))
@given(st.text(max_size=40) | st.text(max_size=40).map("{}-1".format), st.text(max_size=200), st.text(max_size=40))
def test_any_machine_is_looked_at_in_peace(hostname: str, hosts: str, service: str) -> None:
    machine = Machine(hostname=hostname, hosts_file=hosts)
    cluster = found({**JOB, "RALLYPOINT_SERVICE": service}, machine)
    assert cluster.title.isprintable()
    assert cluster.wanted["rdzv_endpoint"].isprintable()
