"""`deploy/kubernetes`, rendered by kubectl, is valid for the oldest and the newest supported Kubernetes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
from kubeflow_trainer_api.models import JobsetV1alpha2JobSet, TrainerV1alpha1TrainingRuntime, TrainerV1alpha1TrainJob

from rallypoint.cli.verdict import CODES, IN_PLACE
from rallypoint.failures.cause import Ending
from tests.deploy.manifests import (
    COMPONENTS,
    FOLDER,
    KUSTOMIZATIONS,
    SAMPLES,
    Manifest,
    jobs_in,
    of_kind,
    pod_of,
    rendered,
    sample,
    the_job,
    variables,
    with_component,
)

VERSIONS = ("1.29", "1.37")
IN_PLACE_VERSIONS = ("1.35", "1.37")
"""Before 1.35, rules for the restart of a container need a feature gate."""
PAGE = FOLDER.parents[1] / "docs" / "how-to" / "kubernetes.md"
_CUSTOM = {
    "JobSet": JobsetV1alpha2JobSet,
    "TrainingRuntime": TrainerV1alpha1TrainingRuntime,
    "TrainJob": TrainerV1alpha1TrainJob,
}
_OF_NO_USE = {CODES[each] for each in (Ending.PROGRAM, Ending.CONFIGURATION, Ending.REPEATED, Ending.STOPPED)}

WITH_A_JOB = [*(each for each in KUSTOMIZATIONS if each != "control-plane"), *SAMPLES]


def validate(manifest: Manifest, versions: tuple[str, ...] = VERSIONS) -> None:
    for version in versions:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", KUSTOMIZATIONS)
def test_what_is_rendered_is_valid(name: str) -> None:
    manifests = rendered(name)
    assert manifests
    for each in manifests:
        validate(each)


def test_the_overlay_of_the_page_makes_the_job_of_a_users_own_program(tmp_path: Path) -> None:
    (overlay,) = re.findall(r"```yaml\n(apiVersion: kustomize.*?)```", PAGE.read_text(), re.S)
    shutil.copytree(FOLDER / "job", tmp_path / "job")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "kustomization.yaml").write_text(overlay)
    manifests = rendered(str(tmp_path / "mine"))
    for each in manifests:
        validate(each)
    (container,) = pod_of(of_kind(manifests, "Job"))["containers"]
    (example,) = pod_of(of_kind(rendered("job"), "Job"))["containers"]
    assert container["image"] == "ghcr.io/me/train:7"
    assert container["args"] == ["my_train.py", "--lr=0.1"]
    assert container["command"] == example["command"]
    assert variables(container) == variables(example) | {"PET_NPROC_PER_NODE": "4"}
    assert of_kind(manifests, "PersistentVolumeClaim")["spec"]["storageClassName"] == "nfs"


@pytest.mark.parametrize("name", COMPONENTS)
def test_components_change_what_they_are_for_and_leave_the_rest(name: str, tmp_path: Path) -> None:
    manifests = with_component(name, tmp_path)
    for each in manifests:
        if each["kind"] != "PodMonitor":  # of the Prometheus operator, not of Kubernetes
            validate(each, IN_PLACE_VERSIONS if name == "in-place" else VERSIONS)
    _CHECK[name](manifests)


def _check_network_policy(manifests: tuple[Manifest, ...], workload: str, monitored: str) -> None:
    policy, pods = of_kind(manifests, "NetworkPolicy")["spec"], of_kind(manifests, workload)
    (container,) = pod_of(pods)["containers"]
    names = {each["name"] for each in container["ports"]}
    among_themselves, monitoring = policy["ingress"]
    assert {each["port"] for each in among_themselves.get("ports", [])} <= names
    assert {each["port"] for each in monitoring["ports"]} == {monitored}
    labels = pods["spec"]["template"]["metadata"].get("labels") if workload == "Deployment" else _JOB_LABELS
    assert policy["podSelector"]["matchLabels"] == labels


def _check_monitoring(manifests: tuple[Manifest, ...]) -> None:
    monitor, job = of_kind(manifests, "PodMonitor")["spec"], of_kind(manifests, "Job")
    (container,) = pod_of(job)["containers"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    assert endpoint["port"] in {each["name"] for each in container["ports"]}
    assert monitor["selector"]["matchLabels"] == _JOB_LABELS
    (secret,) = [each["secret"] for each in pod_of(job)["volumes"] if each["name"] == "secret"]
    paths = {f"/etc/rallypoint/{each['path']}": each["key"] for each in secret["items"]}
    env, token = variables(container), endpoint["authorization"]["credentials"]
    assert (paths[env["RALLYPOINT_HTTP_TOKEN_FILE"]], secret["secretName"]) == (token["key"], token["name"])
    assert env["RALLYPOINT_SECRET_FILE"] in paths


def _check_capability(manifests: tuple[Manifest, ...], capability: str) -> None:
    pod = pod_of(of_kind(manifests, "Job"))
    (container,) = pod["containers"]
    assert container["securityContext"]["capabilities"] == {"add": [capability], "drop": ["ALL"]}
    assert pod["securityContext"]["runAsUser"] == 0, "Kubernetes gives an added capability to no other user"


def _check_queue(manifests: tuple[Manifest, ...]) -> None:
    job = of_kind(manifests, "Job")
    assert job["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "training"}
    assert job["spec"]["suspend"]


def _check_in_place(manifests: tuple[Manifest, ...]) -> None:
    (container,) = pod_of(of_kind(manifests, "Job"))["containers"]
    (example,) = pod_of(of_kind(rendered("job"), "Job"))["containers"]
    assert [each.replace("in-place", "classified") for each in container["command"]] == example["command"]
    (rule,) = container["restartPolicyRules"]
    assert (rule["action"], rule["exitCodes"]) == ("Restart", {"operator": "In", "values": [IN_PLACE]})
    assert container["restartPolicy"] == "Never", "which Kubernetes wants beside rules, and for all other codes"
    assert not _OF_NO_USE & {IN_PLACE}


def _check_priority(manifests: tuple[Manifest, ...]) -> None:
    name = of_kind(manifests, "PriorityClass")["metadata"]["name"]
    assert pod_of(of_kind(manifests, "Deployment"))["priorityClassName"] == name


_JOB_LABELS = {"batch.kubernetes.io/job-name": "train"}
_CHECK: dict[str, Callable[[tuple[Manifest, ...]], None]] = {
    "control-plane-network-policy": partial(_check_network_policy, workload="Deployment", monitored="http"),
    "in-place": _check_in_place,
    "monitoring": _check_monitoring,
    "network-policy": partial(_check_network_policy, workload="Job", monitored="health"),
    "priority": _check_priority,
    "queue": _check_queue,
    "rdma": partial(_check_capability, capability="IPC_LOCK"),
    "stacks": partial(_check_capability, capability="SYS_PTRACE"),
}


def test_a_pod_with_a_health_port_is_probed() -> None:
    for name in WITH_A_JOB:
        (container,) = pod_of(the_job(name))["containers"]
        probes = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
        assert probes == {"startup": "/livez", "liveness": "/livez", "readiness": "/readyz"}, name


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_are_valid(name: str) -> None:
    """Those of other projects by the models that these publish, and the Jobs in them as Jobs."""
    for each in sample(name):
        read = _CUSTOM[each["kind"]].from_dict(each)
        assert read is not None
        assert not unknown(each, read.to_dict()), "fields that the model does not have"
        for job in jobs_in(each):
            validate(job)


def unknown(given: Any, kept: Any, path: str = "") -> list[str]:
    """The fields that were given and not kept."""
    if isinstance(given, dict):
        missing = [f"{path}.{name}" for name in given if name not in kept]
        return missing + [
            each for name in given if name in kept for each in unknown(given[name], kept[name], f"{path}.{name}")
        ]
    if isinstance(given, list):
        return [each for index, item in enumerate(given) for each in unknown(item, kept[index], f"{path}[{index}]")]
    return []


@pytest.mark.parametrize("name", WITH_A_JOB)
def test_a_pod_is_tried_again_as_its_exit_code_says(name: str) -> None:
    job = the_job(name)
    spec, pod = job["spec"], pod_of(job)
    ignored, fails = spec["podFailurePolicy"]["rules"]
    (container,) = pod["containers"]
    assert ignored["action"] == "Ignore", "a disruption is seen before the code with which a pod answers to it"
    assert fails["action"] == "FailJob"
    assert set(fails["onExitCodes"]["values"]) == _OF_NO_USE
    assert fails["onExitCodes"]["containerName"] == container["name"]
    assert "--exit-codes=classified" in [*container["command"], *container.get("args", [])]
    assert (pod["restartPolicy"], spec["podReplacementPolicy"]) == ("Never", "Failed"), "as the policy needs"


@pytest.mark.parametrize("name", WITH_A_JOB)
def test_numbers_that_are_said_twice_are_the_same(name: str) -> None:
    job = the_job(name)
    spec, pod = job["spec"], pod_of(job)
    (container,) = pod["containers"]
    env = variables(container)
    assert env["RALLYPOINT_TERMINATION_GRACE"] == str(pod["terminationGracePeriodSeconds"])
    if "JOB_COMPLETIONS" in env:
        assert env["JOB_COMPLETIONS"] == str(spec["completions"]) == str(spec["parallelism"])
    ports = {each["name"]: each["containerPort"] for each in container.get("ports", [])}
    assert str(ports.get("health", "")) == env.get("TORCHELASTIC_HEALTH_CHECK_PORT", "")
    assert container["securityContext"]["readOnlyRootFilesystem"], "which the tests of pods take for granted"
    mounts = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert set(mounts) == {each["name"] for each in pod["volumes"]}
    assert env["RALLYPOINT_SECRET_FILE"].startswith(mounts["secret"] + "/")
    (shm,) = [each for each in pod["volumes"] if each["name"] == "shm"]
    assert (mounts["shm"], shm["emptyDir"]["medium"]) == ("/dev/shm", "Memory")


def test_a_job_whose_pods_change_in_number_says_it_in_no_variable() -> None:
    elastic, fixed = the_job("jobset-elastic.yaml"), the_job("jobset.yaml")
    assert elastic["spec"]["completions"] == elastic["spec"]["parallelism"], "which are changed together"
    (container,), (other,) = pod_of(elastic)["containers"], pod_of(fixed)["containers"]
    same = {name: value for name, value in variables(other).items() if name != "JOB_COMPLETIONS"}
    assert variables(container) == same | {"PET_NNODES": "1:8"}
    for part in ("env", "command"):
        del container[part], other[part]
    assert elastic == fixed


@pytest.mark.parametrize("name", [each for each in KUSTOMIZATIONS if each != "control-plane"])
def test_pods_find_each_other_by_the_headless_service(name: str) -> None:
    service, job = of_kind(rendered(name), "Service"), of_kind(rendered(name), "Job")
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["publishNotReadyAddresses"], "else those that wait for each other are never found"
    assert service["metadata"]["name"] == pod_of(job)["subdomain"]
    assert service["spec"]["selector"] == {"batch.kubernetes.io/job-name": job["metadata"]["name"]}


def test_the_control_plane_is_found_by_its_service() -> None:
    manifests = rendered("control-plane")
    service, deployment = of_kind(manifests, "Service"), of_kind(manifests, "Deployment")
    budget = of_kind(manifests, "PodDisruptionBudget")
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == budget["spec"]["selector"]["matchLabels"] == labels
    assert (deployment["spec"]["replicas"], deployment["spec"]["strategy"]["type"]) == (1, "Recreate")
    (container,) = pod_of(deployment)["containers"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert ports == {each["name"]: each["port"] for each in service["spec"]["ports"]}
    job = of_kind(rendered("job-at-control-plane"), "Job")
    env = variables(pod_of(job)["containers"][0])
    assert env["PET_RDZV_ENDPOINT"] == f"{service['metadata']['name']}:{ports['rendezvous']}"
    assert env["PET_RDZV_BACKEND"] == "c10d"
