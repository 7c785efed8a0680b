"""The same on Ray, with this library inside: the batch is our object.

The models are Ray actors. A batch is forwarded from host to host, and read in the host's store.
Refs that Ray carries are held for `ref_hold_s`, so each batch is deleted after its request.

Needs: ray
"""

import ray
from ray.exceptions import RayActorError

import hoplite_mp
import hoplite_mp.integrations.ray as hoplite_ray
from examples.applications.ensemble.serving import Classifier, Requests, share
from examples.applications.ray_hosts import connect
from examples.applications.running import arguments, say


@ray.remote(num_cpus=0, max_restarts=-1)
class Model(Classifier):
    def predict(self, batch):
        return super().predict(hoplite_mp.current().get(batch))


def answers(models, asked, away):
    """Answers of living models. A dead model: `away` gets a call that waits for its restart."""
    for seed, answer in asked.items():
        try:
            yield ray.get(answer)
        except RayActorError:
            away[seed] = models[seed].ready.options(max_task_retries=-1).remote()


def is_back(answer):
    return bool(ray.wait([answer], timeout=0)[0])


def serve(c, given):
    place = Model.options(resources={"away": share(given)})
    models = [place.remote(seed) for seed in range(given.models)]
    requests = Requests(given)
    away = {seed: model.ready.remote() for seed, model in enumerate(models)}
    ray.get(list(away.values()))  # wait until all models are trained
    for batch in requests:
        ref = c.put(batch)
        there = [s for s in range(len(models)) if s not in away or is_back(away[s])]
        asked = {seed: models[seed].predict.remote(ref) for seed in there}
        if requests.killing:
            models[1].die.remote()
        requests.answer(list(answers(models, asked, away)))
        c.delete(ref)
    return requests.found()


if __name__ == "__main__":
    given = arguments(megabytes=5, models=8, seconds=5, kill_s=None, memory="512MiB", tls=False)
    connect(given)
    c = hoplite_ray.init(memory=given.memory, tls=given.tls)
    say("result", **serve(c, given))
