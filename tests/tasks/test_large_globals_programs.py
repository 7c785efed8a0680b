"""Programs with large global arrays, and with workers that set them."""

from __future__ import annotations

import textwrap

import pytest

from tests.support.processes import run_program


def test_a_script_that_is_run_with_errors_for_warnings() -> None:
    out = run_program(
        """
        import warnings; warnings.simplefilter("error")
        big = np.ones(10_000_000)
        def f(i): return big[i]
        with hoplite_mp.Executor(2) as ex:
            say(ex.submit(f, 3).result(), sum(ex.map(f, range(16))))
            big[3] = 2
            say(ex.submit(f, 3).result())
        """
    )
    assert out.split() == ["1.0", "16.0", "2.0"]


def test_arrays_that_a_reducer_makes_anew_arrive_with_their_own_values() -> None:
    """Each look makes new arrays, perhaps at the addresses of those of an earlier look."""
    out = run_program(
        """
        class Layers:
            def __init__(self, *values): self.values = values
            def __getstate__(self): return [np.full(1 << 18, value) for value in self.values]
            def __setstate__(self, arrays): self.values = tuple(int(one[0]) for one in arrays)
        def look(): return first.values + second.values
        first, second = Layers(1, 2, 3, 4), Layers(5)
        with hoplite_mp.Cluster(1) as c:
            say(c.submit(look).result())
            second = Layers(6)
            say(c.submit(look).result())
            first, second = Layers(1, 2, 3, 9), Layers(7)
            say(c.submit(look).result())
            say(c.submit((lambda model: lambda: model.values)(Layers(5, 6, 7, 8))).result())
        """
    ).splitlines()
    assert out == ["(1, 2, 3, 4, 5)", "(1, 2, 3, 4, 6)", "(1, 2, 3, 9, 7)", "(5, 6, 7, 8)"]


def test_scripts_whose_workers_change_their_globals() -> None:
    """As with small ones: what a task has set stays until the submitter changes it."""
    out = run_program(
        textwrap.dedent(
            """
            grid = np.zeros(300_000)
            def plus(): grid[0] += 1; return int(grid[0])
            def look(): return int(grid[0]), int(grid[1])
            with hoplite_mp.Cluster(1) as c:
                say([c.submit(plus).result() for _ in range(3)], c.submit(look).result())
                grid[1] = 5
                say(c.submit(look).result(), c.submit(plus).result(), c.submit(look).result())
                grid = grid.copy()
                say(c.submit(look).result(), c.map(plus, range(0)) and "")
            """
        )
    )
    assert out.splitlines() == ["[1, 2, 3] (3, 0)", "(0, 5) 1 (1, 5)", "(1, 5) "]


# Programs in which workers set a large global; what comes out is the same as for a small one.
KEPT_BY_WORKERS = {
    "an initializer": """
        with c.executor(1, initializer=set_to, initargs=(3,)) as pool:
            say([pool.submit(look).result() for _ in range(2)])
        """,
    "an initializer that is gone": """
        with c.executor(1, initializer=lambda: set_to(3)) as pool:
            gc.collect()
            say([pool.submit(look).result() for _ in range(2)])
        """,
    "a task whose function is gone": """
        c.submit(lambda: set_to(3)).result()
        gc.collect()
        say([c.submit(lambda: look()).result() for _ in range(2)])
        """,
    "an actor": """
        actor = c.actor(Actor, lambda: set_to(3))
        say([actor.call(look).result() for _ in range(2)])
        """,
    "a function among the arguments": """
        c.submit(call, set_to, 3).result()
        say([c.submit(call, look).result() for _ in range(2)])
        """,
    "a function that a generator has sent to another task": """
        def give():
            yield set_to
        for function in c.stream(give):
            c.submit(call, function, 3).result()
        say([c.submit(look).result() for _ in range(2)])
        """,
}


@pytest.mark.parametrize("case", KEPT_BY_WORKERS)
def test_large_global_set_in_a_worker_stays_until_the_driver_changes_it(case: str) -> None:
    """And so does a small one."""
    body = """
        import gc
        def set_to(v):
            global x, held
            x, held = x + v, {"y": held["y"] + v}
        def look(): return float(x[0]), float(held["y"][0])
        def call(f, *args): return f(*args)
        class Actor:
            def __init__(self, begin): begin()
            def call(self, f): return f()
        for cells in 10, 1 << 20:
            x, held = np.zeros(cells), {"y": np.zeros(cells)}
            with hoplite_mp.Cluster(workers=1) as c:
                RUN
                x = x + 1
                say(c.submit(look).result()[0])
        """
    case_text = textwrap.indent(textwrap.dedent(KEPT_BY_WORKERS[case]).strip(), " " * 16).strip()
    out = run_program(body.replace("RUN", case_text)).splitlines()
    assert out == ["[(3.0, 3.0), (3.0, 3.0)]", "1.0"] * 2
