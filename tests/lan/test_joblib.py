"""joblib's Parallel over several hosts, one of which dies."""

from __future__ import annotations

from tests.lan import Lan
from tests.support.clusters import PATIENCE_S, UpCluster
from tests.support.lan_programs import WAIT_FOR_ALL

PARALLEL = (
    WAIT_FOR_ALL
    + """
import joblib, tempfile
from joblib import Parallel, delayed
import hoplite_mp.integrations.joblib

def look(array, i, folder):
    open(f"{folder}/{os.uname().nodename}", "w").close()
    while len(os.listdir(folder)) < 3:  # until each host has run one
        time.sleep(0.01)
    threads = os.environ["OMP_NUM_THREADS"]
    return os.uname().nodename, float(array[i]), array.flags.writeable, threads
big = np.arange(float(1 << 18))
"""
)


def test_calls_over_several_hosts(lan_permitted: None) -> None:
    with Lan(3) as lan:
        cluster = UpCluster(lan, tls=False)
        out = cluster.run(
            lan[1],
            PARALLEL
            + """
with joblib.parallel_config(backend="hoplite_mp", cluster=c):
    total = sum(node.workers for node in c.nodes)
    print(joblib.effective_n_jobs(-1) == total)
    folder = tempfile.mkdtemp()  # hosts share the disk
    found = Parallel(batch_size=1)(delayed(look)(big, i, folder) for i in range(60))
    print(sorted({name for name, *_ in found}), [f[1:3] for f in found] ==
        [(float(i), False) for i in range(60)])
    results = Parallel()(delayed(np.full)(1 << 18, i) for i in range(6))
    results[5] += 1
    print([int(r[-1]) for r in results])
# More workers than the cluster has of its own, with a limit: they are spread over its hosts.
with joblib.parallel_config(
    backend="hoplite_mp", cluster=c, n_jobs=2 * total, inner_max_num_threads=5
):
    folder = tempfile.mkdtemp()
    found = Parallel(batch_size=1)(delayed(look)(big, i, folder) for i in range(80))
    print(sorted({name for name, *_ in found}), {f[3] for f in found})
    def fail(i):
        raise LookupError(f"task {i}")
    try:
        Parallel()(delayed(fail)(i) for i in range(10))
    except LookupError as error:
        print(type(error).__name__)
""",
        )
        assert out.splitlines() == [
            "True",
            "['h1', 'h2', 'h3'] True",
            "[0, 1, 2, 3, 4, 6]",
            "['h1', 'h2', 'h3'] {'5'}",
            "LookupError",
        ]
        driver = lan[1].popen(
            cluster.program(
                PARALLEL
                + """
def slowly(array, i):
    time.sleep(0.02)
    return float(array[i])
with joblib.parallel_config(backend="hoplite_mp", cluster=c):
    generator = Parallel(batch_size=1, return_as="generator")(
        delayed(slowly)(big, i) for i in range(100))
    first = next(generator)
    print("runs", flush=True)
    print([first, *generator] == [float(i) for i in range(100)])
"""
            ),
            env=cluster.env,
            stdout=-1,
            text=True,
        )
        assert driver.stdout is not None
        assert driver.stdout.readline() == "runs\n"
        lan[2].kill()
        assert driver.stdout.read() == "True\n"
        driver.stdout.close()
        assert driver.wait(PATIENCE_S) == 0
        del cluster.joined[1]
        assert cluster.end() == [0, 0]
