"""Creates the checkpoint directory with random weights: configs, tokenizer, template, weights."""

from __future__ import annotations

import argparse
from pathlib import Path

from tools.demo_model.model import DemoModel, initialise
from tools.demo_model.spec import write_configs
from tools.demo_model.tokenizer import write_tokenizer
from tools.demo_model.weights import save_weights


def main() -> None:
    """Write everything but the hand-written chat template."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, nargs="?", default=Path("chiasm/demo/checkpoint"))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    options.directory.mkdir(parents=True, exist_ok=True)
    write_configs(options.directory)
    write_tokenizer(options.directory)
    model = DemoModel()
    initialise(model, seed=options.seed)
    save_weights(model, options.directory)


if __name__ == "__main__":
    main()
