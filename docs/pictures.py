"""Draws the pictures of docs/how_it_works.md that show what there is: `python docs/pictures.py`.

The same processes, links and states that docs/architecture.md tells in words. `docs/plans.py` draws
those that show what happens when.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from svg import COLOURS, GREY, SHADE, Drawing

HERE = Path(__file__).resolve().parent
SHARED, USER, OURS = SHADE, "#fff4dc", "#ffffff"


def one_host() -> str:
    """The processes of one host, and the memory between them."""
    d = Drawing(720, 330, "Processes of one host: driver and workers share memory with the node")
    d.labelled(30, 40, 150, 64, "driver", "your program", fill=USER)
    d.labelled(285, 40, 150, 64, "node", "memory, transfers")
    d.labelled(540, 40, 150, 64, "manager", "plans collectives")
    d.arrow((182, 72), (283, 72), both=True)
    d.text(232, 62, "requests", anchor="middle", colour=GREY, size=11)
    d.arrow((437, 72), (538, 72), both=True)
    d.text(487, 62, "plans", anchor="middle", colour=GREY, size=11)
    d.box(30, 150, 405, 62, fill=SHARED, stroke=COLOURS[0])
    d.text(232, 176, "shared memory", anchor="middle", bold=True)
    d.text(232, 196, "objects, tasks, states, Group boards", anchor="middle", colour=GREY, size=11)
    d.arrow((105, 106), (105, 148), both=True)
    d.arrow((360, 106), (360, 148), both=True)
    for number in range(3):
        x = 30 + 140 * number
        d.labelled(x, 252, 125, 52, f"worker {number + 2}", "runs tasks", fill=USER)
        d.arrow((x + 62, 250), (x + 62, 214), both=True)
    d.labelled(540, 252, 150, 52, "supervisor", "starts processes")
    d.arrow((538, 278), (437, 278), dashed=True)
    d.arrow((615, 250), (615, 106), dashed=True)
    d.arrow((560, 250), (418, 106), dashed=True)
    d.text(522, 236, "fork", anchor="end", colour=GREY, size=11)
    return d.whole()


def several_hosts() -> str:
    """Nodes, manager and standby of a cluster, and what goes between them."""
    d = Drawing(720, 330, "Several hosts: control messages to the manager, data between nodes")
    for number, x in enumerate((30, 265, 500)):
        d.box(x, 140, 190, 160, fill="#f3f5f7")
        d.text(x + 12, 162, f"host {number}", bold=True)
        d.labelled(x + 20, 176, 150, 48, f"node h{number}", "store of this host", fill=SHARED)
        d.labelled(x + 20, 236, 150, 44, "driver, workers", fill=USER)
    d.labelled(270, 24, 180, 52, "manager", "decides, on one of the hosts")
    d.labelled(515, 24, 170, 52, "standby", "takes over, if you want one")
    d.arrow((452, 50), (513, 50), both=True, dashed=True)
    for x, to in ((105, 290), (360, 360), (595, 430)):
        d.arrow((x, 174), (to, 78), both=True)
    d.text(30, 46, "messages of some hundred bytes:", colour=GREY, size=11)
    d.text(30, 62, "who is there, who has what, plans", colour=GREY, size=11)
    d.arrow((202, 200), (283, 200), both=True)
    d.arrow((437, 200), (518, 200), both=True)
    words = "between nodes: data, over TCP with TLS"
    d.text(360, 319, words, anchor="middle", colour=GREY, size=11)
    return d.whole()


def life_of_a_task() -> str:
    """The states through which the header of a task's result goes."""
    d = Drawing(720, 250, "States of a task's result, from submit to the last ref")
    states = (
        (25, "waiting", "for arguments"),
        (165, "queued", "for any worker"),
        (315, "claimed", "a worker runs it"),
        (465, "sealed", "value, immutable"),
        (590, "freed", "no ref is left"),
    )
    for x, name, words in states:
        d.labelled(x, 50, 110 if name != "queued" else 125, 56, name, words, fill=SHARED)
    for x1, x2 in ((137, 163), (292, 313), (427, 463), (577, 588)):
        d.arrow((x1, 78), (x2, 78))
    d.labelled(315, 168, 110, 52, "failed", "an exception")
    d.labelled(165, 168, 125, 52, "cancelled", "before it began")
    d.labelled(465, 168, 110, 52, "spilled", "disk, other host")
    d.arrow((370, 108), (370, 166))
    d.arrow((227, 108), (227, 166))
    d.arrow((520, 108), (520, 166), both=True)
    d.arrow((350, 48), (350, 24), (235, 24), (235, 48), dashed=True)
    d.text(292, 18, "its worker died", anchor="middle", colour=GREY, size=11)
    return d.whole()


PICTURES = {
    "one_host.svg": one_host,
    "several_hosts.svg": several_hosts,
    "life_of_a_task.svg": life_of_a_task,
}


def main() -> None:
    """Write all."""
    for name, draw in PICTURES.items():
        (HERE / "pictures" / name).write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main()
