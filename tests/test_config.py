"""Config: defaults, what is refused and how it is said, and the order of its sources."""

import copy
import dataclasses
import os
import pickle
import pydoc
import subprocess
import sys
from typing import Any

import pytest

from hoplite_mp.config import MOVED, RENAMED, Config, parse_size
from hoplite_mp.errors import ConfigError
from hoplite_mp.integrations._sidecar.sidecar import _place

NAMES = [field.name for field in dataclasses.fields(Config)]
NUMBERS = [name for name in NAMES if name not in ("spill_dir", "hosts_command")]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in list(os.environ):
        if variable.startswith("HOPLITE_MP_"):
            monkeypatch.delenv(variable)


def test_defaults_are_valid_frozen_and_travel() -> None:
    config = Config()
    assert config == Config.from_environment()
    assert pickle.loads(pickle.dumps(config)) == config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.retries = 1
    assert dataclasses.replace(config, retries=1).retries == 1


def test_positional_arguments_are_refused() -> None:
    with pytest.raises(TypeError):
        Config(65536)


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [-1, "7", True, float("nan"), float("inf"), [1]])
def test_a_bad_value_is_named_with_what_is_allowed(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**{name: value})
    assert str(caught.value).startswith(f"{name}={value!r} is not allowed: use a ")


@pytest.mark.parametrize(
    ("name", "value", "says"),
    [
        ("retries", 128, "a whole number from 0 up to 127"),
        ("drain_interval_s", 0, "a finite number above 0 up to 60"),
        ("blas_threads", 0, "a whole number from 1 up to 1024, or None"),
        ("group_members_max", 65, "a whole number from 1 up to 64"),
        ("span_bytes", (1 << 20) + 1, "a whole number from 65536, a power of two"),
        ("spill_dir", "", "the path of a directory"),
        ("spill_dir", 5, "the path of a directory"),
        ("hosts_command", "", "a command"),
        ("hosts_command", "ssh {host}", "a command that contains {host}, and {arguments}"),
        ("retries", None, "a whole number"),
        ("retries", 1.0, "a whole number"),
    ],
)
def test_messages(name: str, value: object, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Config(**{name: value})
    assert f"{name}={value!r} is not allowed: use {says}" in str(caught.value)


def test_sizes_must_fit_each_other() -> None:
    with pytest.raises(ConfigError, match=r"at most span_bytes // 2 = 65536"):
        Config(small_object_bytes_max=65537, span_bytes=131072)


def test_argument_before_environment_before_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPLITE_MP_RETRIES", "5")
    monkeypatch.setenv("HOPLITE_MP_PUT_WAIT_S", " 1.5 ")
    config = Config.from_environment(retries=7, put_wait_s=None)
    assert (config.retries, config.put_wait_s, config.spin_us_max) == (7, 1.5, 50)


def test_the_environment_knows_units_none_and_paths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOPLITE_MP_MEMORY_BYTES", "2GiB")
    monkeypatch.setenv("HOPLITE_MP_SMALL_OBJECT_BYTES_MAX", "4KiB")
    monkeypatch.setenv("HOPLITE_MP_SPILL_DIR", "/var/tmp")
    monkeypatch.setenv("HOPLITE_MP_REDUCE_THREADS", "none")
    monkeypatch.setenv("HOPLITE_MP_RETRIES", "")
    config = Config.from_environment()
    assert config.memory_bytes == 2 << 30
    assert config.small_object_bytes_max == 4096
    assert config.spill_dir == "/var/tmp"
    assert config.reduce_threads is None
    assert config.retries == 3


@pytest.mark.parametrize(
    ("name", "text"), [("RETRIES", "many"), ("MEMORY_BYTES", "2 big"), ("PUT_WAIT_S", "1m")]
)
def test_a_bad_variable_is_named(monkeypatch: pytest.MonkeyPatch, name: str, text: str) -> None:
    monkeypatch.setenv(f"HOPLITE_MP_{name}", text)
    with pytest.raises(ConfigError, match=f"HOPLITE_MP_{name}='{text}' is not allowed: use a "):
        Config.from_environment()


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_old_names_of_fields_work_and_warn(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = 5 if old.endswith("max") else 4.0 if old.endswith("_s") else 1 << 21
    later = {"heartbeat_timeout_s": 30.0} if old == "beat_interval_s" else {}
    with pytest.warns(DeprecationWarning, match=f"{old} is now called {new}") as caught:
        made: Any = Config(**{old: value, **later})
    assert caught[0].filename == __file__
    assert getattr(made, new) == value
    with pytest.warns(DeprecationWarning, match=old) as caught:
        assert getattr(made, old) == value
    assert caught[0].filename == __file__
    with pytest.warns(DeprecationWarning, match=old):
        assert dataclasses.replace(Config(**later), **{old: value}) == made
    with pytest.warns(DeprecationWarning, match=old):
        assert Config.from_environment(**{old: value, **later}) == made
    monkeypatch.setenv(f"HOPLITE_MP_{old.upper()}", str(value))
    with pytest.warns(DeprecationWarning, match=f"{old.upper()} is now called .*{new.upper()}"):
        assert Config.from_environment(**later) == made
    monkeypatch.setenv(f"HOPLITE_MP_{new.upper()}", str(getattr(Config(), new)))
    assert getattr(Config.from_environment(), new) == getattr(Config(), new)


def test_copies_of_a_config_do_not_warn() -> None:
    assert copy.deepcopy(Config()) == pickle.loads(pickle.dumps(Config())) == Config()
    assert not hasattr(Config(), "no_such_field")


def test_unknown_names_are_a_type_error() -> None:
    with pytest.raises(TypeError, match="Config has no field nonsense"):
        Config.from_environment(nonsense=None)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        (7, 7),
        ("65536", 65536),
        ("2GiB", 2 << 30),
        ("2 gib", 2 << 30),
        ("1.5KiB", 1536),
        ("1kB", 1000),
        ("3M", 3_000_000),
        ("1TiB", 1 << 40),
        ("12B", 12),
    ],
)
def test_parse_size(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "2 GiB 3", "1e3", "1iB", "2XB"])
def test_parse_size_refuses(text: str) -> None:
    with pytest.raises(ConfigError, match="invalid size"):
        parse_size(text)


def test_help_explains_every_field() -> None:
    text = pydoc.render_doc(Config, renderer=pydoc.plaintext)
    lines = [line.strip(" |") for line in text.splitlines()]
    for name in NAMES:
        (at,) = [i for i, line in enumerate(lines) if line.startswith(f"{name} = ")]
        assert len(lines[at + 1]) > 20, name
    assert "How long a put waits for space in a full store before StoreFullError." in lines
    assert Config.__doc__.startswith("The limits of one cluster.")


def test_help_costs_nothing_at_import() -> None:
    code = "import sys, hoplite_mp.config as c; before = set(sys.modules); c.Config(); "
    code += "assert set(sys.modules) == before; assert 'put_wait_s' in c.Config.__doc__"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_completion_shows_the_public_face() -> None:
    import hoplite_mp
    import hoplite_mp._client.memory

    shown = {name for name in dir(hoplite_mp) if not name.startswith("_")}
    assert shown == set(hoplite_mp.__all__)
    assert hoplite_mp._client.memory.Memory
    assert hoplite_mp.__version__


@pytest.mark.parametrize(("old", "new"), MOVED.items())
def test_field_that_has_become_an_argument_of_front_ends_reaches_their_place(
    monkeypatch: pytest.MonkeyPatch, old: str, new: str
) -> None:
    def place(config: Config | None, **given: float) -> float:
        both = {name: given.get(name) for name in MOVED.values()}
        return float(getattr(_place(None, None, None, config, **both), new))

    with pytest.warns(DeprecationWarning, match=f"{old} has become {new}= of init"):
        config = Config(**{old: 7})  # type: ignore[arg-type]
    assert place(config) == 7.0
    assert place(config, **{new: 3.0}) == 3.0
    assert not hasattr(config, old)
    with (
        pytest.warns(DeprecationWarning, match=old),
        pytest.raises(ConfigError, match=rf"{old}=-1 is not allowed: use a finite number"),
    ):
        Config(**{old: -1})  # type: ignore[arg-type]
    monkeypatch.setenv(f"HOPLITE_MP_{old.upper()}", "9")
    with pytest.warns(DeprecationWarning, match=old):
        assert place(None) == 9.0


def test_argument_of_front_ends_that_is_no_time_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="ref_hold_s=nan is not allowed"):
        _place(None, None, None, None, float("nan"), None)
