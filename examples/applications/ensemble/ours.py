"""How do I serve an ensemble of models on several hosts, some of which die?

A batch is put once, and forwarded from host to host. A model that has died is restarted on its host
or, if the host is lost, on the next host that joins; until then the other models vote.
"""

import math

from examples.applications.ensemble.serving import Classifier, Requests
from examples.applications.our_hosts import connect
from examples.applications.running import arguments, say
from hoplite_mp import ActorLostError


class Ensemble:
    def __init__(self, c, count):
        self.c, self.models, self.places = c, {}, {}
        self.away = {}  # models that are not ready -> a call that ends when they are
        self.on_host = math.ceil(count / len(self.hosts()))
        for seed in range(count):
            self.begin(seed)
        c.wait(list(self.away.values()))  # wait until all models are trained

    def hosts(self):
        return self.c.nodes[1:] or self.c.nodes  # not this host, if there are others

    def begin(self, seed):
        """Starts a model on a host with a free place; if none has one, the next request retries."""
        others = [place for other, place in self.places.items() if other != seed]
        for node in self.hosts():
            if others.count(node.id) < self.on_host:
                self.models[seed] = self.c.options(node=node).actor(Classifier, seed)
                self.places[seed], self.away[seed] = node.id, self.models[seed].ready()
                return

    def look(self):
        """Checks which models have restarted, and restarts failed models."""
        for seed, ready in list(self.away.items()):
            if not ready.done():
                continue
            if ready.exception() is None:
                del self.away[seed]
            else:
                self.begin(seed)

    def ask(self, batch):
        ref = self.c.put(batch)
        there = [seed for seed in self.models if seed not in self.away]
        return {seed: self.models[seed].predict(ref) for seed in there}

    def answers(self, asked):
        for seed, future in asked.items():
            try:
                yield future.result()
            except ActorLostError:
                self.away[seed] = future


def serve(c, given):
    ensemble, requests = Ensemble(c, given.models), Requests(given)
    for batch in requests:
        ensemble.look()
        asked = ensemble.ask(batch)
        if requests.killing:
            ensemble.models[1].die()
        requests.answer(list(ensemble.answers(asked)))
    return requests.found()


if __name__ == "__main__":
    given = arguments(megabytes=5, models=8, seconds=5, kill_s=None, tls=False)
    with connect(given) as c:
        say("result", **serve(c, given))
