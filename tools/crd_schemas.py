"""`python tools/crd_schemas.py`: writes tests/deploy/crds, the schemas of other projects' CRDs.

npm has the projects' CRDs compiled into validators, one function a subschema; those are fetched
with `npm pack` and read back into the schema that they came from, without descriptions. One set is
of released CRD files, the other of the API types that the newest CRDs are generated from.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import subprocess
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Schema = dict[str, Any]

OUT = Path(__file__).resolve().parents[1] / "tests" / "deploy" / "crds"
SCOPE = "@kubernetes-models"
# What API types refer to.
BASE = (f"{SCOPE}/apimachinery@3.0.2", f"{SCOPE}/gateway-api@2.0.0", "kubernetes-models@5.1.0")
_PROM = "ComGithubPrometheusOperatorPrometheusOperatorPkgApisMonitoringV1"
_CERT = "ComGithubCertManagerCertManagerPkgApisCertmanagerV1"
# package, what it was made from, {(apiVersion, kind): module}
SOURCES: tuple[tuple[str, str, dict[tuple[str, str], str]], ...] = (
    (
        f"{SCOPE}/keda@0.4.2",
        "KEDA 2.10.1, CRD",
        {("keda.sh/v1alpha1", "ScaledObject"): "KedaShV1alpha1ScaledObject.mjs"},
    ),
    (
        f"{SCOPE}/keda@2.0.0",
        "KEDA, API types",
        {
            (
                "keda.sh/v1alpha1",
                "ScaledObject",
            ): "ComGithubKedacoreKedaV2ApisKedaV1alpha1ScaledObject.js"
        },
    ),
    (
        f"{SCOPE}/prometheus-operator@4.4.4",
        "Prometheus operator 0.65.1, CRD",
        {
            ("monitoring.coreos.com/v1", kind): f"MonitoringCoreosComV1{kind}.mjs"
            for kind in ("PodMonitor", "PrometheusRule")
        },
    ),
    (
        f"{SCOPE}/prometheus-operator@6.0.0",
        "Prometheus operator, API types",
        {
            ("monitoring.coreos.com/v1", kind): f"{_PROM}{kind}.js"
            for kind in ("PodMonitor", "PrometheusRule")
        },
    ),
    (
        f"{SCOPE}/cert-manager@4.4.4",
        "cert-manager 1.11.2, CRD",
        {
            ("cert-manager.io/v1", kind): f"CertManagerIoV1{kind}.mjs"
            for kind in ("Certificate", "Issuer")
        },
    ),
    (
        f"{SCOPE}/cert-manager@6.0.0",
        "cert-manager, API types",
        {("cert-manager.io/v1", kind): f"{_CERT}{kind}.js" for kind in ("Certificate", "Issuer")},
    ),
    (
        f"{SCOPE}/gateway-api@2.0.0",
        "Gateway API, API types",
        {("gateway.networking.k8s.io/v1", "HTTPRoute"): "IoK8sSigsGatewayApiApisV1HTTPRoute.js"},
    ),
)
INT_OR_STRING: Schema = {"x-kubernetes-int-or-string": True}
QUANTITY = "IoK8sApimachineryPkgApiResourceQuantity"
OPAQUE = {
    "IoK8sApimachineryPkgApisMetaV1ObjectMeta": {"type": "object"},
    "IoK8sApimachineryPkgUtilIntstrIntOrString": INT_OR_STRING,
    QUANTITY: INT_OR_STRING,
}

_FUNCTION = re.compile(r"function (validate\d+)\(data,\{instancePath")
_CALL = re.compile(
    r"(validate\d+)\(data(?:\.(?P<name>\w+)|\[\"(?P<quoted>[^\"]+)\"\]|\[i\d+\](?P<item>)|"
    r"\[key\d+\](?P<value>)|)(?=,\{instancePath)"
)
_IMPORT = re.compile(r"import\{validate as (validate\d+)\}from\"([^\"]+)\"")
_FAULT = re.compile(r"keyword:\"(\w+)\",params:\{((?:[^{}\"]|\"(?:[^\"\\]|\\.)*\")*)\}")
_ENUM = re.compile(r"(schema\d+)(?:_enum=|=\{[^{}]*?enum:)(\[[^\]]*\])")


@dataclass
class Module:
    """One file of validators, read as schemas."""

    files: dict[str, str]
    name: str
    bodies: dict[str, str] = field(default_factory=dict)
    imports: dict[str, str] = field(default_factory=dict)
    enums: dict[str, list[Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        text = self.files[self.name]
        marks = list(_FUNCTION.finditer(text))
        ends = [mark.start() for mark in marks[1:]] + [len(text)]
        for mark, end in zip(marks, ends, strict=True):
            self.bodies[mark[1]] = text[mark.start() : end]
        self.imports = {m[1]: m[2].rpartition("/")[2] for m in _IMPORT.finditer(text)}
        self.enums = {m[1]: json.loads(m[2]) for m in _ENUM.finditer(text)}
        whole = re.search(r"export const validate=(?:function )?(validate\d+)", text)
        assert whole is not None, self.name
        self.main = whole[1]

    def schema(self, function: str) -> Schema:
        """What the function checks."""
        if function in self.imports:
            return imported(self.files, self.imports[function])
        body = self.bodies[function]
        result = self._own(body, function)
        alternatives: list[Schema] = []
        for call in _CALL.finditer(body):
            if call[1] == function:
                continue
            part = self.schema(call[1])
            if name := call["name"] or call["quoted"]:
                result.setdefault("properties", {})[name] = part
            elif call["item"] is not None:
                result["items"] = part
            elif call["value"] is not None:
                result["additionalProperties"] = part
            elif 'keyword:"anyOf"' in body:
                alternatives.append(part)
            else:
                result = _both(part, result)
        if alternatives:
            assert {part["type"] for part in alternatives} == {"integer", "string"}, body
            return INT_OR_STRING
        return result or {"x-kubernetes-preserve-unknown-fields": True}

    def _own(self, body: str, function: str) -> Schema:
        result: Schema = {}
        for keyword, given in _FAULT.findall(body):
            values = dict(re.findall(r"(\w+):(\"(?:[^\"\\]|\\.)*\"|[-\w.]+)", given))
            if keyword == "required":
                result.setdefault("required", []).append(json.loads(values["missingProperty"]))
            elif keyword == "enum":
                result["enum"] = self.enums[
                    values["allowedValues"].removesuffix(".enum").removesuffix("_enum")
                ]
            elif keyword in ("type", "pattern", "format"):
                result[keyword] = json.loads(values[keyword])
            elif keyword != "anyOf":
                result[keyword] = json.loads(values["limit"])
        return result


def _both(part: Schema, own: Schema) -> Schema:
    """A struct with another one inlined."""
    merged = part | own
    for key, empty in (("properties", {}), ("required", [])):
        if key in part and key in own:
            merged[key] = part[key] | own[key] if empty == {} else part[key] + own[key]
    return merged


def imported(files: dict[str, str], module: str) -> Schema:
    """The schema of another module."""
    stem = module.removesuffix(".js")
    if stem in OPAQUE:
        return OPAQUE[stem]
    found = Module(files, f"{stem}.js")
    return found.schema(found.main)


def fetched(package: str, directory: str) -> tuple[dict[str, str], str]:
    """Its modules by name, and the SHA-256 of its archive."""
    run = ["npm", "pack", "--silent", package]
    name = subprocess.run(run, cwd=directory, check=True, capture_output=True, text=True).stdout
    content = (Path(directory) / name.split()[-1]).read_bytes()
    files = {}
    with tarfile.open(fileobj=io.BytesIO(content)) as archive:
        for member in archive:
            if "/_schemas/" in member.name and member.name.endswith((".js", ".mjs")):
                taken = archive.extractfile(member)
                assert taken is not None
                files[member.name.rpartition("/")[2]] = taken.read().decode()
    return files, hashlib.sha256(content).hexdigest()


def main() -> None:
    """Fetches, reads, writes."""
    with tempfile.TemporaryDirectory() as directory:
        base: dict[str, str] = {}
        for package in BASE:
            base |= fetched(package, directory)[0]
        for package, origin, kinds in SOURCES:
            files, digest = fetched(package, directory)
            for (version, kind), module in kinds.items():
                found = Module(base | files, module)
                spec = found.schema(found.main)["properties"]["spec"]
                content = {
                    "apiVersion": version,
                    "kind": kind,
                    "origin": origin,
                    "licence": "Apache-2.0",
                    "package": package,
                    "sha256": digest,
                    "spec": spec,
                }
                age = "released" if origin.endswith("CRD") else "newest"
                file = OUT / f"{kind}-{age}.json"
                file.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")
                print(file.name, len(file.read_text()))


if __name__ == "__main__":
    main()
