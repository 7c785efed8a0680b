# ruff: noqa: E501 (the forms are tables)
"""What a script can define: tasks see it as in the standard pool, as globals, arguments, results.

The standard pool sends classes and functions of a script by name. Here they travel by value.
"""

from __future__ import annotations

import sys
import textwrap
from typing import TYPE_CHECKING

import pytest

from tests.lan import forked

if TYPE_CHECKING:
    from pathlib import Path

HEAD = """
import abc, collections, contextlib, copy, dataclasses, decimal, enum, functools, operator, re
import sys, threading, types, typing, weakref
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, Protocol, TypedDict, TypeVar
"""

# Run with the standard pool and with ours. A check is `t_*()`, which runs in a task; an object of
# `objects` goes to a task and comes back, and `show(object)` is compared there and here.
TAIL = """
def there_and_back(name, value):
    return show(value), value
def show_all(pool):
    for name, check in checks.items():
        try: print(name, repr(pool.submit(check).result()))
        except BaseException as error: print(name, type(error).__name__, error)
    for name, value in objects.items():
        try:
            shown, back = pool.submit(there_and_back, name, value).result()
            again, back2 = pool.submit(there_and_back, name, back).result()
            print(name, shown, show(back), again, show(back2), type(back) is type(value))
        except BaseException as error: print(name, type(error).__name__, error)
checks = {n: f for n, f in list(globals().items()) if n.startswith("t_")}
if __name__ == "__main__":
    import concurrent.futures, multiprocessing, hoplite_mp
    if sys.argv[1] == "standard":
        fork = multiprocessing.get_context("fork")
        pool = concurrent.futures.ProcessPoolExecutor(1, mp_context=fork)
    else:
        pool = hoplite_mp.Executor(1)
    with pool: show_all(pool)
"""

FORMS = {
    "slots": """
class Tuple:
    __slots__ = ("a", "b")
    def __init__(self): self.a = 1
class Text:
    __slots__ = "a"
    def __init__(self): self.a = 1
class List:
    __slots__ = ["a", "__weakref__"]
    def __init__(self): self.a = 1
class Dict:
    __slots__ = {"a": "what it is", "b": "another"}
    def __init__(self): self.a = 1
class WithDict:
    __slots__ = ("a", "__dict__")
    def __init__(self): self.a = 1; self.z = 2
class Private:
    __slots__ = ("__p", "_q")
    def __init__(self): self.__p = 1; self._q = 2
    def get(self): return self.__p
class PrivateText:
    __slots__ = "__p"
    def __init__(self): self.__p = 1
    def get(self): return self.__p
class Iterated:
    __slots__ = iter(["a", "b"])
    def __init__(self): self.a = 1
class Empty:
    __slots__ = ()
class Inherited(Tuple):
    __slots__ = ("c",)
    def __init__(self): super().__init__(); self.c = 3
class Unslotted(Tuple):
    def __init__(self): super().__init__(); self.d = 4
class Base(abc.ABC):
    __slots__ = ("a",)
    @abc.abstractmethod
    def f(self): ...
class Concrete(Base):
    __slots__ = ("b",)
    def __init__(self): self.a = 1; self.b = 2
    def f(self): return self.a
@dataclass(slots=True)
class Data:
    a: int = 1
    b: list = field(default_factory=list)
@dataclass(slots=True, frozen=True, order=True)
class Frozen:
    a: int = 1
@dataclass(slots=True, weakref_slot=True)
class Weak:
    a: int = 1
@dataclass(slots=True)
class Derived(Data):
    c: int = 3
class G(Generic[TypeVar("T")]):
    __slots__ = ("a",)
    def __init__(self): self.a = 1
class Property:
    __slots__ = ("_a",)
    def __init__(self): self._a = 1
    @property
    def a(self): return self._a
classes = [Tuple, Text, List, Dict, WithDict, Private, PrivateText, Iterated, Empty, Inherited,
           Unslotted, Concrete, Data, Frozen, Weak, Derived, G, Property]
def show(value):
    cls = type(value)
    slots = cls.__slots__ if cls.__name__ != "Iterated" else "other"
    found = [cls.__qualname__, slots, hasattr(value, "__dict__"), vars(value) if hasattr(value, "__dict__") else None]
    try: value.new_attribute = 1; del value.new_attribute; found.append("open")
    except Exception as error: found.append(type(error).__name__)
    try: weakref.ref(value); found.append("weak")
    except TypeError: found.append("no weak references")
    for name in ("a", "b", "c", "_q"): found.append(getattr(value, name, None))
    if hasattr(value, "get"): found.append(value.get())
    found.append(sorted(n for n in dir(cls) if not n.startswith("__")))
    return found
objects = {cls.__name__: cls() for cls in classes if cls is not Iterated}
def t_members(): return [type(Tuple.a).__name__, Dict.a.__get__(Dict()), Private().get()]
def t_docs():
    import inspect
    return [inspect.getdoc(Dict.a), inspect.getdoc(Dict.b)]
def t_sizes(): return [sys.getsizeof(cls()) for cls in classes]
def t_make(): return [show(cls()) for cls in classes]
def t_equal(): return Frozen(1) < Frozen(2), hash(Frozen(1)) == hash(Frozen(1)), Data() == Data()
def t_abstract():
    try: Base()
    except TypeError as error: return str(error)
""",
    "hooks": """
class Hooked:
    registry = {}
    def __init_subclass__(cls, key, **more):
        super().__init_subclass__(**more)
        cls.key = key
        Hooked.registry[key] = cls
class One(Hooked, key="one"): x = 1
class Two(One, key="two"): x = 2
class Listed:
    subs = []
    def __init_subclass__(cls): Listed.subs.append(cls.__name__)
class L1(Listed): pass
class L2(L1): pass
class Meta(type):
    made = []
    def __new__(mcs, name, bases, ns, *, flag=None, **kw):
        ns["flag"] = flag
        return super().__new__(mcs, name, bases, ns)
    def __init__(cls, name, bases, ns, *, flag=None): super().__init__(name, bases, ns); Meta.made.append(name)
    def __call__(cls, *args): return super().__call__(*args)
    def __len__(cls): return 42
    @property
    def shout(cls): return cls.__name__.upper()
class Flagged(metaclass=Meta, flag="a flag"): pass
class Strict(type):
    def __new__(mcs, name, bases, ns, *, must): return super().__new__(mcs, name, bases, ns | {"must": must})
    def __init__(cls, name, bases, ns, *, must): super().__init__(name, bases, ns)
    def __setattr__(cls, name, value): raise AttributeError("closed")
class Musty(metaclass=Strict, must=7): x = 1
class AbcMeta(abc.ABCMeta):
    def __new__(mcs, name, bases, ns, *, tag): return super().__new__(mcs, name, bases, ns | {"tag": tag})
    def __init__(cls, name, bases, ns, *, tag): super().__init__(name, bases, ns)
class Tagged(metaclass=AbcMeta, tag="t"):
    @abc.abstractmethod
    def f(self): ...
class TaggedChild(Tagged, tag="u"):
    def f(self): return self.tag
class Named:
    def __set_name__(self, owner, name): self.name = name
    def __get__(self, obj, cls=None): return self if obj is None else f"{self.name} of {type(obj).__name__}"
class Uses: spot = Named()
class Custom:
    def __init_subclass__(cls, /, level=0): cls.level = level
class High(Custom, level=5): pass
class Getitem:
    def __class_getitem__(cls, item): return f"{cls.__name__}[{item}]"
class Closed(type):
    def __setattr__(cls, name, value): raise AttributeError("closed")
    @property
    def size(cls): return 3
class ClosedBase(metaclass=Closed):
    def __init_subclass__(cls, key): pass
class ClosedOne(ClosedBase, key="one"): size = 1
class Shown:
    __name__ = "shown"
    __bases__ = 3
    __text_signature__ = "(x)"
class Proxy:
    def __init__(self, inner): self.inner = inner
    def __reduce__(self): return Proxy, (self.inner,)
    @property
    def __class__(self): return type(self.inner) if type(self) is Proxy else None
    @property
    def __name__(self): "name"; return f"proxy of {self.inner}"
    __qualname__ = "Proxy"
class SlottedProxy:
    __slots__ = ("inner",)
    @property
    def __class__(self): return SlottedProxy
class FromProxy(Proxy): __bases__ = ()
objects = {"ClosedOne": ClosedOne(), "Shown": Shown(), "Proxy": Proxy(1), "SlottedProxy": SlottedProxy(), "One": One(), "Two": Two(), "L2": L2(), "Flagged": Flagged(), "Musty": Musty(),
           "TaggedChild": TaggedChild(), "Uses": Uses(), "High": High()}
def show(v): return [type(v).__qualname__, type(v).__mro__[1].__name__, *[getattr(v, n, None) for n in ("key", "x", "flag", "must", "tag", "spot", "level")]]
def t_descriptors(): return (
    Shown().__name__, Shown.__name__, Shown().__bases__, Shown.__bases__, Shown().__text_signature__,
    Proxy(1).__class__, Proxy(1).__name__, Proxy.__name__, vars(Proxy)["__name__"].__doc__,
    isinstance(Proxy(1), int), SlottedProxy().__class__.__name__, FromProxy(2).__bases__,
    ClosedOne().size, ClosedOne.size)
def t_registry(): return {k: v.__name__ for k, v in Hooked.registry.items()}, One.registry is Hooked.registry, Hooked.registry["two"] is Two
def t_new_subclass():
    class Three(Hooked, key="three"): pass
    return Three.key, sorted(Hooked.registry)
def t_listed(): return Listed.subs
def t_meta(): return Flagged.flag, len(Flagged), Flagged.shout, type(Flagged).__name__, sorted(Meta.made)
def t_new_meta():
    class Another(metaclass=Meta, flag=3): pass
    return Another.flag
def t_abstract():
    try: Tagged()
    except TypeError as error: return str(error)
def t_closed():
    try: Musty.x = 2
    except AttributeError as error: return str(error), Musty.must
def t_getitem(): return Getitem[int]
def t_subclasses(): return [c.__name__ for c in Hooked.__subclasses__()]
""",
    "functions": """
@functools.lru_cache(maxsize=7)
def cached(x): return x + 1
@functools.cache
def cached2(x): return cached(x) + 1
@contextlib.contextmanager
def manager(x):
    yield x + 1
@contextlib.asynccontextmanager
async def amanager(x): yield x
@functools.singledispatch
def kind(x): return "object"
@kind.register
def _(x: int): return "int"
@kind.register(list)
def kind_of_list(x): return "list of " + kind(x[0])
class Own: pass
@kind.register(Own)
def _(x): return "own"
class Dispatched:
    @functools.singledispatchmethod
    def kind(self, x): return "object"
    @kind.register
    def _(self, x: int): return "int"
    @kind.register
    @classmethod
    def _(cls, x: str): return "str of " + cls.__name__
def counted(f):
    @functools.wraps(f)
    def wrapper(*args, **kwargs):
        wrapper.calls += 1
        return f(*args, **kwargs)
    wrapper.calls = 0
    return wrapper
@counted
def plain(x, *, y=[1]): "text"; return x, y
class Partial:
    def f(self, a, b): return self.__class__.__name__, a, b
    g = functools.partialmethod(f, 1)
class Prop:
    def __init__(self): self.n = 0
    @functools.cached_property
    def value(self): self.n += 1; return self.n
    @property
    def p(self): "doc"; return self.n
    @p.setter
    def p(self, value): self.n = value
    @p.deleter
    def p(self): self.n = -1
    @classmethod
    def c(cls): return cls.__name__
    @staticmethod
    def s(): return "s"
    @classmethod
    @functools.lru_cache
    def cl(cls): return "cl"
class Cached(functools.cached_property): pass
class Sub:
    @Cached
    def value(self): return 5
    def __init__(self): pass
def recursive(n): return 1 if n < 2 else n * recursive(n - 1)
def even(n): return n == 0 or odd(n - 1)
def odd(n): return n != 0 and even(n - 1)
def generator(n): yield from range(n)
async def coroutine(n): return n
def annotated(a: int, b: "Own" = None) -> list[int]: return typing.get_type_hints(annotated)
add = functools.partial(operator.add, 1)
square = lambda x: x * x
get = operator.itemgetter(1)
attribute = operator.attrgetter("n")
caller = operator.methodcaller("c")
pattern = re.compile(r"(\\d+)")
@functools.total_ordering
class Ordered:
    def __init__(self, n): self.n = n
    def __eq__(self, other): return self.n == other.n
    def __lt__(self, other): return self.n < other.n
class Callable_:
    def __call__(self, x): return x * 3
call = Callable_()
class Stack(contextlib.ContextDecorator):
    def __enter__(self): return self
    def __exit__(self, *e): return False
@Stack()
def decorated(x): return x
def outer():
    n = 0
    def inner():
        nonlocal n
        n += 1
        return n
    return inner
counter = outer()
objects = {"prop": Prop(), "sub": Sub(), "ordered": Ordered(1), "partial": Partial(), "own": Own(), "call": call, "dispatched": Dispatched()}
def show(v):
    return type(v).__name__, getattr(v, "value", None), getattr(v, "n", None), isinstance(v, Own) and kind(v)
def t_cached(): return cached(1), cached2(1), cached.cache_parameters(), cached.__wrapped__(5), cached.cache_info().hits
def t_manager():
    with manager(1) as x: return x
def t_amanager():
    import asyncio
    async def main():
        async with amanager(3) as x: return x
    return asyncio.run(main())
def t_dispatch(): return kind(1), kind([1]), kind(None), kind(Own()), kind([Own()]), len(kind.registry), kind.dispatch(int)(1)
def t_dispatch_more():
    kind.register(float, lambda x: "float")
    return kind(1.0), float in kind.registry
def t_dispatch_method(): return Dispatched().kind(1), Dispatched().kind("x"), Dispatched().kind(None)
def t_counted(): return plain(1), plain(2, y=3), plain.calls, plain.__doc__, plain.__wrapped__.__name__, plain.__kwdefaults__
def t_partialmethod(): return Partial().g(2)
def t_prop():
    v = Prop(); a = v.value, v.value, v.p; v.p = 9; b = v.p; del v.p
    return a, b, v.p, v.c(), v.s(), Prop.p.__doc__, Prop.cl(), Sub().value
def t_threads():
    v = Prop()
    ts = [threading.Thread(target=lambda: v.value) for _ in range(3)]
    [t.start() for t in ts]; [t.join() for t in ts]
    return v.value >= 1
def t_recursive(): return recursive(5), even(4), list(generator(3))
def t_coroutine():
    import asyncio
    return asyncio.run(coroutine(3))
def t_annotated(): return sorted(annotated(1).items(), key=str).__len__(), annotated.__annotations__["a"]
def t_misc(): return add(2), square(3), get([1, 2]), attribute(Ordered(4)), caller(Prop), pattern.findall("a1b22")
def t_ordered(): return Ordered(1) <= Ordered(2), Ordered(3) > Ordered(2), max(Ordered(1), Ordered(5)).n
def t_call(): return call(2), decorated(4)
def t_counter(): return counter(), counter()
def t_qualnames(): return Prop.c.__qualname__, Prop.value.func.__qualname__, outer.__qualname__, counter.__qualname__, Prop.value.attrname
def t_signature():
    import inspect
    return str(inspect.signature(plain)), str(inspect.signature(annotated)), str(inspect.signature(Prop))
""",
    "types": """
class Color(enum.Enum):
    RED = 1
    CRIMSON = 1
    BLUE = "b"
    def describe(self): return self.name.lower()
    @classmethod
    def first(cls): return cls.RED
    @property
    def shout(self): return self.name + "!"
class Number(enum.IntEnum):
    ONE = 1
    TWO = enum.auto()
class Word(enum.StrEnum):
    ABC = enum.auto()
    X = "y"
class Perm(enum.Flag):
    R = 4
    W = 2
    RW = R | W
class IPerm(enum.IntFlag):
    R = 4
    W = 2
class Planet(enum.Enum):
    EARTH = (5.97e24, 6.4e6)
    MARS = (6.4e23, 3.4e6)
    def __init__(self, mass, radius): self.mass = mass; self.radius = radius
    @property
    def gravity(self): return round(self.mass / self.radius ** 2, 6)
class Coordinate(bytes, enum.Enum):
    def __new__(cls, value, label):
        obj = bytes.__new__(cls, [value]); obj._value_ = value; obj.label = label
        return obj
    PX = (0, "P.X")
    PY = (1, "P.Y")
class Missing(enum.Enum):
    A = "a"
    @classmethod
    def _missing_(cls, value): return cls.A
class Ops(enum.Enum):
    ADD = enum.member(operator.add)
    def __call__(self, *args): return self.value(*args)
@enum.unique
class Unique(enum.Enum):
    ONE = "one"
class Mixed(str, enum.Enum):
    A = "alpha"
@dataclass
class InEnum: n: int
class OfData(InEnum, enum.Enum):
    FIRST = 1
class Ignored(enum.Enum):
    _ignore_ = ["i"]
    i = 5
    A = 1
Dynamic = enum.Enum("Dynamic", "A B")
class NT(NamedTuple):
    x: int
    y: str = "d"
    def total(self): return self.x + 1
nt = collections.namedtuple("nt", "a b", defaults=[5])
class TD(TypedDict, total=False):
    a: int
class TD2(TD):
    b: str
class Shape(Protocol):
    def area(self) -> float: ...
@typing.runtime_checkable
class Sized(Protocol):
    def size(self) -> int: ...
class Square:
    def area(self): return 1.0
    def size(self): return 1
class Impl(Sized): 
    def size(self): return 4
T = TypeVar("T")
K = TypeVar("K", bound="Square")
class Box(Generic[T]):
    def __init__(self, item: T): self.item = item
class IntBox(Box[int]): pass
class Pair(Box[T], Generic[T, K]): pass
Alias = Box[int]
Union = int | str
Opt = typing.Optional[Square]
Lit = typing.Literal["a", 1]
UserId = typing.NewType("UserId", int)
class Outer:
    class Inner:
        class Deep:
            n = 1
        def get(self): return Outer.Inner.Deep.n
@dataclass
class Data:
    a: int
    b: list = field(default_factory=list)
    c: "Data" = None
    d: typing.ClassVar[int] = 4
    e: dataclasses.InitVar[int] = 0
    f: int = field(default=3, repr=False, compare=False, metadata={"k": 1})
    _: dataclasses.KW_ONLY
    g: int = 7
    def __post_init__(self, e): self.h = e
@dataclass(frozen=True, order=True)
class Frozen:
    a: int = 1
@dataclass
class Child(Data):
    z: int = 0
class Reduced:
    def __init__(self, n): self.n = n
    def __reduce__(self): return Reduced, (self.n * 2,)
class State:
    def __init__(self): self.a = 1; self.lock = threading.Lock()
    def __getstate__(self): return {"a": self.a + 1}
    def __setstate__(self, s): self.__dict__.update(s); self.lock = "fresh"
class NewArgs(tuple):
    def __new__(cls, a, b): return super().__new__(cls, (a, b))
    def __getnewargs__(self): return tuple(self)
class MyList(list): 
    extra = 0
class MyDict(collections.OrderedDict): pass
class Default(collections.defaultdict): pass
class MyInt(int): pass
class MyStr(str): pass
class Err(Exception):
    def __init__(self, code, *, why="w"): super().__init__(code); self.code = code; self.why = why
    def __reduce__(self): return _make_err, (self.code, self.why)
def _make_err(code, why): return Err(code, why=why)
class Abstract(abc.ABC):
    @abc.abstractmethod
    def f(self): ...
    @property
    @abc.abstractmethod
    def g(self): ...
class Concrete(Abstract):
    def f(self): return 1
    g = 2
@Abstract.register
class Virtual: pass
class Descriptor:
    def __init__(self, n): self.n = n
    def __get__(self, obj, cls): return self if obj is None else self.n
    def __set__(self, obj, value): self.n = value
class HasDescriptor: d = Descriptor(3)
class Node:
    def __init__(self): self.next = self
class A: 
    def other(self): return B()
class B(A):
    peer = A
A.peer = B
class Multi(A, Square): pass
class Getattr:
    def __getattr__(self, name):
        if name.startswith("_"): raise AttributeError(name)
        return name
singleton = object.__new__(Square)
def show(v):
    fields = [repr(getattr(v, n, None)) for n in ("n", "a", "b", "g", "h", "code", "why", "lock", "d", "item", "label", "mass", "_value_")]
    return [type(v).__qualname__, fields, isinstance(v, Abstract), repr(v) if not isinstance(v, bytes) and isinstance(v, (tuple, list, dict, int, str, enum.Enum)) or dataclasses.is_dataclass(v) else ""]
objects = {"Color": Color.RED, "Blue": Color.BLUE, "Number": Number.TWO, "Word": Word.ABC, "Perm": Perm.RW,
    "PermBoth": Perm.R | Perm.W, "IPerm": IPerm.R | IPerm.W, "Planet": Planet.EARTH, "Coordinate": Coordinate.PY, "Mixed": Mixed.A, "Ops": Ops.ADD,
    "OfData": OfData.FIRST, "Ignored": Ignored.A,
    "Dynamic": Dynamic.B, "NT": NT(1), "nt": nt(1), "TD": TD(a=1), "Square": Square(), "Impl": Impl(), "Box": Box(1), "IntBox": IntBox(2),
    "Pair": Pair(3), "Inner": Outer.Inner(), "Deep": Outer.Inner.Deep(), "Data": Data(1, e=5), "Frozen": Frozen(), "Child": Child(1, z=2),
    "Reduced": Reduced(1), "State": State(), "NewArgs": NewArgs(1, 2), "MyList": MyList([1]), "MyDict": MyDict(a=1),
    "Default": Default(list, a=1), "MyInt": MyInt(3), "MyStr": MyStr("s"), "Err": Err(3, why="y"), "Concrete": Concrete(), "Virtual": Virtual(),
    "HasDescriptor": HasDescriptor(), "Node": Node(), "A": A(), "B": B(), "Multi": Multi(), "Getattr": Getattr()}
classes = [type(v) for v in objects.values()]
def t_enum(): return [Color.CRIMSON is Color.RED, list(Color.__members__), Color.RED.describe(), Color.first(), Color.RED.shout, Color("b"), Color["BLUE"], len(Color)]
def t_enum2(): return [Number.TWO + 1, Word.ABC, Perm.R | Perm.W, (Perm.R | Perm.W) is Perm.RW, Perm.RW.name, IPerm(6), Planet.EARTH.gravity, Planet((6.4e23, 3.4e6)).name, Coordinate.PY.label, Coordinate(1).name, bytes(Coordinate.PY), Missing("zzz"), Mixed.A.upper(), Ops.ADD(1, 2), list(Dynamic), Unique.ONE, OfData.FIRST.n, list(Ignored), ~Perm.R]
def t_tuple(): return NT(1).total(), NT._fields, NT._field_defaults, nt(2), nt._fields, NT(1)._replace(x=3), typing.get_type_hints(NT)
def t_typed(): return TD(a=1), TD.__total__, sorted(TD2.__annotations__), sorted(TD2.__required_keys__), TD2.__optional_keys__
def t_protocol():
    try: Shape()
    except TypeError: refused = True
    return refused, isinstance(Square(), Sized), isinstance(3, Sized), Impl().size(), issubclass(Impl, Sized), Shape._is_protocol, Impl._is_protocol
def t_generic(): return str((str(Alias), Alias(1).item, str(IntBox.__orig_bases__), Pair.__parameters__, Box.__parameters__, typing.get_args(Opt)[0] is Square, Lit, Union, UserId(3), UserId.__name__, K.__bound__, Box[str](2).item))
def t_identity():
    import copy, pickle
    return [copy.copy(Color.RED) is Color.RED, copy.deepcopy(Color.RED) is Color.RED, T is Box.__parameters__[0], A.peer is B, B.peer is A, type(A().other()) is B]
def t_nested(): return Outer.Inner.__qualname__, Outer.Inner.Deep.__qualname__, Outer.Inner().get()
def t_data(): return [f.name for f in dataclasses.fields(Data)], Data.d, Data(1) == Data(1), dataclasses.replace(Data(1), a=2, e=1), dataclasses.asdict(Data(1)), Data.__dataclass_fields__["f"].metadata["k"], dataclasses.astuple(Child(1)), Data.__match_args__
def t_match():
    match Data(1):
        case Data(a=1): return "matched"
def t_frozen():
    try: Frozen().a = 2
    except dataclasses.FrozenInstanceError as error: return str(error), Frozen() < Frozen(2), hash(Frozen())
def t_make():
    New = dataclasses.make_dataclass("New", ["a", ("b", int, 3)]); return repr(New(1))
def t_abstract():
    try: Abstract()
    except TypeError as error: return str(error), sorted(Abstract.__abstractmethods__), issubclass(Virtual, Abstract), isinstance(Concrete(), Abstract)
def t_names(): return [(c.__module__ == "__main__", c.__qualname__, c.__name__) for c in classes]
def t_isinstance(): return isinstance(Multi(), A), isinstance(Multi(), Square), Multi.__mro__.__len__(), [b.__name__ for b in Multi.__bases__]
def t_raise():
    try: raise Err(1)
    except Err as error: return error.code
def t_singleton(): return type(singleton) is Square
def t_node():
    n = Node(); return n.next.next is n
""",
}  # fmt: skip


def _run(path: Path, pool: str) -> list[str]:
    done = forked.run([sys.executable, str(path), pool], timeout=180)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.parametrize("form", FORMS)
def test_script_definitions_in_tasks_are_as_in_standard_pool(tmp_path: Path, form: str) -> None:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(HEAD + FORMS[form] + TAIL))
    expected, found = _run(path, "standard"), _run(path, "hoplite_mp")
    differ = [pair for pair in zip(expected, found, strict=True) if pair[0] != pair[1]]
    if differ:
        pytest.fail("\n\n".join("\n".join(pair) for pair in differ), pytrace=False)
