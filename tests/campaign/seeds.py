"""Programs that are played each time: some of each kind, and what has found something once."""

ONE_HOST = {
    (2, "spilling"): "one of those that were played first",
    (100, "roomy"): "workers that a forced cancel met at their first use of the library",
}
HOSTS = {
    1: "one of those that were played first",
    801: "an actor of another host that was closed before its calls had come there",
}
