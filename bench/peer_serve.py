"""Starts `transformers serve` where torchvision's compiled operators do not load.

Run as `python -m bench.peer_serve --port N CHECKPOINT [flags of transformers serve]`. The server is
left as it is: torchvision's operators are declared, and pictures are decoded by Pillow instead of
the decoder that is missing. Prints the ready line that `chiasm.process` waits for.
"""

from __future__ import annotations

import argparse
import io
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps

from tests import torchvision_ops

EXTRA_PACKAGES = Path(__file__).resolve().parents[1] / ".peer"  # made by `make bench-cpu`
POLL_S = 0.2


def decode_image(data: torch.Tensor, mode: Any = None, **_: Any) -> torch.Tensor:
    """What `torchvision.io.decode_image` returns: RGB, uint8, [3, height, width], upright."""
    picture = ImageOps.exif_transpose(Image.open(io.BytesIO(data.numpy().tobytes())))
    return torch.from_numpy(np.asarray(picture.convert("RGB")).copy()).permute(2, 0, 1)


def say_when_ready(port: int) -> None:
    """Prints the ready line once the server answers."""
    while True:
        try:
            urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1.0).close()
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_S)
        else:
            print(f"chiasm-ready role=peer address=127.0.0.1:{port}", flush=True)
            return


def main() -> None:
    """Becomes `transformers serve`."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    own, rest = parser.parse_known_args()
    sys.path.append(str(EXTRA_PACKAGES))
    torchvision_ops.declare()
    import torchvision.io
    from transformers.cli.transformers import main as transformers_main

    torchvision.io.decode_image = decode_image
    threading.Thread(target=say_when_ready, args=(own.port,), daemon=True).start()
    usual = ["--host", "127.0.0.1", "--port", str(own.port), "--device", "cpu"]
    sys.argv = ["transformers", "serve", *usual, *rest]
    transformers_main()


if __name__ == "__main__":
    main()
