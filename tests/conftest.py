"""What every test relies on: one thread per process, no network."""

from __future__ import annotations

import os

# Before torch, tokenizers or huggingface_hub is imported anywhere, child processes included. Test
# workers share few cores, and a pool of threads in each makes all of them slow.
os.environ.update(OMP_NUM_THREADS="1", TOKENIZERS_PARALLELISM="false", HF_HUB_OFFLINE="1")
