"""Every series and label of the Grafana dashboard is one that a live server has."""

from __future__ import annotations

import json
import re
from pathlib import Path

import httpx
import pytest
import yaml
from running_server import RunningServer

DASHBOARD = Path(__file__).parents[3] / "docker/grafana/dashboards/mamba-eagle.json"
RULES = yaml.safe_load((DASHBOARD.parents[2] / "alerts.yml").read_text())["groups"][0]["rules"]
SCALER = yaml.safe_load(
    (DASHBOARD.parents[3] / "deploy/kubernetes/autoscaling.yaml").read_text().split("\n---")[0]
)
FROM_PROMETHEUS = {"job", "instance"}  # labels that it adds to what it reads
PANELS = {panel["title"]: panel for panel in json.loads(DASHBOARD.read_text())["panels"]}


@pytest.fixture(scope="module")
def series(server: RunningServer) -> dict[str, set[str]]:
    """The label names of each series of a server that has served."""
    found: dict[str, set[str]] = {}
    with httpx.Client(base_url=server.base_url, timeout=120) as client:
        body = {"text": "Question:", "sampling_params": {"max_new_tokens": 8}}
        assert client.post("/generate", json=body).status_code == 200
        text = client.get("/metrics").text
    for line in text.splitlines():
        if match := re.match(r"([\w:]+)(?:\{(.*)\})? ", line):
            labels = set(re.findall(r'(\w+)="', match[2] or ""))
            found.setdefault(match[1], set()).update(labels)
    return found


@pytest.mark.parametrize("title", PANELS)
def test_every_expression_names_series_and_labels_that_exist(
    title: str, series: dict[str, set[str]]
) -> None:
    for target in PANELS[title]["targets"]:
        expression = target["expr"]
        names = re.findall(r"mamba_eagle:\w+", expression)
        assert names, expression
        for name in names:
            assert name in series, expression
        for labels in re.findall(r"by \(([^)]*)\)", expression):
            for label in labels.split(", "):
                assert label in series[names[0]] | FROM_PROMETHEUS, expression
        shown = re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])
        assert set(shown) <= series[names[0]] | FROM_PROMETHEUS
        # Counters are looked at as rates, and only those.
        for name in names:
            counted = name.endswith(("_total", "_bucket"))
            assert counted == (f"rate({name}[" in expression), expression


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule["alert"])
def test_every_alert_names_series_and_labels_that_exist(
    rule: dict[str, str], series: dict[str, set[str]]
) -> None:
    expression = rule["expr"]
    for name, labels in re.findall(r"(mamba_eagle:\w+)(?:\{([^}]*)\})?", expression):
        assert name in series, expression
        assert set(re.findall(r"(\w+)=~?\"", labels)) <= series[name], expression
    assert "mamba_eagle:" in expression or expression.startswith("up{")
    assert rule["for"] and rule["annotations"]["summary"]


def test_servers_are_scaled_by_series_that_exist(series: dict[str, set[str]]) -> None:
    (trigger,) = SCALER["spec"]["triggers"]
    found = re.findall(r"(mamba_eagle:\w+)\{(\w+)=", trigger["metadata"]["query"])
    assert [label for _, label in found] == ["job", "job"]
    assert {name for name, _ in found} <= set(series)
