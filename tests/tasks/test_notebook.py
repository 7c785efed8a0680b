"""A notebook, executed headless: functions of cells, output, an interrupted cell."""

from __future__ import annotations

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

CELLS = [
    "import hoplite_mp, time, threading, _thread\nc = hoplite_mp.Cluster(workers=2)",
    "def square(x):\n    return x * x\nprint(c.submit(square, 7).result())",
    "def square(x):\n    return -x * x\nprint(c.submit(square, 7).result())",
    "future = c.submit(time.sleep, 30)\n"
    "threading.Timer(0.5, _thread.interrupt_main).start()\n"
    "try:\n    c.get(future)\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    "print(future.cancel(force=True), c.submit(square, 2).result())",
    "c.shutdown()\nprint('closed')",
]


@pytest.mark.filterwarnings("ignore")
def test_cells_define_what_tasks_run_and_can_be_interrupted() -> None:
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in CELLS])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    texts = [
        "".join(output.get("text", "") for output in cell.outputs if output.name == "stdout")
        for cell in notebook.cells
    ]
    assert texts[1].strip() == "49"
    assert texts[2].strip() == "-49"
    assert texts[3].split() == ["interrupted", "True", "-4"]
    assert texts[4].strip() == "closed"
