"""Values that cannot be are refused before anything is installed, with what to do instead."""

from __future__ import annotations

from typing import Any

import pytest
from helm_python import HelmRenderError, HelmValuesError

from tests.deploy.chart import IMAGE, nested, render

GPU = "nvidia.com/gpu"


def both(*trees: dict[str, Any]) -> dict[str, Any]:
    """Values of several keys together."""
    result: dict[str, Any] = {}
    for tree in trees:
        for key, value in tree.items():
            merge = isinstance(value, dict) and key in result
            result[key] = both(result[key], value) if merge else value
    return result


@pytest.mark.parametrize(
    "key",
    [
        "encoders",
        "image.repo",
        "model.hub.revision",
        "gateway.replica",
        "gateway.gpuResource",
        "gateway.config.media.max_item",
        "gateway.config.server.port",
        "encoder.parallelism.tensor",
        "encoder.config.model",
        "decoder.config.memory.slab",
        "decoder.config.tp_size",
        "decoder.probes.startup.period",
        "defaults.securityContext.readonlyRootFilesystem",
        "defaults.autoscaling.targets",
        "networkPolicy.from",
        "tls.secret",
        "tls.issuerRef.names",
        "decoder.rdma.devices",
        "monitoring.serviceMonitor",
    ],
)
def test_unknown_keys_are_named(key: str) -> None:
    where, _, name = key.rpartition(".")
    with pytest.raises(HelmValuesError) as caught:
        render(nested(key, 1))
    assert f"additional properties '{name}' not allowed" in str(caught.value)
    assert f"at '{'/' if where else ''}{where.replace('.', '/')}':" in str(caught.value)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("decoder.replicas", "two"),
        ("decoder.replicas", -1),
        ("decoder.parallelism.tensor", 0),
        ("decoder.config.memory.slab_bytes", "2Gi"),
        ("decoder.shmSize", "2 gigabytes"),
        ("encoder.gpuResource", "gpu"),
        ("encoder.autoscaling.engine", "vpa"),
        ("gateway.discovery", "static"),
        ("tls.frontDoor", "open"),
        ("tls.duration", "90d"),
        ("tls.issuerRef.kind", "Vault"),
        ("decoder.rdma.resource", "hca"),
        ("decoder.rdma.count", 0),
        ("model.source", "s3"),
        ("model.hub.id", "no-organisation"),
        ("model.pvc.path", "/absolute"),
        ("apiKeys.digests", ["sk-a-key-itself"]),
        ("gateway.config.served_model_name", "one"),
    ],
)
def test_values_of_the_wrong_kind_are_refused(key: str, value: Any) -> None:
    with pytest.raises(HelmValuesError) as caught:
        render(nested(key, value))
    assert f"'/{key.replace('.', '/')}" in str(caught.value)


REFUSALS = {
    "no image": ({"image": {"repository": ""}}, ("REPO-gateway, REPO-encoder, REPO-decoder",)),
    "hub without id": (nested("model.source", "hub"), ("set model.hub.id",)),
    "claim without name": (nested("model.source", "pvc"), ("set model.pvc.claim",)),
    "image without name": (nested("model.source", "image"), ("set model.image.reference",)),
    "two sources of keys": (
        nested("apiKeys", {"digests": ["0" * 64], "existingSecret": "keys"}),
        ("digests or existingSecret, not both",),
    ),
    "two sources of certificates": (
        nested("tls", {"enabled": True, "existingSecret": "s", "issuerRef": {"name": "i"}}),
        ("tls: give existingSecret or issuerRef, not both",),
    ),
    "an issuer without a name": (
        nested("tls", {"enabled": True, "issuerRef": {"kind": "Issuer"}}),
        ("tls.issuerRef: set its name",),
    ),
    "certificates but no TLS": (
        nested("tls.existingSecret", "peers"),
        ("tls.existingSecret is given but TLS is off: set tls.enabled",),
    ),
    "a door but no TLS": (
        nested("tls.frontDoor", "tls"),
        ("tls.frontDoor is given but TLS is off: set tls.enabled",),
    ),
    "a certificate that nobody is shown": (
        nested("tls", {"enabled": True, "frontDoor": "plain", "frontSecret": "s"}),
        ("tls.frontSecret is given, but tls.frontDoor is plain",),
    ),
    "an ingress before a door of unknown kind": (
        both(nested("tls.enabled", True), nested("ingress", {"enabled": True, "host": "a.b"})),
        ("tls.frontDoor: with ingress say required", "plain (TLS ends at the proxy)"),
    ),
    "renewed after its end": (
        nested("tls", {"enabled": True, "duration": "24h"}),
        ("tls.renewBefore is 720h, tls.duration is 24h",),
    ),
    "another number of RDMA devices": (
        both(
            nested("encoder.rdma", {"resource": "rdma/hca", "count": 2}),
            nested("encoder.resources.limits", {"rdma/hca": 1}),
        ),
        ("asks for 1 rdma/hca, encoder.rdma.count is 2", "leave it out of resources"),
    ),
    "ingress without host": (nested("ingress.enabled", True), ("set ingress.host",)),
    "route without gateway": (nested("httpRoute.enabled", True), ("set httpRoute.parentRefs",)),
    "rows of two dtypes": (
        nested("encoder.config.row_dtype", "float16"),
        ("rows have one dtype", "row_dtype of both"),
    ),
    "weights of two dtypes": (
        nested("decoder.config.dtype", "bfloat16"),
        ("encoder.config.dtype is auto, decoder.config.dtype is bfloat16",),
    ),
    "one side on GPUs": (
        nested("decoder.gpuResource", GPU),
        ("only one of encoder and decoder has GPUs",),
    ),
    "too few GPUs": (
        both(
            nested("encoder.gpuResource", GPU),
            nested("decoder.gpuResource", GPU),
            nested("decoder.parallelism", {"tensor": 4, "pipeline": 2}),
            nested("decoder.shmSize", "1Gi"),
            nested("decoder.resources.limits", {GPU: 4}),
        ),
        ("asks for 4 nvidia.com/gpu, 8 are needed", "tensor x pipeline", "leave it out"),
    ),
    "more GPUs than workers": (
        both(
            nested("encoder.gpuResource", GPU),
            nested("decoder.gpuResource", GPU),
            nested("encoder.resources.limits", {GPU: 2}),
        ),
        ("asks for 2 nvidia.com/gpu, 1 are needed", "encoder.parallelism.data"),
    ),
    "GPUs past the chart": (
        nested("decoder.resources.limits", {GPU: 8}),
        ("set decoder.gpuResource to it instead",),
    ),
    "a GPU for the CPU": (
        both(
            nested("encoder.gpuResource", GPU),
            nested("decoder.gpuResource", GPU),
            nested("encoder.config.device", "cpu"),
        ),
        ("encoder.config.device is cpu", "set device to auto"),
    ),
    "cuda without GPU": (
        nested("decoder.config.device", "cuda"),
        ("asks for no GPU: set decoder.gpuResource",),
    ),
    "half a stage a node": (
        nested(
            "decoder",
            {
                "parallelism": {"tensor": 8, "pipeline": 3, "nodes": 2},
                "rankToken": {"secret": "ranks"},
                "shmSize": "4Gi",
            },
        ),
        ("3 stages cannot be spread over 2 nodes", "make pipeline a multiple of nodes"),
    ),
    "nodes without a secret": (
        nested("decoder.parallelism", {"pipeline": 2, "nodes": 2}),
        ("set decoder.rankToken.secret",),
    ),
    "shm too small": (
        nested("decoder.config.memory.slab_bytes", 1 << 30),
        ("decoder.shmSize is 512Mi", f"{(1 << 30) + (64 << 20)} bytes", "raise shmSize"),
    ),
    "shm too small for ranks": (
        nested("decoder.parallelism.tensor", 8),
        (f"64Mi a rank (8) are {(256 << 20) + 8 * (64 << 20)} bytes",),
    ),
    "no shm": (nested("decoder.shmSize", ""), ("64Mi, as containers have it",)),
    "decoder out of memory": (
        nested("decoder.resources.limits.memory", "1500Mi"),
        ("decoder.resources.limits.memory is 1500Mi", "shmSize and config.memory.kv_bytes"),
    ),
    "encoder out of memory": (
        both(
            nested("encoder.resources.limits.memory", "4G"), nested("encoder.parallelism.data", 4)
        ),
        ("config.cache_bytes of every worker may take 4294967296 bytes",),
    ),
    "encoder out of memory by two caches": (
        both(
            nested("encoder.resources.limits.memory", "4G"),
            nested("encoder.config.host_cache_bytes", 3 << 30),
        ),
        ("config.cache_bytes and host_cache_bytes of every worker may take 4294967296 bytes",),
    ),
    "experts over ranks that do not divide": (
        nested("decoder.config.parallel.ep_size", 2),
        ("ep_size is 2, decoder.parallelism.tensor is 1", "make tensor a multiple"),
    ),
    "gateway out of memory": (
        nested("gateway.resources.limits.memory", 2147483648),
        ("config.media.max_bytes_in_flight may take 2147483648 bytes",),
    ),
    "no roll-out": (
        nested("encoder.strategy.maxUnavailable", 0),
        ("encoder.strategy: maxSurge and maxUnavailable are both 0",),
    ),
    "least above most": (
        nested("encoder.autoscaling", {"engine": "hpa", "minReplicas": 5}),
        ("minReplicas 5 is more than maxReplicas 4",),
    ),
    "keda without prometheus": (
        nested("decoder.autoscaling.engine", "keda"),
        ("set decoder.autoscaling.prometheus",),
    ),
    "a target out of reach": (
        nested(
            "encoder.autoscaling",
            {"engine": "hpa", "targets": {"chiasm_encoder_pending_patches": 1048576}},
        ),
        ("it would never be scaled", "a pod never shows more than 1048576"),
    ),
    "a ratio out of reach": (
        nested(
            "decoder.autoscaling",
            {"engine": "hpa", "targets": {"chiasm_kv_cache_usage_ratio": 1}},
        ),
        ("chiasm_kv_cache_usage_ratio is 1", "lower the target"),
    ),
    "requests out of reach": (
        both(
            nested("gateway.autoscaling.engine", "hpa"),
            nested("gateway.config.admission.max_inflight", 100),
        ),
        ("a pod never shows more than 100",),
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_does_not_fit_together_is_refused_with_advice(name: str) -> None:
    values, words = REFUSALS[name]
    with pytest.raises(HelmRenderError) as caught:
        render(values)
    for word in words:
        assert word in str(caught.value)
    complaints = [line for line in str(caught.value).splitlines()[1:] if line.strip()]
    assert len(complaints) == 1, "one mistake, one complaint"


def test_all_mistakes_are_told_at_once() -> None:
    values = {"model": {"source": "hub"}, "ingress": {"enabled": True}}
    with pytest.raises(HelmRenderError) as caught:
        render(values)
    for words in ("image.repository is empty", "set model.hub.id", "set ingress.host"):
        assert words in str(caught.value)


def test_images_by_role_need_no_repository() -> None:
    values = {role: {"image": f"{role}:1"} for role in ("gateway", "encoder", "decoder")}
    assert 'image: "encoder:1"' in render(values)["deployments.yaml"]
    assert render(IMAGE)
