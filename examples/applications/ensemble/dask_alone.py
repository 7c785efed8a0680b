"""The same on Dask alone: a batch is scattered to a worker, and the models are pinned tasks.

Needs: distributed
"""

from examples.applications.dask_hosts import connect
from examples.applications.ensemble import serving
from examples.applications.running import arguments, say


def predict(seed, batch):
    return serving.classifier(seed).predict(batch)


def serve(client, workers, given):
    places = workers[1:] or workers
    requests = serving.Requests(given)

    def ask(batch):
        return [
            client.submit(predict, seed, batch, workers=places[seed % len(places)], pure=False)
            for seed in range(given.models)
        ]

    client.gather(ask(requests.batch[:1]))  # wait until all models are trained
    for batch in requests:
        # Other workers fetch it from this one or each other: `broadcast=True` takes much longer.
        future = client.scatter(batch, workers=places[:1], hash=False)
        requests.answer(client.gather(ask(future)))
    return requests.found()


if __name__ == "__main__":
    given = arguments(megabytes=5, models=8, seconds=5, kill_s=None)
    client, workers = connect(given)
    say("result", **serve(client, workers, given))
    client.shutdown()
