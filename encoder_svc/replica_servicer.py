"""The rpcs of the base port of several workers: it lists them. Rows are had from the workers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc

from chiasm.errors import MethodNotAllowed
from chiasm.server import load_interval_s
from chiasm.v1 import common_pb2, encoder_pb2, encoder_pb2_grpc
from encoder_svc.roster import Roster

Context = grpc.aio.ServicerContext[Any, Any]

_ELSEWHERE = "this port only lists the workers that Describe names: call one of them"


class ReplicaServicer(encoder_pb2_grpc.EncoderServicer):
    """Answers from a roster."""

    def __init__(self, roster: Roster) -> None:
        self._roster = roster

    async def Describe(
        self, request: common_pb2.DescribeRequest, context: Context
    ) -> common_pb2.Description:
        """Who the live workers are. UNAVAILABLE while there is none."""
        return self._roster.describe()

    async def WatchLoad(
        self, request: common_pb2.WatchLoadRequest, context: Context
    ) -> AsyncIterator[common_pb2.Load]:
        """The workers' loads together; ends when one joins or leaves: time to Describe again."""
        interval_s = load_interval_s(request)
        version = self._roster.version
        self._roster.describe()  # raises when there is nobody to watch
        yield self._roster.load()
        while not await self._roster.changed(version, interval_s):
            yield self._roster.load()

    def Encode(
        self, requests: AsyncIterator[encoder_pb2.EncodeRequest], context: Context
    ) -> AsyncIterator[encoder_pb2.EncodeResponse]:
        """Not here."""
        raise MethodNotAllowed(_ELSEWHERE)

    def Fetch(
        self, requests: AsyncIterator[encoder_pb2.FetchRequest], context: Context
    ) -> AsyncIterator[encoder_pb2.FetchResponse]:
        """Not here."""
        raise MethodNotAllowed(_ELSEWHERE)

    async def Fence(
        self, request: encoder_pb2.FenceRequest, context: Context
    ) -> encoder_pb2.FenceResponse:
        """Not here."""
        raise MethodNotAllowed(_ELSEWHERE)
