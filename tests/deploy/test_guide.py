"""docs/deploy.md and `helm test` do what they say."""

from __future__ import annotations

import json
import os
import re
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from chiasm.config import TlsConfig
from chiasm.demo import checkpoint_dir
from chiasm.tls import PeerTls
from tests.deploy.chart import CHART, IMAGE, ROOT, Object, objects, render
from tests.integration.certificates import Authority

FILES = ("tls_cert_file", "tls_key_file", "tls_ca_file")
GUIDE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```yaml\n(.*?)^```$", GUIDE, re.M | re.S)


def test_there_are_examples() -> None:
    assert len(SNIPPETS) >= 2


@pytest.mark.parametrize("snippet", SNIPPETS)
def test_examples_render(snippet: str) -> None:
    assert objects(IMAGE | yaml.safe_load(snippet))


def test_values_that_are_named_exist() -> None:
    values: Object = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))
    dotted = re.findall(rf"`((?:{'|'.join(values)})(?:\.\w+)+)`", GUIDE)
    assert len(dotted) >= 10
    for name in dotted:
        node: Any = values
        for key in name.split("."):
            assert key in node or key in values["defaults"], name
            node = node.get(key, values["defaults"].get(key))


class Gateway(BaseHTTPRequestHandler):
    """Serves one model and one answer; keeps the questions."""

    questions: list[Object]

    def do_GET(self) -> None:
        self.answer(json.dumps({"data": [{"id": "demo"}]}), "application/json")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["content-length"]))
        self.questions.append(json.loads(body))
        chunk = {"choices": [{"delta": {"content": "The picture shows a red circle."}}]}
        self.answer(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n", "text/event-stream")

    def answer(self, text: str, kind: str) -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, format: str, *args: Any) -> None:
        """Quiet."""


@pytest.fixture
def gateway() -> Iterator[tuple[int, list[Object]]]:
    with serving() as served:
        yield served


@contextmanager
def serving(door: ssl.SSLContext | None = None) -> Iterator[tuple[int, list[Object]]]:
    questions: list[Object] = []
    handler = type("Handler", (Gateway,), {"questions": questions})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    if door is not None:
        server.socket = door.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port, questions
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def test_helm_test_asks_about_a_picture(gateway: tuple[int, list[Object]], tmp_path: Path) -> None:
    """The pod's own script, as it is, with only the address changed."""
    port, questions = gateway
    pod = yaml.safe_load(render(IMAGE)["tests/answer.yaml"])
    assert "http://chiasm-gateway:8000" in pod["spec"]["containers"][0]["args"][0]
    run_test_pod(pod, tmp_path, {"chiasm-gateway:8000": f"127.0.0.1:{port}"})
    picture, question = questions[0]["messages"][0]["content"]
    assert question["text"] == "What is in the picture?"
    assert picture["image_url"]["url"].startswith("data:image/png;base64,")
    assert (checkpoint_dir().parent / "pictures" / "red_circle.png").is_file()


def run_test_pod(pod: Object, tmp_path: Path, changes: dict[str, str]) -> None:
    (container,) = pod["spec"]["containers"]
    (script,) = container["args"]
    for here, there in changes.items():
        assert here in script
        script = script.replace(here, there)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        [*container["command"], script],
        cwd=tmp_path,
        env={"PATH": path, "PYTHONPATH": str(ROOT), "HOME": str(tmp_path)},
        check=False,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert (done.returncode, done.stdout) == (0, "The picture shows a red circle.\n"), done.stderr


DOORS: tuple[tuple[Object, str], ...] = (
    ({"enabled": True}, "chiasm"),
    ({"enabled": True, "frontDoor": "tls"}, "chiasm"),
    ({"enabled": True, "frontSecret": "users"}, "127.0.0.1"),
)


@pytest.mark.parametrize(("tls", "name"), DOORS)
def test_helm_test_gets_through_a_door_with_tls(tls: Object, name: str, tmp_path: Path) -> None:
    """It shows what it has mounted, and looks for the name that the certificate holds."""
    pod = yaml.safe_load(render(IMAGE | {"tls": tls})["tests/answer.yaml"])
    (mount,) = pod["spec"]["containers"][0]["volumeMounts"]
    (volume,) = pod["spec"]["volumes"]
    assert volume["secret"]["secretName"] == tls.get("frontSecret", "chiasm-tls")
    identity = Authority(tmp_path / "ca").issue("own", dns=name)
    files = identity.certificate, identity.key, identity.ca
    for file, key in zip(files, ("tls.crt", "tls.key", "ca.crt"), strict=True):
        (tmp_path / key).write_bytes(file.read_bytes())
    config = TlsConfig(**dict(zip(FILES, map(str, files), strict=True)))
    door = PeerTls(config).context(strangers="frontDoor" in tls)
    with serving(door) as (port, questions):
        changes = {"chiasm-gateway:8000": f"127.0.0.1:{port}", mount["mountPath"]: str(tmp_path)}
        run_test_pod(pod, tmp_path, changes)
    assert len(questions) == 1


def test_helm_test_brings_a_key_where_one_is_asked_for() -> None:
    keys = IMAGE | {"apiKeys": {"existingSecret": "keys"}}
    assert not render(keys)["tests/answer.yaml"].strip(), "it could only fail"
    with_key = keys | {"helmTest": {"apiKey": {"secret": "test", "key": "value"}}}
    pod = yaml.safe_load(render(with_key)["tests/answer.yaml"])
    (variable,) = pod["spec"]["containers"][0]["env"]
    reference = {"name": "test", "key": "value"}
    assert variable == {"name": "OPENAI_API_KEY", "valueFrom": {"secretKeyRef": reference}}
