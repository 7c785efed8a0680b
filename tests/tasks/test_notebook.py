"""A notebook, executed headless: functions of cells, output, an interrupted cell."""

from __future__ import annotations

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

CELLS = [
    "import hoplite_mp, time, threading, _thread\nc = hoplite_mp.Cluster(workers=2)",
    "def square(x):\n    return x * x\nprint(c.submit(square, 7).result())",
    "def square(x):\n    return -x * x\nprint(c.submit(square, 7).result())",
    "future = c.submit(time.sleep, 600)\n"
    "try:\n    threading.Timer(0.2, _thread.interrupt_main).start()\n"
    "    c.get(future)\nexcept KeyboardInterrupt:\n    print('interrupted')\n"
    "print(future.cancel(force=True), c.submit(square, 2).result())",
    "def init(v):\n    global model\n    model = {'v': v, 'n': 0}\n"
    "ex = c.executor(1, initializer=init, initargs=(5,))",
    "def use():\n    model['n'] += 1\n    return model\n"
    "print(ex.submit(use).result(), 'model' in globals())",
    "def use():\n    model['n'] += 10\n    return model\nprint(ex.submit(use).result())",
    "ex.shutdown()\nc.shutdown()\nprint('closed')",
]


@pytest.fixture(autouse=True)
def kernel_that_may_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Warnings about the kernel's own code are not errors of the notebook."""
    monkeypatch.setenv("PYTHONWARNINGS", "")


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
    assert texts[5].strip() == "{'v': 5, 'n': 1} False"
    assert texts[6].strip() == "{'v': 5, 'n': 11}"
    assert texts[7].strip() == "closed"


SPEAKING = [
    # On a busy machine the lines may take longer than a cell waits for them.
    "from hoplite_mp._client import printing\nprinting.CELL_WAIT_S = 60.0\n"
    "import hoplite_mp, sys\nc = hoplite_mp.Cluster(workers=2)",
    "def speak(i):\n    print('line', i)\n    print('error', i, file=sys.stderr)",
    *(f"c.submit(speak, {i}).result()" for i in range(2, 22)),
    "c.shutdown()",
]


@pytest.mark.filterwarnings("ignore")
def test_what_a_task_prints_stands_below_the_cell_that_waited_for_it() -> None:
    """Lines come by another way than results, and the next cell begins at once."""
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in SPEAKING])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    for name, word in (("stdout", "line"), ("stderr", "error")):
        for number, cell in enumerate(notebook.cells):
            text = "".join(one.get("text", "") for one in cell.outputs if one.name == name)
            found = [line.partition(") ")[2] for line in text.splitlines()]
            assert found == ([f"{word} {number}"] if 2 <= number < 22 else []), (number, text)


SHOWING = [
    "import hoplite_mp, time, threading, _thread, tqdm\nc = hoplite_mp.Cluster(workers=2)\n"
    "def slow(i):\n    time.sleep(0.02)\n    return i",
    "c",
    "sum(c.map(slow, range(20), chunksize=2, progress='first'))",
    "sum(c.map(slow, range(10), ordered=False, progress='second'))",
    "await c.submit(slow, 4), await c.put(5), [x async for x in c.map(slow, range(3))]",
    "try:\n    for _ in c.map(time.sleep, [0.01, *[600] * 9], chunksize=1, progress='third'):\n"
    "        threading.Timer(0.2, _thread.interrupt_main).start()\n"
    "except KeyboardInterrupt:\n    print('interrupted', len(tqdm.tqdm._instances))",
    "async with hoplite_mp.connect(1) as other:\n    print(await other.submit(slow, 6))\n"
    "    await other.submit(print, 'spoken')",
    "c.__exit__(KeyError, None, None)",
]


@pytest.mark.filterwarnings("ignore")
def test_what_a_notebook_shows() -> None:
    """The cluster as HTML, bars in their cells, `await` at the top, and an interrupted bar."""
    pytest.importorskip("tqdm")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(c) for c in SHOWING])
    nbclient.NotebookClient(notebook, timeout=60, kernel_name="python3").execute()
    cells = notebook.cells

    def results(number: int) -> list[dict[str, str]]:
        outputs = cells[number].outputs
        return [one.data for one in outputs if one.output_type == "execute_result"]

    def bars(number: int) -> str:
        """A line of text, or with ipywidgets a widget, whose state the notebook itself keeps."""
        outputs = cells[number].outputs
        text = "".join(one.text for one in outputs if one.get("name") == "stderr")
        views = [one.data for one in outputs if one.output_type == "display_data"]
        return text + "".join(view["text/plain"] for view in views)

    (shown,) = results(1)
    assert "2 workers" in shown["text/html"]
    assert "2 workers" in shown["text/plain"]
    drawn = ((2, "190", "first", "20/20"), (3, "45", "second", "10/10"))
    for number, total, name, share in drawn:
        assert [one["text/plain"] for one in results(number)] == [total]
        assert name in bars(number)
        assert share in bars(number) + str(notebook.metadata.get("widgets", ""))
    assert [one["text/plain"] for one in results(4)] == ["(4, 5, [0, 1, 2])"]
    said = "".join(one.get("text", "") for one in cells[5].outputs if one.get("name") == "stdout")
    assert said == "interrupted 0\n"
    assert "third" in bars(5)
    said = "".join(one.text for one in cells[6].outputs).splitlines()
    assert [line.rpartition(" ")[2] for line in said] == ["6", "spoken"]
    for number in (0, 1, 4, 6, 7):
        assert bars(number) == ""
