"""Everything is closed without a key, whatever the spelling; health alone is open."""

from __future__ import annotations

import hashlib
import logging
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from chiasm.errors import Unauthenticated
from gateway.api.drain import Gate
from gateway.api.keys import ApiKeys
from gateway.api.rest import build_app
from gateway.tenants import Tenants
from tests.unit.gateway_face.scripted import ScriptedPipeline, chat, client_of, make_face

KEY, OTHER = "sk-right", "sk-other"
KEYS = ApiKeys([hashlib.sha256(key.encode()).digest() for key in (KEY, OTHER)])
BEARER = {"authorization": f"Bearer {KEY}"}


def all_paths() -> list[str]:
    app = build_app(make_face(ScriptedPipeline()), Gate())
    paths = {"/openapi.json", "/docs", *app.openapi()["paths"]}
    return sorted(path.replace("{model_id}", "demo") for path in paths)


def spellings(path: str) -> list[str]:
    return [
        path,
        path + "/",
        "/" + path,
        path.upper(),
        path.title(),
        path + "//",
        path.replace("/", "//"),
        "/health/.." + path,
        "/health" + path,
        path + "?x=/health",
        path + "/health",
        path + ";/health",
        path.replace("o", "%6f"),
    ]


def test_the_list_of_routes_is_the_one_we_think() -> None:
    assert {"/v1/chat/completions", "/metrics", "/openapi.json", "/tokenize"} <= set(all_paths())


@pytest.mark.parametrize("path", [p for p in all_paths() if p not in ("/health", "/ready")])
async def test_no_spelling_of_a_path_is_open(path: str) -> None:
    pipeline = ScriptedPipeline()
    async with client_of(make_face(pipeline, keys=KEYS)) as client:
        for spelling in spellings(path):
            for method in ("GET", "POST", "HEAD", "OPTIONS", "PUT"):
                url = httpx.URL("http://gateway" + spelling)
                answer = await client.request(method, url, json=chat())
                assert answer.status_code == 401, (method, spelling)
                assert answer.headers["www-authenticate"] == "Bearer"
                if method != "HEAD":
                    assert answer.json()["error"]["code"] == "invalid_api_key"
    assert not pipeline.jobs


@pytest.mark.parametrize("path", ["/health", "/ready"])
async def test_health_is_open_and_tells_no_addresses(path: str) -> None:
    async with client_of(make_face(ScriptedPipeline(), keys=KEYS)) as client:
        answer = await client.get(path)
        assert answer.status_code == 200
        assert "d:1" not in answer.text
        assert (await client.get(path.upper())).status_code == 401
    async with client_of(make_face(ScriptedPipeline(), keys=KEYS)) as client:
        assert "d:1" in (await client.get("/ready", headers=BEARER)).text


@pytest.mark.parametrize(
    "headers",
    [
        [],
        [("authorization", "Bearer wrong")],
        [("authorization", f"Basic {KEY}")],
        [("authorization", KEY)],
        [("authorization", "Bearer")],
        [("authorization", "")],
        [("authorization", f"Bearer {KEY}"), ("authorization", "Bearer wrong")],
        [("authorization", f"Bearer {KEY}"), ("authorization", f"Bearer {KEY}")],
        [("authorization", f"Bearer {hashlib.sha256(KEY.encode()).hexdigest()}")],
        [("x-api-key", KEY)],
    ],
)
async def test_wrong_keys_are_refused(headers: list[tuple[str, str]]) -> None:
    async with client_of(make_face(ScriptedPipeline(), keys=KEYS)) as client:
        answer = await client.post("/v1/chat/completions", json=chat(), headers=headers)
        assert answer.status_code == 401


async def test_right_keys_pass_and_have_tenants_of_their_own(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.DEBUG)
    pipeline = ScriptedPipeline()
    async with client_of(make_face(pipeline, keys=KEYS)) as client:
        for value in (f"Bearer {KEY}", f"bearer {KEY}", f"BEARER  {KEY} ", f"Bearer {OTHER}"):
            headers = {"authorization": value}
            answer = await client.post("/v1/chat/completions", json=chat(), headers=headers)
            assert answer.status_code == 200
    salts = [job.tenant_salt for job in pipeline.jobs]
    assert salts[0] == salts[1] == salts[2] != salts[3]
    assert hashlib.sha256(KEY.encode()).digest() not in salts
    assert KEY not in caplog.text


def test_without_keys_everybody_is_let_in_and_shares_caches() -> None:
    assert ApiKeys().tenant([]) == ApiKeys().tenant(["Bearer x"]) == b""


def test_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    path.write_text(f"# team a\n\n  {digest.upper()}  \n")
    keys = ApiKeys.from_file(str(path))
    assert keys.tenant([f"Bearer {KEY}"])
    with pytest.raises(Unauthenticated):
        keys.tenant(["Bearer x"])
    for text, message in ((KEY, "line 1"), ("", "no key"), ("# only\n", "no key"), ("é", "read")):
        path.write_text(text)
        with pytest.raises(ValueError, match=message) as caught:
            ApiKeys.from_file(str(path))
        assert KEY not in str(caught.value)
    with pytest.raises(ValueError, match="cannot be read"):
        ApiKeys.from_file(str(tmp_path / "none"))


async def test_limits_of_a_key_are_refused_with_429_and_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    digests = [hashlib.sha256(key.encode()).hexdigest() for key in (KEY, OTHER)]
    path.write_text(f"* requests_per_s=1\n{digests[0]}\n{digests[1]} inflight=0\n")
    keys = ApiKeys.from_file(str(path))
    face = make_face(ScriptedPipeline(), keys=keys)
    face = replace(face, tenants=Tenants(keys.limits_of, clock=lambda: 0.0))  # in no time
    async with client_of(face) as client:
        first, second = [
            await client.post("/v1/chat/completions", json=chat(), headers=BEARER) for _ in "12"
        ]
        assert (first.status_code, second.status_code) == (200, 429)
        assert second.headers["retry-after"] == "1"
        assert second.json()["error"]["code"] == "resource_exhausted"
        assert (await client.get("/metrics", headers=BEARER)).status_code == 200
        other = {"authorization": f"Bearer {OTHER}"}  # has limits of its own: none
        for _ in range(3):
            answer = await client.post("/v1/chat/completions", json=chat(), headers=other)
            assert answer.status_code == 200


def test_a_changed_file_is_read_again_and_a_broken_one_lets_nobody_else_in(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    now = 0.0
    path = tmp_path / "keys"
    mine, other = (hashlib.sha256(key.encode()).hexdigest() for key in (KEY, OTHER))
    path.write_text(mine)
    keys = ApiKeys.from_file(str(path), clock=lambda: now)
    assert keys.tenant([f"Bearer {KEY}"])
    path.write_text(f"{other} inflight=3")
    now += 2
    tenant = keys.tenant([f"Bearer {OTHER}"])
    assert keys.limits_of(tenant).inflight == 3
    with pytest.raises(Unauthenticated):  # taken out of the file: shut out
        keys.tenant([f"Bearer {KEY}"])
    for broken in ("", "nonsense", f"{mine} inflight=x", "# none"):
        path.write_text(broken)
        now += 2
        with pytest.raises(Unauthenticated):
            keys.tenant([f"Bearer {KEY}"])
        assert keys.tenant([f"Bearer {OTHER}"]) == tenant
    path.unlink()
    now += 2
    with pytest.raises(Unauthenticated):
        keys.tenant([])
    assert keys.tenant([f"Bearer {OTHER}"]) == tenant
    assert "the keys are those of before" in caplog.text
    # As Kubernetes exchanges a mounted secret: by a symbolic link.
    (tmp_path / "new").write_text(mine)
    path.symlink_to(tmp_path / "new")
    now += 2
    assert keys.tenant([f"Bearer {KEY}"])


def test_what_limits_cannot_be_is_said_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    digest = hashlib.sha256(KEY.encode()).hexdigest()
    for words, message in (("tokens=1", "line 1: tokens"), ("inflight=many", "not a number")):
        path.write_text(f"{digest} {words}\n")
        with pytest.raises(ValueError, match=message):
            ApiKeys.from_file(str(path))
