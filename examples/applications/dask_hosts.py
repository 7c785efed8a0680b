"""Dask's workers, one per host with one thread, starting with the scheduler's host."""

from distributed import Client

WAIT_S = 120


def connect(given):
    """A client and the addresses of all workers; without an address, of new workers here."""
    if given.address is None:
        client = Client(n_workers=given.hosts, threads_per_worker=1, dashboard_address=None)
    else:
        client = Client(f"tcp://{given.address}", timeout=WAIT_S)
        client.wait_for_workers(given.hosts, timeout=WAIT_S)
    found = client.scheduler_info(n_workers=-1)["workers"]
    here = client.scheduler.address.rpartition(":")[0]
    return client, sorted(found, key=lambda one: (one.rpartition(":")[0] != here, one))
