"""The files for containers: their commands are parsed, and every path and port is declared.

No container runs here. The schema of Kubernetes is that of the package kubernetes-validate.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from fedshot.cli.main import make_parser

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "examples" / "deploy"
DOCKERFILE = (DEPLOY / "Dockerfile").read_text(encoding="utf-8")
MANIFESTS = [
    document
    for path in sorted(DEPLOY.glob("kubernetes.*.yaml"))
    for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]
PATHS = ("config", "folder", "tests", "out", "ca", "key", "data", "state")
WRITTEN = {("server", "folder"), ("run", "out"), ("node", "state")}


class Container(NamedTuple):
    """What a file says of a container; `mounts` are paths in it -> whether it can write there."""

    words: list[str]
    image: str
    mounts: dict[str, bool]
    ports: set[int]
    check: str
    safe: bool

    @property
    def options(self) -> argparse.Namespace:
        options, rest = make_parser().parse_known_args(self.words)
        assert not rest
        return options


def of_compose(path: Path) -> list[Container]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    made = []
    for service in found["services"].values():
        publishing = service.get("network_mode", "").removeprefix("service:")
        published = found["services"][publishing] if publishing else service
        volumes = [volume.split(":") for volume in service["volumes"]]
        mounts = {words[1]: words[2:] != ["ro"] for words in volumes}
        for secret in service.get("secrets", []):
            assert secret in found["secrets"]
            mounts[f"/run/secrets/{secret}"] = False
        build = (path.parent / service["build"]["context"]).resolve()
        assert (build / service["build"]["dockerfile"]).read_text(encoding="utf-8") == DOCKERFILE
        made.append(Container(
            service["command"], service["image"], mounts,
            {int(port.split(":")[-1]) for port in published["ports"]},
            service["healthcheck"]["test"][-1],
            service["read_only"] and service["cap_drop"] == ["ALL"]
            and service["user"] != "root" and "/tmp:exec" in service["tmpfs"][0],
        ))  # fmt: skip
    return made


def of_kubernetes(document: dict[str, Any]) -> list[Container]:
    spec = document["spec"]["template"]["spec"]
    volumes, made = {volume["name"] for volume in spec["volumes"]}, []
    claims = {d["metadata"]["name"] for d in MANIFESTS if d["kind"] == "PersistentVolumeClaim"}
    for volume in spec["volumes"]:
        if claim := volume.get("persistentVolumeClaim"):
            assert claim["claimName"] in claims
    for one in [*spec.get("initContainers", []), *spec["containers"]]:
        assert {mount["name"] for mount in one["volumeMounts"]} <= volumes
        assert any(mount["mountPath"] == "/tmp" for mount in one["volumeMounts"])
        ports = {port["name"]: port["containerPort"] for port in one["ports"]}
        probes = [found["httpGet"] for name, found in one.items() if name.endswith("Probe")]
        inner, outer = one["securityContext"], spec["securityContext"]
        made.append(Container(
            one["args"], one["image"],
            {m["mountPath"]: not m.get("readOnly", False) for m in one["volumeMounts"]},
            set(ports.values()), " ".join(f":{ports[p['port']]}{p['path']}" for p in probes),
            inner["readOnlyRootFilesystem"] and not inner["allowPrivilegeEscalation"]
            and inner["capabilities"] == {"drop": ["ALL"]} and outer["runAsNonRoot"],
        ))  # fmt: skip
    return made


CONTAINERS = [
    *(one for path in sorted(DEPLOY.glob("compose.*.yaml")) for one in of_compose(path)),
    *(one for document in MANIFESTS if "template" in document["spec"]
      for one in of_kubernetes(document)),
]  # fmt: skip


@pytest.mark.parametrize("container", CONTAINERS, ids=lambda one: " ".join(one.words[:2]))
def test_a_container_has_every_path_and_port_of_its_command(container: Container) -> None:
    options = container.options
    for name in PATHS:
        if path := getattr(options, name, None):
            holding = [m for m in container.mounts if Path(path).is_relative_to(m)]
            assert holding, f"--{name} {path} is not mounted"
            if (options.action, name) in WRITTEN:
                assert container.mounts[max(holding, key=len)], f"{path} cannot be written"
    metrics = int(options.metrics.rpartition(":")[2])
    assert {metrics, getattr(options, "port", metrics)} <= container.ports
    assert f":{metrics}/healthz" in container.check
    assert container.safe
    assert container.image == "fedshot"


def test_all_parts_of_a_federation_are_there_twice() -> None:
    assert sorted(one.options.action for one in CONTAINERS) == sorted(2 * ["node", "run", "server"])


def test_the_image_is_built_of_files_that_exist_and_runs_fedshot_as_a_user() -> None:
    copied = [words.split()[:-1] for words in re.findall(r"^COPY (.*)$", DOCKERFILE, re.MULTILINE)]
    assert all((ROOT / name).exists() for names in copied for name in names)
    assert {"constraints.txt", "pyproject.toml", "src"} <= {n for names in copied for n in names}
    assert "\nUSER 10001:10001\n" in DOCKERFILE
    assert DOCKERFILE.endswith('ENTRYPOINT ["fedshot"]\n')
    users = [d["spec"]["template"]["spec"]["securityContext"]["runAsUser"]
             for d in MANIFESTS if "template" in d["spec"]]  # fmt: skip
    assert users == [10001, 10001]


def test_the_manifests_have_the_schema_of_kubernetes() -> None:
    validate = pytest.importorskip(
        "kubernetes_validate", reason="kubernetes-validate is not installed"
    )
    for document in MANIFESTS:
        validate.validate(document, validate.latest_version(), strict=True)
    with pytest.raises(validate.ValidationError):
        validate.validate(MANIFESTS[-1] | {"spec": {}}, validate.latest_version(), strict=True)
