"""Draws docs/run.svg from a trace of a real run: `python docs/_run.py`.

The run: four workers make eight gradients, one of them slow; a reduction takes the first six while
the others still work.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import hoplite_mp

WIDTH, LEFT, ROW, TOP = 860, 110, 26, 34
COLOURS, OTHER = {"gradient": "#4c78a8"}, "#e45756"


def gradient(weights: np.ndarray, part: int) -> np.ndarray:
    """Something to do."""
    time.sleep(0.01 * (2 + part * 3 % 5))
    return weights * part


def main() -> None:
    """Run, trace, draw."""
    path = Path(tempfile.mkdtemp()) / "run.json"
    with hoplite_mp.Cluster(workers=4) as c:
        for _ in c.map(time.sleep, [0.1] * 4, chunksize=1):
            pass  # all workers are up
        with c.trace(path):
            weights = c.put(np.ones(1_000_000))
            parts = [c.submit(gradient, weights, n) for n in range(8)]
            c.get(c.reduce(parts, op="sum", num=6))
            c.wait(parts)
    spans = drawn_of(json.loads(path.read_text())["traceEvents"])
    (Path(__file__).parent / "run.svg").write_text(drawing(spans))


def drawn_of(events: list[dict[str, Any]]) -> list[tuple[str, str, float, float]]:
    """Track, name, begin and end in milliseconds: the workers, then the reduction."""
    threads = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    spans = [
        (threads.get(e["tid"], e["cat"]), e["name"], e["ts"] / 1e3, (e["ts"] + e["dur"]) / 1e3)
        for e in events
        if e["ph"] == "X" and e["cat"] in ("task", "reduce", "collective")
    ]
    begin = min(span[2] for span in spans)
    return [(track, name, a - begin, b - begin) for track, name, a, b in sorted(spans)]


def drawing(spans: list[tuple[str, str, float, float]]) -> str:
    """The timeline as SVG."""
    tracks = list(dict.fromkeys(span[0] for span in spans))
    end = max(span[3] for span in spans)
    scale = (WIDTH - LEFT - 20) / end
    height = TOP + ROW * len(tracks) + 10
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}"'
        ' font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
    ]
    for tick in range(0, int(end) + 1, 20 if end < 300 else 100):
        x = LEFT + tick * scale
        parts.append(f'<path d="M{x:.0f} {TOP - 8}V{height - 8}" stroke="#ddd"/>')
        if x < WIDTH - 40:
            parts.append(f'<text x="{x:.0f}" y="{TOP - 14}" fill="#555">{tick} ms</text>')
    for number, track in enumerate(tracks):
        parts.append(f'<text x="8" y="{TOP + ROW * number + 16}">{track}</text>')
    for track, name, begin, until in spans:
        x, y = LEFT + begin * scale, TOP + ROW * tracks.index(track)
        width = max(2.0, (until - begin) * scale - 1)
        parts.append(
            f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{ROW - 6}" rx="2"'
            f' fill="{COLOURS.get(name, OTHER)}"/>'
        )
        if width > 9 * len(name):
            parts.append(f'<text x="{x + 5:.1f}" y="{y + 15}" fill="white">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


if __name__ == "__main__":
    main()
