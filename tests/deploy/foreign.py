"""Shapes of other projects' objects, of which Kubernetes has no schema: what their public CRDs say
of the fields that the chart may write, closed, so that a misspelt field is an error.

KEDA 2.x keda.sh/v1alpha1, Prometheus operator monitoring.coreos.com/v1, Gateway API v1,
LeaderWorkerSet v1, cert-manager v1.
"""

from __future__ import annotations

from typing import Any

import jsonschema

Shape = dict[str, Any]

TEXT: Shape = {"type": "string", "minLength": 1}
NAME: Shape = {"type": "string", "pattern": r"^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", "maxLength": 253}
COUNT: Shape = {"type": "integer", "minimum": 0}
PORT: Shape = {"type": "integer", "minimum": 1, "maximum": 65535}
GO_TIME: Shape = {"type": "string", "pattern": r"^([0-9]+(h|m|s))+$"}
PROMETHEUS_TIME: Shape = {"type": "string", "pattern": r"^([0-9]+(y|w|d|h|m|s|ms))+$"}
GATEWAY_TIME: Shape = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}
INT_OR_PERCENT: Shape = {"anyOf": [COUNT, {"type": "string", "pattern": "^[0-9]+%$"}]}
TEXTS: Shape = {"type": "object", "additionalProperties": {"type": "string"}}


def closed(required: str = "", /, **properties: Shape) -> Shape:
    """An object of these fields; `required` names some, apart by spaces."""
    return {
        "type": "object",
        "additionalProperties": False,
        "properties": properties,
        "required": required.split(),
    }


def several(item: Shape, least: int = 1, most: int = 64) -> Shape:
    """A list."""
    return {"type": "array", "items": item, "minItems": least, "maxItems": most}


def one_of(*words: str) -> Shape:
    """A closed set."""
    return {"enum": list(words)}


_KEY = closed("name key", name=NAME, key=TEXT)
_OPERATOR_TLS = closed(
    serverName=TEXT,
    ca=closed("secret", secret=_KEY),
    cert=closed("secret", secret=_KEY),
    keySecret=_KEY,
)
_ISSUER_REF = closed("name", name=NAME, kind=one_of("Issuer", "ClusterIssuer"), group=TEXT)
_POD_TEMPLATE = closed("metadata spec", metadata={"type": "object"}, spec={"type": "object"})

SPECS: dict[tuple[str, str], Shape] = {
    ("keda.sh/v1alpha1", "ScaledObject"): closed(
        "scaleTargetRef triggers",
        scaleTargetRef=closed("name", name=NAME, kind=TEXT, apiVersion=TEXT),
        minReplicaCount=COUNT,
        maxReplicaCount=COUNT,
        advanced=closed(
            horizontalPodAutoscalerConfig=closed(
                behavior=closed(
                    scaleDown=closed(
                        stabilizationWindowSeconds={"type": "integer", "maximum": 3600}
                    )
                )
            )
        ),
        triggers=several(
            closed(
                "type metadata",
                type=one_of("prometheus"),
                metricType=one_of("AverageValue", "Value"),
                metadata=closed(  # a map of texts, read by the scaler
                    "serverAddress query threshold",
                    serverAddress={"type": "string", "pattern": "^https?://"},
                    query=TEXT,
                    threshold={"type": "string", "pattern": r"^[0-9.]+$"},
                    ignoreNullValues=one_of("true", "false"),
                ),
            )
        ),
    ),
    ("monitoring.coreos.com/v1", "PodMonitor"): closed(
        "selector podMetricsEndpoints",
        selector=closed("matchLabels", matchLabels=TEXTS),
        podMetricsEndpoints=several(
            closed(
                "port",
                port=TEXT,
                interval=PROMETHEUS_TIME,
                scheme=one_of("http", "https"),
                tlsConfig=_OPERATOR_TLS,
                relabelings=several(
                    closed(
                        sourceLabels=several(
                            {"type": "string", "pattern": "^[a-zA-Z_][a-zA-Z0-9_]*$"}
                        ),
                        targetLabel=TEXT,
                    )
                ),
            )
        ),
    ),
    ("monitoring.coreos.com/v1", "PrometheusRule"): closed(
        "groups",
        groups=several(
            closed(
                "name rules",
                name=TEXT,
                rules=several(
                    {
                        **closed("alert expr", alert=TEXT, expr=TEXT, labels=TEXTS),
                        "properties": {
                            "alert": TEXT,
                            "expr": TEXT,
                            "for": PROMETHEUS_TIME,
                            "labels": TEXTS,
                            "annotations": TEXTS,
                        },
                    }
                ),
            )
        ),
    ),
    ("gateway.networking.k8s.io/v1", "HTTPRoute"): closed(
        "parentRefs rules",
        parentRefs=several(
            closed(
                "name",
                name=NAME,
                namespace=NAME,
                sectionName=NAME,
                group=TEXT,
                kind=TEXT,
                port=PORT,
            ),
            most=32,
        ),
        hostnames=several(
            {"type": "string", "pattern": r"^(\*\.)?[a-z0-9]([a-z0-9.-]*)$"}, most=16
        ),
        rules=several(
            closed(
                backendRefs=several(closed("name port", name=NAME, port=PORT), most=16),
                timeouts=closed(request=GATEWAY_TIME, backendRequest=GATEWAY_TIME),
            ),
            most=16,
        ),
    ),
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): closed(
        "leaderWorkerTemplate",
        replicas=COUNT,
        rolloutStrategy=closed(
            "type",
            type=one_of("RollingUpdate"),
            rollingUpdateConfiguration=closed(
                maxUnavailable=INT_OR_PERCENT, maxSurge=INT_OR_PERCENT, partition=COUNT
            ),
        ),
        startupPolicy=one_of("LeaderCreated", "LeaderReady"),
        leaderWorkerTemplate=closed(
            "workerTemplate",
            size={"type": "integer", "minimum": 1},
            restartPolicy=one_of("RecreateGroupOnPodRestart", "None"),
            leaderTemplate=_POD_TEMPLATE,
            workerTemplate=_POD_TEMPLATE,
        ),
    ),
    ("cert-manager.io/v1", "Issuer"): {
        **closed(selfSigned=closed(), ca=closed("secretName", secretName=NAME)),
        "minProperties": 1,
        "maxProperties": 1,
    },
    ("cert-manager.io/v1", "Certificate"): closed(
        "secretName issuerRef",
        secretName=NAME,
        isCA={"type": "boolean"},
        commonName={**TEXT, "maxLength": 64},
        dnsNames=several(NAME),
        usages=several(
            one_of(
                "digital signature", "key encipherment", "server auth", "client auth", "cert sign"
            )
        ),
        duration=GO_TIME,
        renewBefore=GO_TIME,
        privateKey=closed(
            algorithm=one_of("RSA", "ECDSA", "Ed25519"),
            size={"enum": [256, 384, 521, 2048, 4096, 8192]},
            rotationPolicy=one_of("Never", "Always"),
        ),
        issuerRef=_ISSUER_REF,
    ),
}


def check(item: Shape) -> None:
    """Raises jsonschema.ValidationError for a spec that its CRD would refuse, KeyError for none."""
    assert set(item) == {"apiVersion", "kind", "metadata", "spec"}
    jsonschema.validate(item["spec"], SPECS[item["apiVersion"], item["kind"]])
