"""Python's garbage collector, told that what has been loaded stays.

A full collection looks at every object there is, nearly all of them modules, classes and settings
that live as long as the process: a tenth of a second in which no stream of it goes on.
"""

from __future__ import annotations

import gc


def keep_loaded_objects() -> None:
    """From now on no collection looks at the objects of this moment. Call it once, when loaded."""
    gc.collect()
    gc.freeze()
