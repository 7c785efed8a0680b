"""How does a web service compute in other processes, with hundreds of requests at a time?

The event loop parses and answers; each request is a task, and `await` needs no thread. One copy of
the model is in shared memory, and workers read it in place. A worker that dies is replaced, and its
requests are retried. `python web_service.py 8000` serves until Ctrl-C; without a port the program
sends requests to itself. Install the packages with `pip install 'hoplite-mp[examples]'`.

Needs: starlette, uvicorn
"""

import asyncio
import contextlib
import json
import sys
import time

import numpy as np
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

import hoplite_mp

FEATURES, CLASSES, AT_A_TIME, PATIENCE_S = 4, 1000, 200, 10.0


def predict(model, features):
    scores = np.asarray(features) @ model  # a view of shared memory
    return {"best": int(scores.argmax()), "score": float(scores.max())}


@contextlib.asynccontextmanager
async def lifespan(app):
    """Opens a cluster for the life of the server; its end waits for open requests."""
    async with hoplite_mp.connect(memory="256MiB") as c:
        yield {"c": c, "model": c.put(np.random.default_rng(0).random((FEATURES, CLASSES)))}


async def answer(request):
    features = (await request.json())["features"]
    future = request.state.c.submit(predict, request.state.model, features)
    try:
        async with asyncio.timeout(PATIENCE_S):
            return JSONResponse(await future)
    except TimeoutError:
        future.cancel()  # only the `await` has ended; a queued task now never runs
        return JSONResponse({"error": "too busy"}, status_code=503)
    except ValueError as error:  # raised by predict()
        return JSONResponse({"error": str(error)}, status_code=422)


app = Starlette(routes=[Route("/", answer, methods=["POST"])], lifespan=lifespan)


async def ask(port, features):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = json.dumps({"features": features}).encode()
    head = f"POST / HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    status, _, text = (await reader.read()).partition(b"\r\n\r\n")
    writer.close()
    return int(status.split()[1]), json.loads(text)


async def ask_itself():
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="warning"))
    serving = asyncio.create_task(server.serve())
    while not server.started and not serving.done():
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    began = time.perf_counter()
    answers = await asyncio.gather(*(ask(port, [i, 1, 2, 3]) for i in range(AT_A_TIME)))
    print(f"{len(answers)} answers in {time.perf_counter() - began:.2f} s; the last: {answers[-1]}")
    server.should_exit = True
    await serving


if __name__ == "__main__":
    uvicorn.run(app, port=int(sys.argv[1])) if sys.argv[1:] else asyncio.run(ask_itself())
