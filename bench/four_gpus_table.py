"""The table of `bench/four_gpus.sh`: `python -m bench.four_gpus_table FOLDER`.

Beside each figure stands what it is held to; what is missing was not measured.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

Found = dict[str, dict[str, Any]]
_LAYOUTS = {"1x1": "1 GPU", "2x1": "TP2", "4x1": "TP4", "2x2": "TP2 x PP2"}
_PLACES = {"colocated": "an encoder on each of 4 GPUs", "apart": "2 encoders + TP2"}
_BATCHES = (1, 2, 32, 128, 256)


def read(folder: Path) -> Found:
    """Results by file name."""
    return {p.stem: json.loads(p.read_text(encoding="utf-8")) for p in folder.glob("*.json")}


def value(found: Found, file: str, *keys: str) -> float | None:
    """One figure, if it was measured."""
    at: Any = found.get(file, {})
    for key in keys:
        at = at.get(key, {})
    return None if at == {} else float(at)


def decode_rows(found: Found) -> list[str]:
    """Tokens a second, by batch and layout."""
    measured = [b for b in _BATCHES if any(f"decode.{b}" in results for results in found.values())]
    lines = [
        f"| decode, tokens/s | {' | '.join(_LAYOUTS.values())} |",
        f"|---|{'---|' * len(_LAYOUTS)}",
    ]
    for batch in measured:
        rates = [value(found, f"decode-{n}", f"decode.{batch}", "tokens_s") for n in _LAYOUTS]
        cells = ["" if rate is None else f"{rate:,.0f}" for rate in rates]
        lines.append(f"| batch {batch} | {' | '.join(cells)} |")
    return lines


def vision_rows(found: Found) -> list[str]:
    """Milliseconds with pictures and the clip, by where the encoders are."""
    lines = [f"| ms, medians | {' | '.join(_PLACES.values())} |", f"|---|{'---|' * len(_PLACES)}"]
    wanted = [
        *((f"first token, {n} x 1080p", f"pictures.{n}", "ttft_p50") for n in range(1, 5)),
        ("clip, prompt tokens", "clip", "prompt_tokens"),
        ("clip, end to end", "clip", "whole_p50"),
        ("clip, first token", "clip", "ttft_p50"),
        ("clip, decoding all frames on one core", "clip", "decode_ms"),
    ]
    for words, part, key in wanted:
        cells = [value(found, place, part, key) for place in _PLACES]
        if any(cell is not None for cell in cells):
            shown = ["" if cell is None else f"{cell:,.0f}" for cell in cells]
            lines.append(f"| {words} | {' | '.join(shown)} |")
    return lines


def claims(found: Found) -> list[str]:
    """What is asked, what was found."""
    single, tp2 = (value(found, f"decode-{n}", "decode.1", "tokens_s") for n in ("2x2", "2x1"))
    many, tp2_many = (value(found, f"decode-{n}", "decode.256", "tokens_s") for n in ("2x2", "2x1"))
    busy = found.get("decode-2x2", {}).get("busy", {})
    taught = {n: found.get(f"decode-{n}", {}).get("teach") for n in _LAYOUTS if n != "1x1"}
    asked = [
        ("one stream at TP2 x PP2 over TP2", 0.95, _ratio(single, tp2)),
        ("one stream at TP2 x PP2, tokens/s", 330, single),
        ("one stream at TP4, tokens/s", 450, value(found, "decode-4x1", "decode.1", "tokens_s")),
        ("batch 256 at TP2 x PP2 over TP2", 1.8, _ratio(many, tp2_many)),
        (
            "least busy GPU at batch 128",
            0.85,
            min((rank["busy"] for rank in busy.values()), default=None),
        ),
    ]
    lines = ["| | asked | found |", "|---|---|---|"]
    lines += [f"| {w} | at least {least:g} | {_shown(found)} |" for w, least, found in asked]
    for words, most, part, key in (
        ("clip, end to end, ms", 1800, "clip", "whole_p50"),
        ("first token of 4 x 1080p, ms", 350, "pictures.4", "ttft_p50"),
    ):
        times = [t for place in _PLACES if (t := value(found, place, part, key)) is not None]
        lines.append(f"| {words} | at most {most} | {_shown(min(times, default=None))} |")
    for name, counts in taught.items():
        if counts is not None:
            said = f"{counts['different']} of {counts['compared']} ({counts['near']} too near)"
            lines.append(f"| other first choices than one GPU, {_LAYOUTS[name]} | 0 | {said} |")
    return lines


def surroundings() -> str:
    """Versions and commit."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return (
        f"commit {commit or 'unknown'}; GPUs: {', '.join(gpus) or 'none (a rehearsal)'}; "
        f"Python {platform.python_version()}, torch {torch.__version__}"
    )


def _ratio(a: float | None, b: float | None) -> float | None:
    return None if a is None or not b else a / b


def _shown(number: float | None) -> str:
    return (
        "not measured" if number is None else f"{number:,.3g}" if number < 10 else f"{number:,.0f}"
    )


def main() -> None:
    """Prints the table and keeps it."""
    folder = Path(sys.argv[1])
    found = read(folder)
    parts = (decode_rows(found), vision_rows(found), claims(found), [surroundings()])
    text = "\n\n".join("\n".join(lines) for lines in parts)
    print(text)
    (folder / "table.md").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
