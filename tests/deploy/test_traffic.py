"""Who may reach whom, and what scales what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.chart import IMAGE, SCENARIOS, Object, nested, objects, of_kind, render, scenario

by_scenario = pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
ROLE = "app.kubernetes.io/component"


def scenario_named(part: str) -> Object:
    (path,) = [path for path in SCENARIOS if part in path.name]
    return scenario(path)


def callers(policy: Object) -> set[tuple[str, tuple[Any, ...]]]:
    """(role, ports) of each pod that is let in for more than metrics; no ports = all of them."""
    found = set()
    for rule in policy["spec"]["ingress"]:
        ports = tuple(port["port"] for port in rule.get("ports", ()))
        if any(str(port).startswith("metrics") for port in ports):
            continue
        assert rule.get("from"), "a rule without `from` lets everybody in"
        for peer in rule["from"]:
            labels = peer["podSelector"]["matchLabels"]
            assert labels["app.kubernetes.io/instance"] == "chiasm"
            found.add((labels[ROLE], ports))
    return found


@by_scenario
def test_only_peers_reach_encoders_and_decoders(path: Path) -> None:
    values = scenario(path)
    policies = of_kind(objects(values), "NetworkPolicy")
    if values.get("networkPolicy", {}).get("enabled", True) is False:
        assert not policies
        return
    workers = values.get("encoder", {}).get("parallelism", {}).get("data", 1)
    # Workers listen where they find a free port, and so do the agents of NIXL.
    nixl = values.get("transport", "grpc") != "grpc"
    ports = ("grpc",) if workers == 1 and not nixl else ()
    assert callers(policies["encoder"]) == {("gateway", ports), ("decoder", ports)}
    nodes = values.get("decoder", {}).get("parallelism", {}).get("nodes", 1)
    ranks = {("decoder", ())} if nodes > 1 else set()
    agents = {("encoder", ())} if nixl else set()
    assert callers(policies["decoder"]) == {("gateway", ("grpc",))} | ranks | agents


def test_gateways_can_be_closed_and_metrics_too() -> None:
    (policy,) = [
        item
        for role, item in of_kind(objects(scenario_named("14-")), "NetworkPolicy").items()
        if role == "gateway"
    ]
    (rule,) = policy["spec"]["ingress"]
    assert rule["from"] == scenario_named("14-")["networkPolicy"]["gatewayFrom"]


def test_hpa_aims_at_the_average_of_a_pod() -> None:
    found = of_kind(objects(scenario_named("07-hpa")), "HorizontalPodAutoscaler")
    targets = {
        role: {
            metric["pods"]["metric"]["name"]: str(metric["pods"]["target"]["averageValue"])
            for metric in item["spec"]["metrics"]
        }
        for role, item in found.items()
    }
    assert targets == {
        "gateway": {"chiasm_num_requests_running": "256"},
        "encoder": {"chiasm_encoder_pending_patches": "32768"},
        "decoder": {"chiasm_waiting_tokens": "16384", "chiasm_kv_cache_usage_ratio": "800m"},
    }
    assert (found["encoder"]["spec"]["minReplicas"], found["encoder"]["spec"]["maxReplicas"]) == (
        2,
        32,
    )


def test_keda_asks_for_the_same() -> None:
    found = of_kind(objects(scenario_named("08-keda")), "ScaledObject")
    assert set(found) == {"encoder", "decoder"}
    for role, item in found.items():
        assert item["spec"]["scaleTargetRef"]["name"] == f"chiasm-{role}"
        for trigger in item["spec"]["triggers"]:
            asked = trigger["metadata"]
            matchers = f'{{namespace="models",pod=~"chiasm-{role}-.*"}}'
            assert asked["query"].count(matchers) == 2
            assert asked["ignoreNullValues"] == "false"
            assert trigger["metricType"] == "Value"
            assert float(asked["threshold"]) > 0


def test_each_worker_of_an_encoder_is_watched() -> None:
    monitor = yaml.safe_load(render(scenario_named("09-"))["podmonitor.yaml"])
    ports = [endpoint["port"] for endpoint in monitor["spec"]["podMetricsEndpoints"]]
    assert ports == ["metrics", "metrics-1", "metrics-2", "metrics-3"]


def test_autoscaled_roles_have_no_replicas_of_their_own() -> None:
    values = IMAGE | nested("encoder.autoscaling.engine", "hpa")
    deployments = of_kind(objects(values), "Deployment")
    assert {role: item["spec"].get("replicas") for role, item in deployments.items()} == {
        "gateway": 1,
        "encoder": None,
        "decoder": 1,
    }
