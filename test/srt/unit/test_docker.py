"""What the compose file names exists. No daemon is needed."""

from __future__ import annotations

import argparse
import configparser
import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel

from mamba_eagle.config import ServerConfig, add_arguments
from mamba_eagle.launch_server import make_parser
from mamba_eagle.message.lifetime import REFUSED
from mamba_eagle.server.http.auth import KEY_VARIABLE

ROOT = Path(__file__).parents[3]
DOCKER = ROOT / "docker"
DASHBOARD = json.loads((DOCKER / "grafana/dashboards/mamba-eagle.json").read_text())
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
PANELS = {panel["title"]: panel for panel in DASHBOARD["panels"]}


def test_panels_do_not_lie_on_each_other() -> None:
    places = [tuple(panel["gridPos"][key] for key in "xy") for panel in PANELS.values()]
    assert len(set(places)) == len(places) == len(DASHBOARD["panels"])


def test_the_compose_file_names_what_there_is() -> None:
    services: dict[str, Any] = COMPOSE["services"]
    build = services["server"]["build"]
    assert (DOCKER / build["context"] / build["dockerfile"]).is_file()
    named = {name for service in services.values() for name in service.get("volumes", [])}
    for volume in named:
        source = volume.split(":")[0]
        assert source in COMPOSE["volumes"] or (DOCKER / source).exists(), volume
    for service in services.values():
        assert all(port.startswith("127.0.0.1:") for port in service.get("ports", []))
    parser = argparse.ArgumentParser()
    add_arguments(parser, ServerConfig)
    config = parser.parse_args(services["server"]["command"])
    grace = int(services["server"]["stop_grace_period"].rstrip("s"))
    assert grace > config.shutdown_timeout
    prometheus = yaml.safe_load((DOCKER / "prometheus.yml").read_text())
    (scraped,) = prometheus["scrape_configs"]
    assert scraped["static_configs"][0]["targets"] == [f"server:{config.port}"]
    inside = [volume.split(":")[1] for volume in services["prometheus"]["volumes"]]
    assert {f"/etc/prometheus/{file}" for file in prometheus["rule_files"]} <= set(inside)
    # Prometheus carries the key that the server is started with.
    (key,) = services["prometheus"]["configs"]
    assert key["target"] == scraped["authorization"]["credentials_file"]
    content = COMPOSE["configs"][key["source"]]["content"]
    assert content.startswith(f"${{{KEY_VARIABLE}") and content.endswith(":-none}")
    assert services["server"]["environment"][KEY_VARIABLE] is None  # the shell's, if it has one


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
        services = {"server": {**COMPOSE["services"]["server"], **wrong}}
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
