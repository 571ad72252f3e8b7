"""What the files for containers name exists. No daemon is needed."""

from __future__ import annotations

import argparse
import configparser
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from dockerfile import read_dockerfile
from pydantic import BaseModel

from mamba_eagle.config import ServerConfig, add_arguments
from mamba_eagle.launch_server import make_parser
from mamba_eagle.message.lifetime import REFUSED
from mamba_eagle.server.app import OPEN_PATHS
from mamba_eagle.server.http.auth import KEY_VARIABLE

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
GATEWAY = DOCKER / "gateway.Dockerfile"
KUBERNETES = ROOT / "deploy/kubernetes"
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/mamba-eagle.json").read_text())
SERVERS = ["server-1", "server-2"]
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}


def test_panels_do_not_lie_on_each_other() -> None:
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in PANELS.values()]
    assert len(set(places)) == len(places) == len(DASHBOARD["panels"])


def test_the_compose_file_names_what_there_is() -> None:
    services: dict[str, Any] = COMPOSE["services"]
    for service in services.values():
        if build := service.get("build"):
            assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    named = {name for service in services.values() for name in service.get("volumes", [])}
    for volume in named:
        source = volume.split(":")[0]
        assert source in COMPOSE["volumes"] or (DOCKER / source).exists(), volume
    urls = [f"http://{name}:30000" for name in SERVERS]
    for name in SERVERS:
        config = server_config(services[name]["command"])
        grace = int(services[name]["stop_grace_period"].rstrip("s"))
        assert grace > config.shutdown_timeout
        assert config.port == 30000
    assert gateway_arguments(services["gateway"]["command"]).worker_urls == urls
    prometheus = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    (scraped,) = prometheus["scrape_configs"]
    assert [f"http://{target}" for target in scraped["static_configs"][0]["targets"]] == urls
    inside = [volume.split(":")[1] for volume in services["prometheus"]["volumes"]]
    assert {f"/etc/prometheus/{file}" for file in prometheus["rule_files"]} <= set(inside)
    # The gateway and Prometheus carry the key that the servers are started with.
    (key,) = services["prometheus"]["configs"]
    assert key["target"] == scraped["authorization"]["credentials_file"]
    content = COMPOSE["configs"][key["source"]]["content"]
    assert content.startswith(f"${{{KEY_VARIABLE}") and content.endswith(":-none}")
    for name in (*SERVERS, "gateway"):
        assert services[name]["environment"][KEY_VARIABLE] is None  # the shell's, if it has one


def server_config(flags: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser, ServerConfig)
    return parser.parse_args(flags)


def gateway_arguments(flags: list[str]) -> Any:
    launch = pytest.importorskip("smg.launch_router", reason="pip install smg")
    return launch.parse_router_args(flags)


@pytest.mark.parametrize("key", ["", "a key"])
def test_the_gateways_image_passes_the_key_on_if_there_is_one(key: str, tmp_path: Path) -> None:
    """Its entry point, with a python that writes down what it is called with."""
    (entry,) = [i.command for i in read_dockerfile(GATEWAY) if i.name == "ENTRYPOINT"]
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/called\n')
    python.chmod(0o700)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", **({KEY_VARIABLE: key} if key else {})}
    subprocess.run([*entry, "--policy", "random"], env=environment, check=True)
    _, module, command, *flags = (tmp_path / "called").read_text().splitlines()
    assert (module, command) == ("smg", "launch")
    arguments = gateway_arguments(flags)
    assert (arguments.api_key or "", arguments.policy) == (key, "random")


# ── Kubernetes ──


def manifests(name: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((KUBERNETES / name).read_text()))


KINDS = {
    (each["kind"], each["metadata"]["name"]): each
    for name in ("server.yaml", "gateway.yaml", "autoscaling.yaml")
    for each in manifests(name)
}
DEPLOYMENTS = {name: each["spec"] for (kind, name), each in KINDS.items() if kind == "Deployment"}


@pytest.mark.parametrize("name", DEPLOYMENTS)
def test_pods_are_those_that_others_select(name: str) -> None:
    """And their probes, ports, accounts, volumes and secrets are there."""
    spec = DEPLOYMENTS[name]
    labels, pod = spec["template"]["metadata"]["labels"], spec["template"]["spec"]
    assert spec["selector"]["matchLabels"] == labels
    (container,) = pod["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    for probe in (each for key, each in container.items() if key.endswith("Probe")):
        assert probe["httpGet"]["port"] in ports
        if name == "mamba-eagle":
            assert probe["httpGet"]["path"] in OPEN_PATHS
    volumes = {volume["name"] for volume in pod.get("volumes", [])}
    assert {mount["name"] for mount in container.get("volumeMounts", [])} == volumes
    secrets = [
        (variable["name"], reference["name"], reference["key"])
        for variable in container["env"]
        if (reference := variable.get("valueFrom", {}).get("secretKeyRef"))
    ]
    assert secrets == [(KEY_VARIABLE, "mamba-eagle", "api-key")]
    account = pod.get("serviceAccountName")
    assert account is None or ("ServiceAccount", account) in KINDS
    assert container["image"] in {
        image["name"] for image in manifests("kustomization.yaml")[0]["images"]
    }


def test_the_servers_pods_end_after_their_requests() -> None:
    pod = DEPLOYMENTS["mamba-eagle"]["template"]["spec"]
    (container,) = pod["containers"]
    config = server_config(container["args"])
    (_, seconds) = container["lifecycle"]["preStop"]["exec"]["command"]
    assert pod["terminationGracePeriodSeconds"] > int(seconds) + config.shutdown_timeout
    assert container["ports"][0]["containerPort"] == config.port


def test_the_gateway_finds_the_servers_pods() -> None:
    (gateway,) = DEPLOYMENTS["gateway"]["template"]["spec"]["containers"]
    arguments = gateway_arguments(gateway["args"])
    servers = DEPLOYMENTS["mamba-eagle"]["template"]["metadata"]["labels"]
    assert arguments.service_discovery and arguments.selector == servers
    assert arguments.service_discovery_port == 30000
    assert arguments.port == gateway["ports"][0]["containerPort"]
    (rule,) = KINDS["Role", "gateway"]["rules"]
    assert rule["resources"] == ["pods"] and set(rule["verbs"]) == {"get", "list", "watch"}
    (subject,) = KINDS["RoleBinding", "gateway"]["subjects"]
    assert (subject["kind"], subject["name"]) in KINDS
    service = KINDS["Service", "gateway"]["spec"]
    assert service["selector"] == DEPLOYMENTS["gateway"]["template"]["metadata"]["labels"]


def test_servers_are_scaled_by_what_prometheus_reads_of_them() -> None:
    scaled = KINDS["ScaledObject", "mamba-eagle"]["spec"]
    assert scaled["scaleTargetRef"]["name"] in DEPLOYMENTS
    assert "replicas" not in DEPLOYMENTS["mamba-eagle"]
    assert 1 <= scaled["minReplicaCount"] < scaled["maxReplicaCount"]
    monitor = KINDS["PodMonitor", "mamba-eagle"]["spec"]
    assert monitor["selector"] == DEPLOYMENTS["mamba-eagle"]["selector"]
    (endpoint,) = monitor["podMetricsEndpoints"]
    job = {"targetLabel": "job", "replacement": "mamba-eagle"}
    assert endpoint["path"] == "/metrics" and endpoint["relabelings"] == [job]


def test_kubernetes_knows_all_keys_of_the_manifests() -> None:
    if (kubeconform := shutil.which("kubeconform")) is None:
        pytest.skip("kubeconform is not installed")
    files = [str(KUBERNETES / name) for name in ("server.yaml", "gateway.yaml")]
    subprocess.run([kubeconform, "-strict", *files], check=True)


def test_the_unit_of_systemd_starts_what_there_is() -> None:
    unit = configparser.ConfigParser(interpolation=None)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(ROOT / "deploy/mamba-eagle.service")
    service = unit["Service"]
    program, command, *flags = service["ExecStart"].split()
    assert (Path(program).name, command) == ("mamba-eagle", "serve")
    config = make_parser().parse_args(flags)
    assert float(service["TimeoutStopSec"]) > config.shutdown_timeout
    assert int(service["RestartPreventExitStatus"]) == REFUSED


@pytest.mark.parametrize("name", ["ci.yml", "release.yml"])
def test_workflows_name_files_that_exist(name: str) -> None:
    path = ROOT / ".github/workflows" / name
    workflow = yaml.safe_load(path.read_text())
    assert set(workflow) >= {"name", "permissions", "jobs"} and True in workflow  # "on" is true
    text = path.read_text()
    named = re.findall(r"(?:docker/[A-Z]\w+|constraints\.txt|pyproject\.toml|\.ci/\w+)", text)
    assert named and all((ROOT / name).is_file() for name in named)


def test_the_compose_file_keeps_to_its_specification() -> None:
    compose_spec = pytest.importorskip("compose_spec", reason="pip install compose-spec")
    specification = compose_spec.ComposeSpecification
    assert unknown_keys(specification.model_validate(COMPOSE), COMPOSE) == []
    for wrong in ({"portz": ["1:1"]}, {"build": {"contekst": "."}}):
        services = {"server-1": {**COMPOSE["services"]["server-1"], **wrong}}
        given = {"services": services}
        assert unknown_keys(specification.model_validate(given), given), wrong


def unknown_keys(value: Any, given: Any) -> list[str]:
    """Keys of ``given`` that are in no model of pydantic which was made of it: it ignores them."""
    if isinstance(value, dict) and isinstance(given, dict):
        return [key for name in given for key in unknown_keys(value[name], given[name])]
    if isinstance(value, list) and isinstance(given, list):
        return [key for pair in zip(value, given) for key in unknown_keys(*pair)]
    if not isinstance(value, BaseModel) or not isinstance(given, dict):
        return []
    fields = {field.alias or name: name for name, field in type(value).model_fields.items()}
    unknown = [key for key in given if key not in fields and not key.startswith("x-")]
    known = [key for key in given if key in fields]
    return unknown + [
        inner for key in known for inner in unknown_keys(getattr(value, fields[key]), given[key])
    ]
