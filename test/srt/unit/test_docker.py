"""What the compose file and the Dockerfile name exists. No daemon is needed."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import Any

import yaml

from mamba_eagle.config import ServerConfig, add_arguments

DOCKER = Path(__file__).parents[3] / "docker"
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
    scraped = yaml.safe_load((DOCKER / "prometheus.yml").read_text())["scrape_configs"]
    assert scraped[0]["static_configs"][0]["targets"] == [f"server:{config.port}"]


def test_the_dockerfile_copies_what_there_is() -> None:
    text = (DOCKER / "Dockerfile").read_text()
    for line in re.findall(r"^COPY (.*)$", text, re.MULTILINE):
        *sources, _ = line.split()
        for source in sources:
            assert (DOCKER.parent / source).exists(), line
    ignored = (DOCKER / "Dockerfile.dockerignore").read_text().split()
    assert ignored[0] in ("*", "**")  # nothing goes in that is not named
