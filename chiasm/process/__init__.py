"""How processes are started, watched and never orphaned."""

from chiasm.process.child import READY_PREFIX, Child, DidNotStart
from chiasm.process.lifeline import end_with_parent
from chiasm.process.supervisor import (
    BACKOFF_S,
    HEALTHY_AFTER_S,
    SUPERVISOR,
    Relay,
    Spec,
    Supervisor,
)

__all__ = [
    "BACKOFF_S",
    "HEALTHY_AFTER_S",
    "READY_PREFIX",
    "SUPERVISOR",
    "Child",
    "DidNotStart",
    "Relay",
    "Spec",
    "Supervisor",
    "end_with_parent",
]
