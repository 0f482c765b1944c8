"""The files for Kubernetes: against its schemas, and what their containers would run, with our own command line."""

import json
import os
import re
import subprocess
import sys
import threading
import tomllib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest
import yaml

from tianji_jax.blueprint import _common_settings
from tianji_jax.cli import _parse
from tianji_jax.commands import FAILED, REFUSED, configured
from tianji_jax.config import load
from tianji_jax.interrupts import PREEMPTED
from tianji_jax.remote_actor import _addresses
from tianji_jax.transport import KeyFileError, load_client_keys, load_server_keys, make_keys

kubernetes_validate = pytest.importorskip("kubernetes_validate", reason="pip install -e '.[test]'")
trainer = pytest.importorskip("kubeflow_trainer_api.models", reason="pip install -e '.[test]'")

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "scripts" / "kubernetes"
COMMON = list(yaml.safe_load_all((FOLDER / "common.yaml").read_text()))
JOBSETS = {name: yaml.safe_load((FOLDER / f"{name}.yaml").read_text()) for name in ("gpu", "tpu")}
ROLES = [(name, role) for name in JOBSETS for role in ("learner", "actor")]

RECORD = """#!/bin/bash
python3 -c 'import json, sys; print(json.dumps(sys.argv[1:]))' "$@"
"""

DETECT = """
import builtins, io, socket, sys
import kubernetes
from tianji_jax.keeper import find_place

def in_cluster():
    kubernetes.client.Configuration.set_default(kubernetes.client.Configuration(host=sys.argv[1]))

namespace, really_open = "/var/run/secrets/kubernetes.io/serviceaccount/namespace", builtins.open
builtins.open = lambda file, *a, **k: io.StringIO("lab") if file == namespace else really_open(file, *a, **k)
socket.gethostbyname = {"tianji-learner-0-1": "10.0.0.2", "tianji-learner-0-0.tianji": "10.0.0.1"}.__getitem__
kubernetes.config.load_incluster_config = in_cluster
print(find_place(None, None))
"""


def job(name: str, role: str) -> dict[str, Any]:
    """The Job's spec of one of the replicated jobs."""
    (found,) = (r["template"]["spec"] for r in JOBSETS[name]["spec"]["replicatedJobs"] if r["name"] == role)
    return found


def pod(name: str, role: str) -> dict[str, Any]:
    return job(name, role)["template"]["spec"]


def run_container(container: dict[str, Any], folder: Path, index: int = 0) -> str:
    """What a container prints whose volumes lie in `folder`, with a `tianji` that prints its arguments."""
    path = folder / "bin"
    path.mkdir(exist_ok=True)
    for script, text in {"tianji": RECORD, "learner.sh": (FOLDER / "learner.sh").read_text()}.items():
        (path / script).write_text(text)
        (path / script).chmod(0o755)
    environment = {"PATH": f"{path}:{os.environ['PATH']}", "JOB_COMPLETION_INDEX": str(index), "JOBSET_NAME": "tianji"}
    environment |= {e["name"]: e["value"] for e in container.get("env", []) if "value" in e}
    words = [
        re.sub(r"(?<![\w.])/(runs|keys|secret)\b", rf"{folder}/\1", word)
        for word in [*container["command"], *container.get("args", [])]
    ]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=True)
    return done.stdout


def test_common_objects_fit_their_schemas() -> None:
    for document in COMMON:
        for version in ("1.31", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(document, version, strict=True)


@pytest.mark.parametrize("name", JOBSETS)
def test_jobsets_fit_their_schema(name: str) -> None:
    jobset = JOBSETS[name]
    # The models leave out what they do not know.
    assert trainer.JobsetV1alpha2JobSet.from_dict(jobset).to_dict() == jobset
    for rule in jobset["spec"]["failurePolicy"]["rules"]:
        assert rule["action"] in trainer.JobsetV1alpha2FailurePolicyRule.model_fields["action"].description
    for replicated in jobset["spec"]["replicatedJobs"]:
        whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, **replicated["template"]}
        whole["metadata"] |= replicated["template"].get("metadata", {})
        for version in ("1.31", kubernetes_validate.latest_version()):
            kubernetes_validate.validate(whole, version, strict=True)


def test_schemas_know_mistakes() -> None:
    jobset = json.loads(json.dumps(JOBSETS["gpu"]))
    jobset["spec"]["failurePolicy"]["restarts"] = 3
    assert trainer.JobsetV1alpha2JobSet.from_dict(jobset).to_dict() != jobset
    spec = job("gpu", "learner") | {"parallelism": "2"}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({"apiVersion": "batch/v1", "kind": "Job", "spec": spec}, "1.31", strict=True)


@pytest.mark.parametrize("name", JOBSETS)
def test_names_are_those_of_something(name: str) -> None:
    """What the API server and JobSet's webhook check beyond the schema."""
    spec = JOBSETS[name]["spec"]
    roles = {replicated["name"] for replicated in spec["replicatedJobs"]}
    rules = spec["failurePolicy"]["rules"]
    for targets in [spec["successPolicy"], *rules]:
        assert set(targets.get("targetReplicatedJobs", [])) <= roles
    known = {(document["kind"], document["metadata"]["name"]) for document in COMMON}
    secrets = set(re.findall(r"create secret generic (\S+)", (FOLDER / "common.yaml").read_text()))
    for role in roles:
        found = pod(name, role)
        # A Job with a podFailurePolicy has to have this.
        assert found["restartPolicy"] == "Never"
        assert job(name, role)["parallelism"] == job(name, role)["completions"]
        if "serviceAccountName" in found:
            assert ("ServiceAccount", found["serviceAccountName"]) in known
        for volume in found["volumes"]:
            if "secret" in volume:
                assert volume["secret"]["secretName"] in secrets
            if "persistentVolumeClaim" in volume:
                assert ("PersistentVolumeClaim", volume["persistentVolumeClaim"]["claimName"]) in known
        volumes = {volume["name"] for volume in found["volumes"]}
        for container in [*found.get("initContainers", []), *found["containers"]]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
        policy = next(document for document in COMMON if document["kind"] == "NetworkPolicy")
        selector = policy["spec"]["podSelector"]["matchLabels"]
        assert selector.items() <= job(name, role)["template"]["metadata"]["labels"].items()


@pytest.mark.parametrize(("name", "role"), ROLES)
def test_exit_codes_lead_where_they_should(name: str, role: str) -> None:
    def action(code: int) -> str:
        for rule in job(name, role)["podFailurePolicy"]["rules"]:
            codes = rule.get("onExitCodes")
            if codes is not None and codes["containerName"] == role and code in codes["values"]:
                return rule["action"]
        return "Count"

    assert [action(code) for code in (PREEMPTED, REFUSED, FAILED, 137)] == ["Ignore", "FailJob", "Count", "Count"]
    policy = JOBSETS[name]["spec"]["failurePolicy"]
    # A Job that FailJob ended has this reason; any other is made again, which is JobSet's default.
    (rule,) = policy["rules"]
    assert (rule["action"], rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])
    assert policy["maxRestarts"] > 0


@pytest.mark.parametrize("name", JOBSETS)
def test_what_the_containers_run_is_understood_and_agrees(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    learners = job(name, "learner")["parallelism"]
    hosts, configs = set(), []
    for role in ("learner", "actor"):
        (container,) = pod(name, role)["containers"]
        assert container["name"] == role
        for index in range(job(name, role)["parallelism"]):
            options = _parse(json.loads(run_container(container, tmp_path, index)))
            assert options.command.__name__ == role
            if role == "learner":
                configs.append(configured(options))
                assert options.coordinator is options.process is options.resume is None
            else:
                configs.append(load(options.config, options.overrides))
                hosts.add(_addresses(options.connect).trajectories)
    assert all(_common_settings(config) == _common_settings(configs[0]) for config in configs)
    assert {f"tcp://tianji-learner-0-{index}.tianji:5555" for index in range(learners)} == hosts
    assert configs[0].actors.listen == "tcp://0.0.0.0:5555"
    assert configs[0].run.directory / configs[0].run.name == tmp_path / "runs" / "tianji"
    mounts = {mount["mountPath"] for mount in pod(name, "learner")["containers"][0]["volumeMounts"]}
    assert {"/keys", "/runs"} <= mounts


@pytest.mark.parametrize("name", JOBSETS)
def test_a_run_is_started_gone_on_with_or_begun_anew(name: str, tmp_path: Path) -> None:
    (container,) = pod(name, "learner")["containers"]
    run = tmp_path / "runs" / "tianji"

    def resumed(index: int) -> Path | None:
        return _parse(json.loads(run_container(container, tmp_path, index))).resume

    assert resumed(0) is None
    run.mkdir(parents=True)
    assert resumed(1) is None
    assert run.exists(), "learner 0 moves it, before any has joined"
    assert resumed(0) is None
    assert not run.exists()
    assert len(list(run.parent.iterdir())) == 1
    # A run makes the folder when it starts; this one was cut off in its first save.
    (run / "checkpoints" / "7.orbax-checkpoint-tmp").mkdir(parents=True)
    assert resumed(0) is None
    assert not run.exists()
    (run / "checkpoints" / "7").mkdir(parents=True)
    assert [resumed(0), resumed(1)] == [run, run]


@pytest.mark.parametrize(("name", "role"), ROLES)
def test_keys_of_a_secret_are_taken(name: str, role: str, tmp_path: Path) -> None:
    (secret,) = (volume["secret"] for volume in pod(name, role)["volumes"] if "secret" in volume)
    make_keys(tmp_path / "made")
    text = (FOLDER / "common.yaml").read_text().replace("\\\n#", "")
    (line,) = re.findall(rf"create secret generic {secret['secretName']} (.*)", text)
    # As a kubelet lays a Secret down: links to links, files for the group as well where there is an fsGroup.
    shared = "fsGroup" in pod(name, role)["securityContext"]
    initial = pod(name, role).get("initContainers", [])
    mounted = tmp_path / ("secret" if initial else "keys")
    (mounted / "..version").mkdir(parents=True)
    (mounted / "..data").symlink_to("..version")
    for source in re.findall(r"--from-file=keys/(\S+)", line):
        file = mounted / "..version" / source
        file.write_bytes((tmp_path / "made" / source).read_bytes())
        file.chmod(secret["defaultMode"] | (0o440 if shared else 0))
        (mounted / source).symlink_to(f"..data/{source}")
    take = load_server_keys if role == "learner" else load_client_keys
    if initial:
        with pytest.raises(KeyFileError, match="open to others"):
            take(mounted)
        (tmp_path / "keys").mkdir()
        run_container(initial[0], tmp_path)
    assert take(tmp_path / "keys") is not None


class Api(BaseHTTPRequestHandler):
    """The little of Kubernetes' API that JAX asks, for one that a Role lets."""

    rules: list[dict[str, Any]]
    used: list[dict[str, Any]]
    server_port: int

    def do_GET(self) -> None:
        url = urlsplit(self.path)
        labels = {"jobset.sigs.k8s.io/jobset-name": "tianji", "job-name": "tianji-learner-0"}
        owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "tianji-learner-0", "uid": "1", "controller": True}
        match url.path:
            case "/api/v1/namespaces/lab/pods" if parse_qs(url.query) == {"fieldSelector": ["status.podIP=10.0.0.2"]}:
                asked = ("", "pods", "list")
                found = {"metadata": {"name": "x", "labels": labels, "ownerReferences": [owner]}}
                answer = {"kind": "PodList", "apiVersion": "v1", "items": [found]}
            case "/apis/batch/v1/namespaces/lab/jobs/tianji-learner-0":
                asked = ("batch", "jobs", "get")
                spec = {key: job("gpu", "learner")[key] for key in ("parallelism", "completions")}
                spec["template"] = {"spec": {"containers": [{"name": "learner"}]}}
                answer = {"kind": "Job", "metadata": {"name": "tianji-learner-0", "labels": labels}, "spec": spec}
            case _:
                raise AssertionError(self.path)
        rule = {key: [word] for key, word in zip(("apiGroups", "resources", "verbs"), asked, strict=True)}
        allowed = rule in self.rules
        self.used.append(rule)
        self.send_response(200 if allowed else 403)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer if allowed else {"kind": "Status"}).encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def api() -> Iterator[type[Api]]:
    """One that allows what the Role of common.yaml does; `server_port` says where."""
    rules = next(document["rules"] for document in COMMON if document["kind"] == "Role")
    handler = type("Allowed", (Api,), {"rules": rules, "used": []})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        handler.server_port = server.server_port
        threading.Thread(target=server.serve_forever).start()
        yield handler
        server.shutdown()


def test_jax_finds_the_learners_of_a_jobset_with_the_permissions_it_gets(api: type[Api]) -> None:
    pytest.importorskip("kubernetes", reason="pip install -e '.[test]'")
    environment = {**os.environ, "KUBERNETES_SERVICE_HOST": "x", "HOSTNAME": "tianji-learner-0-1"}
    environment |= {"JOB_COMPLETION_INDEX": "1", "no_proxy": "*"}
    command = [sys.executable, "-c", DETECT, f"http://127.0.0.1:{api.server_port}"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert "Place(host='tianji-learner-0-0.tianji', port=55527, rank=1, size=2)" in done.stdout, done.stderr
    assert all(rule in api.used for rule in api.rules), "more is allowed than JAX asks for"


def test_the_image_is_made_of_files_that_exist() -> None:
    text = (FOLDER / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.*)$", text, re.M):
        *sources, _ = (word for word in line.split() if not word.startswith("--"))
        assert all((ROOT / source).exists() for source in sources), line
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"EXTRAS=([\w,]+)", text):
        assert set(named.split(",")) <= set(extras)
    (uid,) = re.findall(r"--uid (\d+)", text)
    assert pod("gpu", "learner")["securityContext"]["runAsUser"] == int(uid)
