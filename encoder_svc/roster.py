"""The live workers of one replica: what each says of itself, and how busy it is.

Owns no process and no channel: `encoder_svc.replicas` tells it who has come and gone.
"""

from __future__ import annotations

import asyncio
import contextlib

from chiasm.errors import Unavailable
from chiasm.v1 import common_pb2


class Roster:
    """Workers by name. A worker is live from `join` to `leave`.

    Args:
        identity: instance_id, epoch and advertised_address of whoever lists them.
    """

    def __init__(self, identity: common_pb2.Description) -> None:
        self._identity = identity
        self._workers: dict[str, common_pb2.Description] = {}
        self._loads: dict[str, common_pb2.Load] = {}
        self.version = 0
        """Counts joins and leaves."""
        self.draining = False
        """Whether the replica is on its way out."""
        self._changed = asyncio.Event()

    @property
    def num_live(self) -> int:
        """Live workers."""
        return len(self._workers)

    def join(self, name: str, description: common_pb2.Description) -> None:
        """A worker is live; so it describes itself."""
        if self._workers.get(name) != description:
            self._workers[name] = description
            self._tell()

    def leave(self, name: str) -> None:
        """A worker is live no more. One that is not there is passed over."""
        self._loads.pop(name, None)
        if self._workers.pop(name, None) is not None:
            self._tell()

    def advise(self, name: str, load: common_pb2.Load) -> None:
        """How busy a live worker is."""
        if name in self._workers:
            self._loads[name] = load

    def describe(self) -> common_pb2.Description:
        """What the workers have in common, and who they are, in order of their names.

        Raises:
            Unavailable: None is live, so that nobody takes the lister for a worker.
        """
        if not self._workers:
            raise Unavailable("no worker of this encoder is ready")
        members = [self._workers[name] for name in sorted(self._workers, key=_order)]
        answer = common_pb2.Description()
        answer.CopyFrom(members[0])
        answer.ClearField("workers")
        answer.MergeFrom(self._identity)
        for member in members:
            answer.workers.extend(member.workers)
        return answer

    def load(self) -> common_pb2.Load:
        """The sum over live workers, as last heard."""
        loads = self._loads.values()
        return common_pb2.Load(
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            pending_patches=sum(load.pending_patches for load in loads),
            embedding_bytes_free=sum(load.embedding_bytes_free for load in loads),
            embedding_bytes_total=sum(load.embedding_bytes_total for load in loads),
            draining=self.draining,
        )

    async def changed(self, since: int, timeout_s: float | None = None) -> bool:
        """Waits until the version is another than `since`. False: it was not in that time."""
        if self.version == since:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), timeout_s)
        return self.version != since

    def _tell(self) -> None:
        self.version += 1
        self._changed.set()
        self._changed = asyncio.Event()


def _order(name: str) -> tuple[int, str]:
    return len(name), name
