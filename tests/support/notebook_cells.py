"""A program of notebook cells, and what it prints."""

from __future__ import annotations

# A cell as IPython runs it: its file does not exist, its text is in the driver's linecache only.
CELL = """
import linecache, textwrap, traceback, warnings
def cell(text, name="/tmp/ipykernel_1/42.py"):
    text = textwrap.dedent(text)
    linecache.cache[name] = len(text), None, text.splitlines(True), name
    exec(compile(text, name, "exec"), globals())
"""


CELLS = (
    CELL
    + '''
cell("""
import functools, warnings, inspect

def deco(f):
    return f

@deco
def fail(x):
    text = \'\'\'
a text at the margin
\'\'\'
    return 1 / x

class Model:
    def step(self, x):
        return fail(x)

def warn():
    warnings.warn("look here")

def shown():
    return inspect.getsource(fail), inspect.getsource(warn)

async def wait(x):
    return fail(x)

def items(x):
    yield fail(x)
""")
cell("def fail2(x):\\n    return 2 / x\\n", "/tmp/ipykernel_1/43.py")
def where(call):
    try:
        call()
    except ZeroDivisionError as error:
        lines = str(error.__cause__).splitlines()
        at = [k for k, line in enumerate(lines) if "ipykernel" in line][-1]
        return lines[at].strip(), lines[at + 1].strip()
def tell(c):
    last = ('File "/tmp/ipykernel_1/42.py", line 12, in fail', "return 1 / x")
    for call in (
        lambda: c.submit(fail, 0).result(),
        lambda: c.submit(functools.partial(Model().step, 0)).result(),
        lambda: c.submit(abs, c.submit(fail, 0)).result(),
        lambda: list(c.map(fail, [0, 0])),
        lambda: c.submit(wait, 0).result(),
        lambda: list(c.stream(items, 0)),
        lambda: c.actor(Model).step(0).result(),
        lambda: c.submit(lambda: hoplite_mp.current().submit(fail, 0).result()).result(),
        lambda: c.submit(apply, fail, 0).result(),
    ):
        found = where(call)
        print(found == last or found)
    print(where(lambda: c.submit(fail2, 0).result()))
    def apply_warn():
        import io, contextlib
        with contextlib.redirect_stderr(io.StringIO()) as err, warnings.catch_warnings():
            warnings.simplefilter("always")
            warn()
        return err.getvalue()
    print(c.submit(apply_warn).result().splitlines())
    print(c.submit(shown).result()[1].splitlines())
def apply(f, x):
    return f(x)
'''
)
EXPECTED_OF_CELLS = [
    *["True"] * 9,
    "('File \"/tmp/ipykernel_1/43.py\", line 2, in fail2', 'return 2 / x')",
    "['/tmp/ipykernel_1/42.py:19: UserWarning: look here', '  warnings.warn(\"look here\")']",
    "['def warn():', '    warnings.warn(\"look here\")']",
]
