"""Traces made up from a few numbers and a seed: training with failures, and inference with models by popularity."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

from msgspec import structs

from stepwell.checking import nearest
from stepwell.errors import ConfigError
from stepwell.lab.trace import Workload
from stepwell.tracing import Closed, Event, Loaded, Restored, Saved, Start
from stepwell.units import parse_duration, parse_size

RUN = "lab"
#: of a state whose parts nobody named: the model, and an optimizer with two moments of its dtype
_MODEL_SHARE = 1 / 3
#: failures for each save, above which a trace would not end
_FAILURES_MAX = 100
#: levels of failure, by what a copy must survive
LEVELS = ("process", "reboot", "node-loss")


def training(
    *, state: int, every: int, iteration: float, saves: int, ranks: int = 1, restart: float = 60.0, seed: int = 0,
    failures: Mapping[str, float] | None = None,
) -> Workload:  # fmt: skip
    """A save of `state` bytes (of all ranks together) each `every` steps of `iteration` seconds, `saves` times.

    failures: mean time between those of each level, of training time; each costs `restart` seconds and a restore.
    Failures come at the same moments of the program whatever the config does, so that configs can be compared.
    """
    rng = random.Random(seed)
    part = state // ranks
    model = max(1, int(part * _MODEL_SHARE))
    parts = {"model": model, "optimizer": max(1, part - model)}
    times = {level: rng.expovariate(1 / mean) for level, mean in sorted((failures or {}).items())}
    script: list[Event] = [Start(rank=0, world=ranks)]
    work, since, failed = 0.0, 0.0, 0  # of all the training, and of this process
    for number in range(1, saves + 1):
        due = work + every * iteration
        while times and min(times.values()) < due:
            level = min(times, key=lambda name: times[name])
            at, failed = times[level], failed + 1
            if failed > saves * _FAILURES_MAX:
                raise ConfigError("training fails more often than it can save", todo="Let it save or fail otherwise")
            script.append(Start(rank=0, world=ranks, lost=level, after=at - work))
            script.append(Restored(t=restart, took=0.0, run=RUN, parts=parts))
            work, since, due = at, restart, at + every * iteration
            times[level] = at + rng.expovariate(1 / (failures or {})[level])
        since += due - work
        work = due
        script.append(Saved(t=since, took=0.0, run=RUN, step=number * every, parts=parts))
    script.append(Closed(t=since, took=0.0, run=RUN))
    return Workload("training", [_of_rank(script, rank) for rank in range(ranks)])


def _of_rank(script: list[Event], rank: int) -> list[Event]:
    return [structs.replace(event, rank=rank) if isinstance(event, Start) else event for event in script]


def fleet(*, models: int, state: int, requests: int, gap: float, skew: float = 1.0, seed: int = 0) -> Workload:
    """One inference process that loads models of `state` bytes, the k-th most popular in proportion to 1 / k^skew.

    gap: mean seconds from the end of one load to the next. What was loaded stays in host memory as far as the config's
    eviction lets it.
    """
    rng = random.Random(seed)
    names = [f"model-{number:03d}" for number in range(1, models + 1)]
    weights = list(accumulate(1 / rank**skew for rank in range(1, models + 1)))
    files = {"model.safetensors": state}
    events: list[Event] = [Start()]
    now = 0.0
    for _ in range(requests):
        now += rng.expovariate(1 / gap)
        [name] = rng.choices(names, cum_weights=weights)
        events.append(Loaded(t=now, took=0.0, ref=name, files=files))
    return Workload("fleet", [events], {name: files for name in names})


# -- from the command line ---------------------------------------------------------------

_TRAINING: dict[str, Callable[[str], Any]] = {
    "state": parse_size, "every": int, "iteration": parse_duration, "saves": int, "ranks": int,
    "restart": lambda text: parse_duration(text, or_zero=True),
}  # fmt: skip
_FLEET: dict[str, Callable[[str], Any]] = {
    "models": int, "state": parse_size, "requests": int, "gap": parse_duration, "skew": float,
}  # fmt: skip
_MAKERS: dict[str, tuple[Callable[..., Workload], Mapping[str, Callable[[str], Any]], Mapping[str, str]]] = {
    "training": (training, _TRAINING, {"state": "30GB", "every": "100", "iteration": "1s", "saves": "20"}),
    "fleet": (fleet, _FLEET, {"models": "20", "state": "14GB", "requests": "200", "gap": "30s"}),
}
_COUNTS = ("every", "saves", "ranks", "models", "requests")


def make(text: str, seed: int, failures: Mapping[str, float]) -> Workload:
    """A workload from text such as 'training,state=80GB,every=100'; what it leaves out has a default.

    failures: only training has them. Raises ConfigError that shows what would be right.
    """
    name, *pairs = [part.strip() for part in text.split(",")]
    if name not in _MAKERS:
        raise ConfigError(f"there is no made-up workload {name!r}", todo=nearest(name, list(_MAKERS)))
    maker, known, defaults = _MAKERS[name]
    given = dict(defaults)
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or key not in known:
            hint = nearest(key, list(known)) if equals else f"Write it as {next(iter(known))}=VALUE"
            raise ConfigError(f"{pair!r} says nothing about a workload of {name}", todo=hint)
        given[key] = value
    values = {key: _value(key, known[key], value) for key, value in given.items()}
    if name == "training":
        values["failures"] = failures
    return maker(seed=seed, **values)


def _value(key: str, parse: Callable[[str], Any], text: str) -> Any:
    try:
        value = parse(text)
    except ConfigError:
        raise
    except ValueError:
        raise ConfigError(f"{key}={text} cannot be read", todo=_todo(key)) from None
    if key in _COUNTS and value < 1:
        raise ConfigError(f"{key}={text} is too few", todo=_todo(key))
    return value


def _todo(key: str) -> str:
    return f"Write a number, such as {key}=10"
