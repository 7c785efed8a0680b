"""Programs that are played again: some of each kind, and what has found something once."""

SOAKED = "one of those that were played first"  # only `make soak` plays these

ONE_HOST = {
    (2, "spilling"): SOAKED,
    (100, "roomy"): "workers that a forced cancel met at their first use of the library",
}
HOSTS = {
    1: SOAKED,
    801: "an actor of another host that was closed before its calls had come there",
}
