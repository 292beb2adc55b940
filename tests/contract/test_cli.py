"""The command line as people meet it: help, print-outs, one-line complaints, exit codes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from chiasm import __version__
from chiasm.cli.main import SERVICES, run
from chiasm.cli.service import serve
from chiasm.config import EncoderConfig
from chiasm.logs import setup_logging

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("up", "demo", "ask", "bench", "check")


def chiasm(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "chiasm.cli", *arguments],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
        env={k: v for k, v in os.environ.items() if not k.startswith("CHIASM_")} | env,
    )


@pytest.mark.parametrize("command", [(), *((name,) for name in COMMANDS)])
def test_help_of_commands(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    assert run([*command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Usage: chiasm")
    if not command:
        assert all(f" {name} " in out for name in (*COMMANDS, *SERVICES))


@pytest.mark.parametrize("role", SERVICES)
def test_help_and_print_config_of_services(role: str) -> None:
    done = chiasm(role, "--help")
    assert done.returncode == 0, done.stderr
    assert "--print-config" in done.stdout
    printed = chiasm(role, "--model", "demo", "--print-config")
    assert printed.returncode == 0, printed.stderr
    assert yaml.safe_load(printed.stdout)["model"] == "demo"


def test_print_config_round_trips_through_a_file(tmp_path: Path) -> None:
    flags = ("--model", "demo", "--encoder-urls", "a:1", "b:2", "--encoder-urls", "c:3,d:4")
    first = chiasm("gateway", *flags, "--allow-private-media", "--print-config", CHIASM_PORT="81")
    file = tmp_path / "c.yaml"
    file.write_text(first.stdout)
    tree = yaml.safe_load(first.stdout)
    assert tree["encoder_urls"] == ["a:1", "b:2", "c:3", "d:4"]
    assert tree["server"]["port"] == 81
    assert chiasm("gateway", "--config", str(file), "--print-config").stdout == first.stdout
    by_env = chiasm("gateway", "--print-config", CHIASM_CONFIG=str(file))
    assert by_env.stdout == first.stdout


def test_up_prints_the_three_configs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["up", "--encoders", "3", "--decoder-args", "--kv-blocks 7", "--print-config"]) == 0
    trees = yaml.safe_load(capsys.readouterr().out)
    assert list(trees) == ["encoder", "decoder", "gateway"]
    assert trees["decoder"]["memory"]["kv_blocks"] == 7


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out.strip() == __version__


COMPLAINTS = {
    "up --encoders 0": (2, "--encoders must be at least 1, got 0"),
    "up --prot 3": (2, "Unknown option: --prot. Did you mean --port?"),
    "frob": (2, 'Unknown command "frob"'),
    "ask": (2, "say what to ask"),
    "ask /no/such.png what": (1, "/no/such.png: No such file or directory"),
    "ask --url http://127.0.0.1:9 hello": (1, "nothing answers at http://127.0.0.1:9"),
    "bench --url http://127.0.0.1:9": (1, "nothing answers at http://127.0.0.1:9"),
    "bench --requests 0": (2, "--requests must be at least 1"),
}


@pytest.mark.parametrize(("line", "expected"), COMPLAINTS.items())
def test_complaints_are_one_line(
    line: str, expected: tuple[int, str], capsys: pytest.CaptureFixture[str]
) -> None:
    code, message = expected
    assert run(line.split()) == code
    error = capsys.readouterr().err
    assert error.startswith("chiasm: error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        ([], 2, "--model is required"),
        (["--model=demo", "--port=x"], 2, "Invalid value for --port"),
        (["--model=demo", "--port=70000"], 2, "--port must be in [0, 65535], got 70000"),
        (["--model=demo", "--dig"], 2, "Unknown option: --dig"),
        (["--model=demo", "--log-level=loud"], 2, "--log-level must be one of debug, info"),
        (["--model=demo", "stray"], 2, "stray"),
        (["--model=demo", "--config=/no/such.yaml"], 2, "/no/such.yaml: No such file"),
    ],
)
def test_services_refuse_bad_settings_in_one_line(
    flags: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert serve(EncoderConfig, "encoder_svc.app:main", flags, {}) == code
    error = capsys.readouterr().err
    assert error.startswith("encoder_svc: error: ")
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize("role", SERVICES)
def test_services_refuse_a_missing_checkpoint(role: str) -> None:
    done = chiasm(role, "--model", "/no/such/directory", "--port", "0")
    assert done.returncode == 2
    assert "no such directory" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_check_reports_this_machine_and_the_demo_checkpoint() -> None:
    done = chiasm("check", "--model", "demo")
    assert done.returncode == 0, done.stdout
    words = ("python", "torch", "nixl", "UCX_LOG_LEVEL=fatal", "/dev/shm", "qwen2_5_vl", "weights")
    for word in words:
        assert word in done.stdout


def test_check_fails_on_a_checkpoint_without_weights(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen2_5_vl"}')
    done = chiasm("check", "--model", str(tmp_path))
    assert done.returncode == 1
    assert "no *.safetensors" in done.stdout
    assert "missing" in done.stdout


def test_log_records_are_one_line_whatever_the_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = (
        "import logging; from chiasm.logs import setup_logging; setup_logging('info')\n"
        "logging.getLogger('a').info('first\\n2026-01-01T00:00:00.000Z ERROR root: forged')\n"
        "logging.getLogger('a').debug('hidden')\n"
        "try: 1 / 0\n"
        "except ZeroDivisionError: logging.getLogger('a').exception('broken')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    lines = done.stderr.splitlines()
    assert lines[0].endswith("INFO a: first\\n2026-01-01T00:00:00.000Z ERROR root: forged")
    assert lines[1].endswith("ERROR a: broken")
    assert all(line.startswith("    | ") for line in lines[2:])
    assert "ZeroDivisionError" in lines[-1]
    with pytest.raises(ValueError, match="--log-level"):
        setup_logging("loud")
