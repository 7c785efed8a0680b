"""The same on Ray alone: the batch is a Ray object, the models are Ray actors.

Needs: ray
"""

import ray
from ray.exceptions import RayActorError

from examples.applications.ensemble.serving import Classifier, Requests, share
from examples.applications.ray_hosts import connect
from examples.applications.running import arguments, say

Model = ray.remote(num_cpus=0, max_restarts=-1)(Classifier)


def answers(models, asked, away):
    """Answers of living models. A dead model: `away` gets a call that waits for its restart."""
    for seed, answer in asked.items():
        try:
            yield ray.get(answer)
        except RayActorError:
            away[seed] = models[seed].ready.options(max_task_retries=-1).remote()


def is_back(answer):
    return bool(ray.wait([answer], timeout=0)[0])


def serve(given):
    place = Model.options(resources={"away": share(given)})
    models = [place.remote(seed) for seed in range(given.models)]
    requests = Requests(given)
    away = {seed: model.ready.remote() for seed, model in enumerate(models)}
    ray.get(list(away.values()))  # wait until all models are trained
    for batch in requests:
        ref = ray.put(batch)
        there = [s for s in range(len(models)) if s not in away or is_back(away[s])]
        asked = {seed: models[seed].predict.remote(ref) for seed in there}
        if requests.killing:
            models[1].die.remote()
        requests.answer(list(answers(models, asked, away)))
    return requests.found()


if __name__ == "__main__":
    given = arguments(megabytes=5, models=8, seconds=5, kill_s=None)
    connect(given)
    say("result", **serve(given))
