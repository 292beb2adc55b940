"""With TLS: the certificates that pods show, and what is asked for at each of their ports."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.deploy.chart import IMAGE, SCENARIOS, Object, config_of, objects, of_kind, pods, scenario

by_scenario = pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)


@by_scenario
def test_no_port_is_plain_where_there_is_tls_but_a_door_that_is_said_to_be(path: Path) -> None:
    values = scenario(path).get("tls", {})
    found = objects(scenario(path))
    for role, pod in pods(found).items():
        config = config_of(role, pod)
        assert bool(config.server.tls.tls_cert_file) is bool(values.get("enabled"))
        if role == "gateway" and values.get("enabled"):
            assert config.front.front_door == values.get("frontDoor", "required")
            ours = {volume["name"]: volume for volume in pod["volumes"]}
            secret = values.get("frontSecret", "")
            assert ours.get("front", {}).get("secret", {}).get("secretName", "") == secret
        (container,) = pod["containers"]
        numbers = {port["containerPort"] for port in container["ports"]}
        metrics = {9090 + worker for worker in range(getattr(config, "dp_size", 1))}
        assert numbers - metrics == ({8000, 50051} if role == "gateway" else {50051})


TLS_KINDS = {"enabled": True}, {"enabled": True, "existingSecret": "given", "peerName": "a.b"}


@pytest.mark.parametrize("tls", TLS_KINDS)
def test_all_roles_show_one_certificate_and_expect_its_name(tls: Object) -> None:
    found = objects(IMAGE | {"tls": tls})
    made = {
        item["metadata"]["name"]: item["spec"] for item in found if item["kind"] == "Certificate"
    }
    for role, pod in pods(found).items():
        (volume,) = [v for v in pod["volumes"] if v["name"] == "tls"]
        (container,) = pod["containers"]
        (mount,) = [m for m in container["volumeMounts"] if m["name"] == "tls"]
        assert "subPath" not in mount, "a new certificate would not show"
        ours = config_of(role, pod).server.tls
        files = [ours.tls_cert_file, ours.tls_key_file, ours.tls_ca_file]
        assert files == [f"{mount['mountPath']}/{i['path']}" for i in volume["secret"]["items"]]
        if "existingSecret" in tls:
            assert volume["secret"]["secretName"] == "given"
            assert ours.tls_peer_name == "a.b"
            assert not made
        else:
            certificate = made["chiasm-tls"]
            assert volume["secret"]["secretName"] == certificate["secretName"]
            service = of_kind(found, "Service")["gateway"]["metadata"]["name"]
            users = [service, f"{service}.models", f"{service}.models.svc"]
            assert certificate["dnsNames"] == [ours.tls_peer_name, *users]
            assert {"server auth", "client auth"} <= set(certificate["usages"])


def test_a_ca_of_the_releases_own_signs_its_certificate() -> None:
    found = objects(IMAGE | {"tls": {"enabled": True}})
    issuers = {i["metadata"]["name"]: i["spec"] for i in found if i["kind"] == "Issuer"}
    made = {i["metadata"]["name"]: i["spec"] for i in found if i["kind"] == "Certificate"}
    signer = issuers[made["chiasm-tls"]["issuerRef"]["name"]]
    (ca,) = [c for c in made.values() if c["secretName"] == signer["ca"]["secretName"]]
    assert ca["isCA"]
    assert issuers[ca["issuerRef"]["name"]] == {"selfSigned": {}}
