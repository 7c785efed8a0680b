"""How does a web service compute its requests in other processes?

    pip install 'hoplite-mp[examples]'
    python examples/web_service.py --port 8000
    curl -d '{"features": [1, 2, 3, 4]}' localhost:8000/predict

The event loop only parses and answers: `await` takes no thread, however many requests wait. The
model lies in shared memory once, and every worker reads it without a copy. A worker that dies is
replaced, and its requests are tried again.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

import hoplite_mp

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from starlette.requests import Request

FEATURES, CLASSES = 4, 1000
PATIENCE_S = 10.0


def predict(model: np.ndarray, features: list[float]) -> dict[str, Any]:
    """Runs in a worker; `model` is a read-only view of shared memory."""
    scores = np.asarray(features) @ model
    best = int(scores.argmax())
    return {"best": best, "score": float(scores[best])}


@contextlib.asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
    """From the start of the server to its end, which waits for the requests under way."""
    async with hoplite_mp.connect(memory="256MiB") as cluster:
        model = cluster.put(np.random.default_rng(0).random((FEATURES, CLASSES)))
        yield {"cluster": cluster, "model": model}


async def answer(request: Request) -> JSONResponse:
    features = (await request.json()).get("features")
    if not isinstance(features, list) or len(features) != FEATURES:
        return JSONResponse({"error": f"features: a list of {FEATURES} numbers"}, status_code=422)
    future = request.state.cluster.submit(predict, request.state.model, features)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return JSONResponse(await future)
    except TimeoutError:
        future.cancel()  # nobody waits for it any more: not computed, unless it runs
        return JSONResponse({"error": "too busy"}, status_code=503)
    except Exception as error:  # what predict() raised
        return JSONResponse({"error": str(error)}, status_code=422)


async def status(request: Request) -> JSONResponse:
    counters = request.state.cluster.stats()
    return JSONResponse({name: counters[name] for name in ("tasks_done", "workers_lost")})


app = Starlette(
    routes=[Route("/predict", answer, methods=["POST"]), Route("/status", status)],
    lifespan=lifespan,
)

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    uvicorn.run(app, port=parser.parse_args().port, access_log=False)
