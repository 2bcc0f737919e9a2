"""Plain values and containers keep their types; nothing is executed to bring them back."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import fractions
import pathlib
import pickle
import sys
import uuid
import zoneinfo
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from stepwell.errors import FormatError, PickleRefused, StateError
from stepwell.state import build, capture
from tests.state.memory import Saved, assert_same, through


class Point(NamedTuple):
    x: Any
    y: Any


@dataclasses.dataclass
class Config:
    rate: float
    layers: list[int]
    weight: Any = None

    def __post_init__(self) -> None:
        assert self.rate >= 0, "loading must not run this"


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    name: str


class Colour(enum.Enum):
    RED = "red"
    DARK_RED = 3


class Mode(enum.Flag):
    READ = 1
    WRITE = 2


class Level(enum.IntEnum):
    LOW = 1


class Opaque:
    """Something that only pickle can save."""

    def __init__(self, value: int) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Opaque) and other.value == self.value


ZONE = datetime.timezone(datetime.timedelta(hours=5, minutes=30), "IST")
VALUES: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**63 - 1, 2**63, -(2**63), -(2**63) - 1, 10**400, -(10**400)),
    *(0.0, -0.0, 1.0, 0.1, 1e300, 5e-324, float("inf"), float("-inf"), float("nan")),
    *(
        1 + 2j,
        complex(-0.0, float("inf")),
        "",
        "plain",
        "ünïcode \U0001f600",
        "new\nline\0",
        "\ud800lone",
        "x" * 10_000,
    ),
    *(b"", b"\x00\xff", b"y" * 5000, bytearray(b"abc"), bytearray(b"z" * 5000)),
    *([], (), {}, set(), frozenset(), [[]], ((),), [{}], {"a": ()}, [None], (1, [2, (3,)])),
    *({1, 2, 3}, {"a", 1, None, (2, "b")}, frozenset({b"x", frozenset({1})})),
    *({25: 1, "25": 2}, {True: "a", "True": "b"}, {None: 1, "None": 2}, {(1, "a"): 3, 1.5: 4, "1.5": 5}),
    *({b"k": 1}, {Colour.RED: 1}, {torch.float32: 2}, {"": 1, "a.b": {"c": 1}, "a": {"b.c": 2}}, {"t": ["t", 0]}),
    {"slash/": 1, "..": 2, ".": 3, "new\nline": 4, "\ud800": 5, "n" * 1000: 6, "__metadata__": 7, "#2": 8},
    *(collections.OrderedDict([("b", 1), ("a", 2)]), collections.Counter({"x": 3}), collections.Counter()),
    *(collections.deque([1, 2], maxlen=5), collections.deque(), collections.deque([[1]])),
    *(Point(1, [2]), Config(0.5, [1, 2]), Frozen("f"), Colour.RED, Colour.DARK_RED, Level.LOW, Mode.READ | Mode.WRITE),
    *(torch.Size([1, 2]), torch.bfloat16, torch.device("cuda:1"), torch.strided, torch.channels_last),
    *(slice(1, None, 2), range(3, 10, 2), range(10**30), ..., np.dtype(">i4"), np.dtype([("a", "<f8"), ("b", "S3")])),
    *(
        np.float32(1.5),
        np.int64(-3),
        np.bool_(True),
        np.complex128(1 - 2j),
        np.str_("s"),
        np.datetime64("2024-01-01", "D"),
    ),
    *(np.float64("nan"), np.float64(-0.0), np.bytes_(b"ab"), np.timedelta64(5, "ns"), np.float16(0.5)),
    *(pathlib.Path("a/b"), pathlib.PurePosixPath("/x"), pathlib.PureWindowsPath("C:/x")),
    *(datetime.date(2024, 2, 29), datetime.time(1, 2, 3, 4, fold=1), datetime.timedelta(-1, 5, 7), ZONE, datetime.UTC),
    *(datetime.datetime(2024, 1, 2, 3, 4, 5, 6, tzinfo=ZONE), datetime.datetime(2024, 10, 27, 2, fold=1)),
    *(
        zoneinfo.ZoneInfo("UTC"),
        decimal.Decimal("1.10"),
        decimal.Decimal("NaN").copy_abs() * 0 if False else decimal.Decimal("-0"),
    ),
    *(fractions.Fraction(1, 3), uuid.UUID(int=5)),
]


@pytest.mark.parametrize("value", VALUES, ids=[f"{at}-{type(value).__name__}" for at, value in enumerate(VALUES)])
def test_values_keep_type_and_value(value: Any) -> None:
    new = through(value)
    assert_same(new, value)
    assert_same(through(new), value)  # and a second save works


def test_nan_bits_are_kept() -> None:
    import struct

    odd = struct.unpack(">d", bytes.fromhex("fff8000000000123"))[0]
    assert struct.pack(">d", through(odd)) == struct.pack(">d", odd)


def test_defaultdict_keeps_its_factory() -> None:
    value = collections.defaultdict(list, {"a": [1]})
    new = through(value)
    assert_same(new, value)
    assert new["missing"] == []
    assert through(collections.defaultdict(None, {1: 2})).default_factory is None
    with pytest.raises(StateError, match=r"part\.deep"):
        capture({"part": {"deep": collections.defaultdict(lambda: 0)}})


ARRAYS: dict[str, Callable[[], Any]] = {
    "c": lambda: np.arange(12.0).reshape(3, 4),
    "fortran": lambda: np.asfortranarray(np.arange(12).reshape(3, 4)),
    "strided": lambda: np.arange(20)[::3],
    "reversed": lambda: np.arange(5)[::-1],
    "big_endian": lambda: np.arange(4, dtype=">u2"),
    "structured": lambda: np.array([(1, 2.5), (3, 4.5)], dtype=[("i", "<i4"), ("f", ">f8")]),
    "bool": lambda: np.array([True, False]),
    "half": lambda: np.array([1.5, -0.0], dtype=np.float16),
    "complex": lambda: np.array([1 + 2j]),
    "text": lambda: np.array(["ab", "ü"]),
    "bytes": lambda: np.array([b"ab", b"c"]),
    "dates": lambda: np.array(["2024-01-01", "NaT"], dtype="datetime64[D]"),
    "zero_dim": lambda: np.array(5, dtype=np.int16),
    "empty": lambda: np.empty((0, 3), dtype=np.float32),
    "objects": lambda: np.array([[None, "a"], [1, {"x": (2,)}]], dtype=object),
    "read_only": lambda: np.frombuffer(b"abcd", np.uint8),
    "long": lambda: np.array([1.5], dtype=np.longdouble),
}


@pytest.mark.parametrize("kind", ARRAYS)
def test_arrays(kind: str) -> None:
    array = ARRAYS[kind]()
    new = through(array)
    assert_same(new, array)
    assert new.flags.writeable
    if array.ndim > 1:
        assert new.flags.f_contiguous == array.flags.f_contiguous


def test_large_bytes_and_arrays_do_not_go_through_json() -> None:
    saved = Saved({"part": {"b": bytes(100_000), "a": np.zeros(100_000), "n": np.zeros((2, 3), dtype=np.int32)}})
    assert len(str(saved.skeleton)) < 1000
    labels = saved.labels()
    assert labels["part.n"][1].dtype == "I32" and labels["part.n"][1].shape == (2, 3)
    assert labels["part.a"][1].dtype == "F64"


def test_dataclasses_and_named_tuples_hold_tensors() -> None:
    value = {"c": Config(1.0, [], torch.randn(3)), "p": Point(torch.zeros(2), None)}
    assert_same(through(value), value)


def test_loading_does_not_run_constructors() -> None:
    value = Config(1.0, [])
    value.rate = -1.0
    assert through(value).rate == -1.0


def test_cycles_and_depth_are_refused_by_name() -> None:
    loop: list[Any] = [1]
    loop.append({"again": loop})
    with pytest.raises(StateError) as caught:
        capture({"part": loop})
    assert caught.value.where["key"] == "part.1.again"
    deep: Any = 0
    for _ in range(1000):
        deep = [deep]
    with pytest.raises(StateError, match="nested"):
        capture({"part": deep})
    same = [1]
    assert through([same, same]) == [[1], [1]]


def test_what_cannot_be_pickled_is_refused_by_name() -> None:
    with pytest.raises(StateError) as caught:
        capture({"part": {"f": lambda: 0}})
    assert caught.value.where["key"] == "part.f"
    for state in ({"part": {torch.zeros(2): 1}}, {torch.zeros(2): 1}, [("part", 1)]):
        with pytest.raises(StateError):
            capture(state)  # type: ignore[arg-type]  # the last one is what a user may try


def test_local_classes_are_refused_at_save() -> None:
    @dataclasses.dataclass
    class Local:
        x: int

    with pytest.raises(StateError) as caught:
        capture({"part": {"c": Local(1)}})
    assert "Local" in str(caught.value) and caught.value.where["key"] == "part.c"


def test_pickles_need_permission() -> None:
    saved = Saved({"part": {"o": Opaque(5)}})
    with pytest.raises(PickleRefused) as caught:
        saved.load()
    assert caught.value.where["key"] == "part.o" and "Opaque" in str(caught.value)
    with pytest.raises(PickleRefused):
        saved.restore({"part": {"o": None}})
    assert saved.load(allow_pickle=True)["part"]["o"] == Opaque(5)
    live = {"part": {"o": None}}
    saved.restore(live, allow_pickle=True)
    assert live["part"]["o"] == Opaque(5)


class Bomb:
    """Runs code when it is unpickled."""

    went_off = False

    def __reduce__(self) -> Any:
        return (setattr, (Bomb, "went_off", True))


def test_a_pickle_with_a_side_effect_is_never_run() -> None:
    skeleton = Saved({"part": {"x": Bomb(), "y": 1}}).skeleton
    assert Bomb.went_off is False
    with pytest.raises(PickleRefused):
        build(skeleton)
    assert pickle and Bomb.went_off is False


def renamed_class(state: Any, old: str, new: str) -> Any:
    import msgspec

    saved = Saved(state)
    text = msgspec.json.encode(saved.skeleton).decode()
    assert old in text
    saved.skeleton = msgspec.json.decode(text.replace(old, new))
    return saved


@pytest.mark.parametrize("value", [Point(1, 2), Config(1.0, []), Colour.RED], ids=repr)
def test_classes_that_are_not_loaded_are_named_and_not_imported(value: Any) -> None:
    name = type(value).__qualname__
    saved = renamed_class({"part": {"v": value}}, f"{__name__}:{name}", f"wave:{name}")
    assert "wave" not in sys.modules
    with pytest.raises(StateError) as caught:
        saved.load()
    assert caught.value.where["key"] == "part.v" and f"wave:{name}" in str(caught.value)
    assert "wave" not in sys.modules


@pytest.mark.parametrize("value", [Point(1, 2), Config(1.0, []), Colour.RED], ids=repr)
def test_classes_must_be_what_they_claim(value: Any) -> None:
    name = type(value).__qualname__
    saved = renamed_class({"part": {"v": value}}, f"{__name__}:{name}", "subprocess:Popen")
    import subprocess

    assert subprocess
    with pytest.raises(FormatError):
        saved.load()
