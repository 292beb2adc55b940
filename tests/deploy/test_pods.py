"""What runs in the pods: args that the services themselves understand, probes, ends, limits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from chiasm.checkpoint import DEMO
from chiasm.config.load import settings, to_mapping
from chiasm.server import LIVE
from decoder_svc.parallel.launch import rendezvous_of
from gateway.discovery import DnsDiscovery, KubernetesDiscovery, discovery_for
from gateway.discovery.api_server import Cluster
from tests.deploy.chart import (
    CHART,
    CONFIGS,
    IMAGE,
    POD_IP,
    ROOT,
    SCENARIOS,
    Object,
    config_of,
    nested,
    objects,
    of_kind,
    pods,
    scenario,
)
from tests.deploy.generate import OWN, tree

OVER_TWO_NODES = {
    "parallelism": {"tensor": 2, "pipeline": 4, "nodes": 2},
    "rankToken": {"secret": "ranks"},
    "shmSize": "1Gi",
}

by_scenario = pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)


def configs(values: Object) -> dict[str, Any]:
    return {role: config_of(role, pod) for role, pod in pods(objects(values)).items()}


@by_scenario
def test_services_understand_their_args(path: Path) -> None:
    found = objects(scenario(path))
    for role, pod in pods(found).items():
        config = config_of(role, pod)
        (container,) = pod["containers"]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert (config.server.host, config.server.advertise_host) == ("0.0.0.0", POD_IP)
        assert config.server.port == ports["http" if role == "gateway" else "grpc"]
        assert config.server.metrics_port == ports["metrics"]
        given = scenario(path).get(role, {}).get("config", {})
        assert_within(given, to_mapping(config))


def assert_within(given: Object, effective: Object) -> None:
    for key, value in given.items():
        if isinstance(value, dict):
            assert_within(value, effective[key])
        else:
            assert effective[key] == value


@by_scenario
def test_the_gateway_looks_for_the_headless_services(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gateway.discovery.kubernetes.find_cluster", lambda: Cluster(None, "models")
    )
    found = objects(scenario(path))
    config = config_of("gateway", pods(found)["gateway"])
    services = of_kind(found, "Service")
    for role, (url,) in (("encoder", config.encoder_urls), ("decoder", config.decoder_urls)):
        service = services[role]
        (port,) = service["spec"]["ports"]
        assert url == f"{service['metadata']['name']}:{port['port']}"
        assert service["spec"]["clusterIP"] == "None"
        assert service["spec"]["publishNotReadyAddresses"]
    wanted = KubernetesDiscovery if asks_the_api_server(path) else DnsDiscovery
    assert isinstance(discovery_for(config), wanted)


def asks_the_api_server(path: Path) -> bool:
    return scenario(path).get("gateway", {}).get("discovery") == "kubernetes"


@by_scenario
def test_only_gateways_that_ask_the_api_server_may_and_only_for_slices(path: Path) -> None:
    found = objects(scenario(path))
    asks = asks_the_api_server(path)
    tokens = {role for role, pod in pods(found).items() if pod["automountServiceAccountToken"]}
    assert tokens == ({"gateway"} if asks else set())
    roles = [item for item in found if item["kind"] in ("Role", "ClusterRole")]
    bindings = [item for item in found if item["kind"].endswith("Binding")]
    assert len(roles) == len(bindings) == asks
    for role, binding in zip(roles, bindings, strict=True):
        slices = {"apiGroups": ["discovery.k8s.io"], "resources": ["endpointslices"]}
        assert role["rules"] == [slices | {"verbs": ["get", "list", "watch"]}]
        assert (role["kind"], binding["roleRef"]["kind"]) == ("Role", "Role")
        assert binding["roleRef"]["name"] == role["metadata"]["name"]
        (subject,) = binding["subjects"]
        assert subject["name"] == pods(found)["gateway"]["serviceAccountName"]
        assert (subject["kind"], subject["namespace"]) == ("ServiceAccount", "models")


def test_defaults_are_the_services_own() -> None:
    for role, config in configs(IMAGE).items():
        ours = to_mapping(CONFIGS[role](model=DEMO))
        for setting in settings(CONFIGS[role]):
            if setting.name not in OWN:
                assert value_at(to_mapping(config), setting.path) == value_at(ours, setting.path)


@pytest.mark.parametrize("role", CONFIGS)
def test_every_setting_reaches_its_service(role: str) -> None:
    """All changed at once: a value that went to another's flag would not come back."""
    changed = {
        setting.path: other(setting.name, setting.default)
        for setting in settings(CONFIGS[role])
        if setting.name not in OWN
    }
    values = nested(f"{role}.config", tree(role, lambda setting: changed[setting.path]))
    if role == "decoder":  # the rows that one makes, the other takes
        values |= {"encoder": {"config": {"dtype": "float16", "row_dtype": "float16"}}}
    elif role == "encoder":
        values |= {"decoder": {"config": {"dtype": "float16", "row_dtype": "float16"}}}
    values.setdefault("decoder", {})["shmSize"] = "4Gi"
    values["decoder"]["parallelism"] = {"tensor": 2}  # two groups of experts
    config = to_mapping(configs(values)[role])
    assert {path: value_at(config, path) for path in changed} == {
        path: list(value) if isinstance(value, tuple) else value for path, value in changed.items()
    }


def other(name: str, default: Any) -> Any:
    """Another value that the service takes."""
    words = {
        "async_scheduling": "off",
        "attention_backend": "reference",
        "load_format": "dummy",
        "slab_memory": "host",
        "dtype": "float16",
        "row_dtype": "float16",
        "device": "cpu",
        "digest": "full",
    }
    if name in words:
        return words[name]
    if isinstance(default, bool):
        return not default
    if isinstance(default, float):
        return default + 0.0625
    if isinstance(default, int):
        return default + 1
    return (f"{name}-1", f"{name}-2") if isinstance(default, tuple) else f"{name}-1"


def value_at(mapping: Object, path: tuple[str, ...]) -> Any:
    value: Any = mapping
    for key in path:
        value = value[key]
    return value


def test_what_the_chart_knows_better_is_said_or_left_to_the_service() -> None:
    tls = {"enabled": True, "frontSecret": "users"}
    values = IMAGE | {"apiKeys": {"existingSecret": "keys"}, "tls": tls}
    values |= {"decoder": OVER_TWO_NODES}
    for role, pod in pods(objects(values)).items():
        (container,) = pod["containers"]
        said = {arg.partition("=")[0] for arg in container["args"]}
        own = {setting.flag for setting in settings(CONFIGS[role]) if setting.name in OWN}
        assert own <= said


@by_scenario
def test_one_gpu_for_each_rank(path: Path) -> None:
    values = scenario(path)
    for role, pod in pods(objects(values)).items():
        config = config_of(role, pod)
        limits = pod["containers"][0]["resources"].get("limits", {})
        wanted = None
        if values.get(role, {}).get("gpuResource"):
            ranks = config.dp_size if role == "encoder" else config.parallel.world_size
            wanted = str(ranks // values[role].get("parallelism", {}).get("nodes", 1))
            assert config.device == "cuda", "an image without CUDA would compute on the CPU"
        assert limits.get("nvidia.com/gpu") == wanted


@by_scenario
def test_the_slab_fits_its_memory_volume(path: Path) -> None:
    pod = pods(objects(scenario(path)))["decoder"]
    config = config_of("decoder", pod)
    (volume,) = [v for v in pod["volumes"] if v["name"] == "shm"]
    assert volume["emptyDir"]["medium"] == "Memory"
    size, unit = re.fullmatch(r"(\d+)([MG])i", volume["emptyDir"]["sizeLimit"]).groups()  # type: ignore[union-attr]
    assert int(size) << {"M": 20, "G": 30}[unit] > config.memory.slab_bytes
    assert {"name": "shm", "mountPath": "/dev/shm"} in pod["containers"][0]["volumeMounts"]


@by_scenario
def test_nothing_is_killed_before_its_time(path: Path) -> None:
    """Loading has an hour, a drain its whole time, and only who is not alive is restarted."""
    for role, pod in pods(objects(scenario(path))).items():
        config = config_of(role, pod)
        (container,) = pod["containers"]
        wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
        assert pod["terminationGracePeriodSeconds"] >= wait + config.server.drain_s + 10
        probes = {kind: container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")}
        patience = {k: p["periodSeconds"] * p["failureThreshold"] for k, p in probes.items()}
        assert patience["startup"] >= 3600
        assert patience["readiness"] <= 30
        assert patience["liveness"] >= 120
        wanted = {"startup": "", "readiness": "", "liveness": LIVE}
        if role == "gateway":
            wanted = {"startup": "health", "readiness": "ready", "liveness": "health"}
        assert {kind: asked(probe, pod, config) for kind, probe in probes.items()} == wanted


def asked(probe: Object, pod: Object, config: Any) -> str:
    """What a probe asks for, at the service's own port; kubelet has no certificate to show."""
    gateway = hasattr(config, "front")
    tls = config.server.tls
    door = config.front.front_door if gateway else "required"
    if tls.tls_cert_file and door == "required":
        (*command, url, cert, key) = probe["exec"]["command"]
        assert command == ["python", "-I", "-m", "chiasm.probe"]
        own = (tls.tls_cert_file, tls.tls_key_file)
        if gateway and config.front.front_cert_file:
            own = (config.front.front_cert_file, config.front.front_key_file)
        assert (cert, key) == own
        assert {Path(cert).parent, Path(key).parent} <= {
            Path(mount["mountPath"]) for mount in pod["containers"][0]["volumeMounts"]
        }
        scheme = "https" if gateway else "grpcs"
        root = f"{scheme}://127.0.0.1:{config.server.port}/"
        assert url.startswith(root)
        return str(url.removeprefix(root))
    if gateway:
        get = probe["httpGet"]
        assert get.get("scheme", "HTTP") == ("HTTPS" if door == "tls" else "HTTP")
        assert get["port"] == "http"
        return str(get["path"].removeprefix("/"))
    assert probe["grpc"]["port"] == config.server.port
    return str(probe["grpc"].get("service", ""))


def test_a_roll_out_needs_no_spare_gpu_and_waits_for_slow_loading() -> None:
    for role, deployment in of_kind(objects(IMAGE), "Deployment").items():
        strategy = deployment["spec"]["strategy"]["rollingUpdate"]
        surge = {"maxSurge": 1, "maxUnavailable": 0}
        assert strategy == (surge if role == "gateway" else {"maxSurge": 0, "maxUnavailable": 1})
        assert deployment["spec"]["progressDeadlineSeconds"] > 3600


@by_scenario
def test_pods_may_do_nothing_but_serve(path: Path) -> None:
    for role, pod in pods(objects(scenario(path))).items():
        (container,) = pod["containers"]
        security = container["securityContext"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not security["allowPrivilegeEscalation"]
        pins = {"add": ["IPC_LOCK"]} if scenario(path).get(role, {}).get("rdma") else {}
        assert security["capabilities"] == {"drop": ["ALL"]} | pins
        assert security["readOnlyRootFilesystem"] is not ("18" in path.name and role == "gateway")
        assert {"name": "tmp", "mountPath": "/tmp"} in container["volumeMounts"]
        assert not pod["enableServiceLinks"]


def test_the_user_is_the_images_own() -> None:
    for role, pod in pods(objects(IMAGE)).items():
        image = (ROOT / "deploy" / "docker" / f"{role}.Dockerfile").read_text()
        assert f"USER {pod['securityContext']['runAsUser']}\n" in image
        (container,) = pod["containers"]
        assert container["image"] == f"registry.example.com/chiasm-{role}:0.1.0"
        assert "command" not in container, "the image's entrypoint takes the flags"


def test_one_template_makes_all_pods() -> None:
    """The only other container is the one of `helm test`."""
    found = {
        file.name: text.count("containers:\n")
        for file in (CHART / "templates").rglob("*")
        if file.is_file() and "containers:" in (text := file.read_text())
    }
    assert found == {"_pod.tpl": 1, "answer.yaml": 1}
    shapes = []
    for pod in pods(objects(IMAGE | {"decoder": {"config": {}}})).values():
        (container,) = pod["containers"]
        shapes.append((set(pod), set(container)))
    assert shapes[0] == shapes[1] == shapes[2]


def test_further_nodes_of_a_decoder_lend_their_ranks() -> None:
    gpu = {"gpuResource": "nvidia.com/gpu"}
    found = objects(IMAGE | {"encoder": gpu, "decoder": OVER_TWO_NODES | gpu})
    (group,) = [item["spec"] for item in found if item["kind"] == "LeaderWorkerSet"]
    first, further = (
        group["leaderWorkerTemplate"][f"{part}Template"]["spec"] for part in ("leader", "worker")
    )
    config = config_of("decoder", first)
    assert config == config_of("decoder", further)
    env = {"LWS_LEADER_ADDRESS": "first", "LWS_GROUP_SIZE": "2", "LWS_WORKER_INDEX": "1"}
    sizes = {"tp_size": config.parallel.tp_size, "pp_size": config.parallel.pp_size}
    assert group["leaderWorkerTemplate"]["size"] == rendezvous_of(env).num_nodes
    ranks = rendezvous_of(env).local_ranks(**sizes)
    for pod in (first, further):
        (container,) = pod["containers"]
        assert container["resources"]["limits"] == {"nvidia.com/gpu": str(len(ranks))}
        mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        assert config.parallel.rank_token_file == f"{mounts['rank-token']}/token"
    (container,) = further["containers"]
    assert not [key for key in container if key == "ports" or key.endswith("Probe")]
    wait = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    leader_wait = first["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert wait > leader_wait + config.server.drain_s, "the first drains with their ranks"
    assert further["terminationGracePeriodSeconds"] > wait


def test_secrets_are_never_written_out() -> None:
    path = next(path for path in SCENARIOS if "02-gpu" in path.name)
    for pod in pods(objects(scenario(path))).values():
        env = {item["name"]: item for item in pod["containers"][0]["env"]}
        assert env["HF_TOKEN"]["valueFrom"]["secretKeyRef"] == {
            "name": "hugging-face",
            "key": "token",
        }
    gateway = pods(objects(scenario(path)))["gateway"]
    config = config_of("gateway", gateway)
    (volume,) = [v for v in gateway["volumes"] if v["name"] == "api-keys"]
    assert config.api_key_file == f"/etc/chiasm/api-keys/{volume['secret']['items'][0]['path']}"


def test_new_keys_replace_the_gateways() -> None:
    digests = ["0" * 64, "1" * 64]
    first, both = (
        of_kind(objects(IMAGE | {"apiKeys": {"digests": keys}}), "Deployment")
        for keys in (digests[:1], digests)
    )
    annotations = [
        {role: item["spec"]["template"]["metadata"].get("annotations") for role, item in f.items()}
        for f in (first, both)
    ]
    assert annotations[0]["gateway"] != annotations[1]["gateway"]
    assert annotations[0]["encoder"] is annotations[1]["encoder"] is None
