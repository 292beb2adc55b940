"""The services behind a gateway under test: `chiasm.fakes` on real ports, and a fake OpenAI server.

Run as `python -m bench.fake_peers services|openai`; prints the ready line of a service.
"""

from __future__ import annotations

import argparse
import asyncio
import json

from aiohttp import web

from chiasm.checkpoint import resolve_model
from chiasm.fakes import FakeDecoder, FakeEncoder, Script, serve_pair
from chiasm.server import until_signal

MODEL_LEN = 8192
TOKEN_IDS = tuple(range(64, 90))  # letters of the demo vocabulary


async def serve_both(token_s: float) -> None:
    """An encoder and a decoder until SIGTERM."""
    decoder = FakeDecoder(Script(token_ids=TOKEN_IDS * 200, stop_token_id=None, token_s=token_s))
    await serve_pair(FakeEncoder(), decoder, resolve_model("demo"), max_model_len=MODEL_LEN)


async def serve_openai(token_s: float) -> None:
    """The same answer in OpenAI's shape, for proxies that have such a server behind them."""

    async def chat(request: web.Request) -> web.StreamResponse:
        body = json.loads(await request.read())
        count = body.get("max_tokens") or body.get("max_completion_tokens") or 16
        words = [chr(97 + i % 26) for i in range(count)]
        if not body.get("stream"):
            return web.json_response(_whole("".join(words), count))
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for word in words:
            await asyncio.sleep(token_s)
            await response.write(_chunk({"role": "assistant", "content": word}))
        await response.write(_chunk({}, "length") + b"data: [DONE]\n\n")
        return response

    app = web.Application(client_max_size=1 << 28)
    app.router.add_post("/v1/chat/completions", chat)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(f"chiasm-ready role=openai address=127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await until_signal()
    await runner.cleanup()


def _whole(text: str, count: int) -> dict[str, object]:
    message = {"role": "assistant", "content": text}
    return {
        "id": "chatcmpl-1",
        "object": "chat.completion",
        "created": 1,
        "model": "demo",
        "choices": [{"index": 0, "message": message, "finish_reason": "length"}],
        "usage": {"prompt_tokens": 100, "completion_tokens": count, "total_tokens": 100 + count},
    }


def _chunk(delta: dict[str, str], reason: str | None = None) -> bytes:
    body = {
        "id": "chatcmpl-1",
        "object": "chat.completion.chunk",
        "created": 1,
        "model": "demo",
        "choices": [{"index": 0, "delta": delta, "finish_reason": reason}],
    }
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def main() -> None:
    """Serves one role."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("role", choices=("services", "openai"))
    parser.add_argument("--token-s", type=float, default=0.0)
    args = parser.parse_args()
    job = serve_openai(args.token_s) if args.role == "openai" else serve_both(args.token_s)
    asyncio.run(job)


if __name__ == "__main__":
    main()
