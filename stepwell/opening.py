"""`stepwell.open`: from what the user names to a store."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from stepwell.building import Node, build, make_host
from stepwell.config import find_config, load_config
from stepwell.ending import count_open
from stepwell.errors import ConfigError
from stepwell.forking import Resume, begin
from stepwell.format.names import check_run_name
from stepwell.hostmem import cgroup_limit_bytes, free_memory_bytes, local_ranks
from stepwell.policies.base import Policy
from stepwell.policies.flush import FlushNewest, FlushRule
from stepwell.schema import Capacity, TierConfig
from stepwell.settings import Settings, TierOptions
from stepwell.store import CheckpointStore
from stepwell.tiers.base import Tier
from stepwell.tiers.file import FileTier
from stepwell.tiers.gpu import GpuTier
from stepwell.tiers.host import HostTier
from stepwell.units import parse_percent, parse_size


def open(
    target: str | os.PathLike[str] | None = None,
    *,
    run: str | None = None,
    mode: Literal["w", "r"] = "w",
    tiers: Sequence[Tier] | None = None,
    policies: Sequence[Policy] | None = None,
    host: str | int | None = None,
    resume: Resume = "allow",
    fork_from: str | os.PathLike[str] | None = None,
    **overrides: Any,
) -> CheckpointStore:
    """Opens the checkpoints of one run.

    target: the run's folder; its last component is the run, its parent must exist. Checkpoints then go through
    host memory to that disk, and nothing is ever deleted. Or a config file (*.toml), with `run` beside it; without
    a target STEPWELL_CONFIG and /etc/stepwell.toml are looked for. tiers: instead of a target, a chain of tier
    drivers, nearest first, with `policies` (default: every checkpoint goes to every tier). host: with a folder,
    how much memory the host tier of this process takes, such as "8GiB" or "25%" (default: it grows with the first
    save). mode:
    "w" to save and restore, "r" for readers, which write nothing. resume: "must" raises CheckpointNotFound if the run
    has no checkpoint, "never" raises ConfigError if it has one. fork_from: the checkpoint of another run that this one
    begins from, by its path or by its run's name on the same tiers; ignored once this run has a complete checkpoint
    on its last tier. Other keywords are settings: see `stepwell.settings.Settings`.

    Raises ConfigError for what cannot be right, TierUnavailable if a place is not there.
    """
    if resume not in ("allow", "must", "never"):
        raise ConfigError(f"resume={resume!r}", todo="Use 'allow', 'must' or 'never'")
    if mode == "r" and fork_from is not None:
        raise ConfigError("a reader cannot fork", todo=f"Read {os.fspath(fork_from)!r} itself, or open with mode='w'")
    if mode not in ("w", "r"):
        raise ConfigError(f"mode={mode!r}", todo="Use 'w' to save and restore, 'r' to read")
    if target is not None and not os.fspath(target):
        raise ConfigError("the target is empty", todo="Name the run's folder, such as 'ckpts/my-run'")
    if target is not None and tiers is not None:
        raise ConfigError("give either the run's folder or tiers", todo="stepwell.open('ckpts/my-run')")
    settings: dict[str, Any] = {}
    options: dict[str, TierOptions] = {}
    if tiers is not None:
        if run is None:
            raise ConfigError("tiers need a run's name", todo="Give run='my-run'")
    elif (file := find_config(target)) is not None:
        if host is not None:
            raise ConfigError(f"host={host!r} beside a config file", todo="Set the host tier's capacity in the file")
        built = build(load_config(file), run=run, mode=mode)
        run, tiers, settings, options = built.run, built.tiers, dict(built.settings), built.options
        policies = built.policies if policies is None else policies
    elif target is not None:
        run, tiers = _folder(Path(target), run, mode, host)
    else:
        raise ConfigError("nothing says where checkpoints go", todo="stepwell.open('ckpts/my-run'), or a config file")
    _check_tiers(tiers)
    check_run_name(run)
    if policies is None:
        storage = [tier.info.name for tier in tiers if not isinstance(tier, HostTier)]
        policies = [rule(name) for name in storage[1:] for rule in (FlushRule, FlushNewest)] if mode == "w" else []
    chosen = Settings(open_number=count_open(run)).override({**settings, **overrides})
    store = CheckpointStore(run, tiers, mode, chosen, policies, options=options)
    try:
        begin(store, resume, fork_from)
    except BaseException:
        store.close()
        raise
    return store


def _folder(target: Path, run: str | None, mode: str, host: str | int | None) -> tuple[str, list[Tier]]:
    path = target.expanduser().absolute()
    check_run_name(path.name)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"not a folder: {path}", todo="A run is a folder; give another path")
    if run is not None:
        raise ConfigError("a folder already names the run", todo=f"Leave out run={run!r}, or open {path / run}")
    if not path.parent.is_dir():
        raise ConfigError(
            f"the folder of the run's parent does not exist: {path.parent}", todo="Make it first, or mend the path"
        )
    disk = FileTier(path.parent, name="disk", read_only=mode == "r")
    return path.name, [_host(host), disk] if mode == "w" else [disk]


def _host(host: str | int | None) -> Tier:
    """As a config's, but that a size is of this process alone."""
    ranks = local_ranks()
    share = Node(1, cgroup_limit_bytes() // ranks, free_memory_bytes() // ranks)
    try:
        capacity = None
        if isinstance(host, str) and host.strip().endswith("%"):
            capacity = Capacity(fraction=parse_percent(host))
        elif host is not None:
            capacity = Capacity(size_bytes=parse_size(host))
        return make_host(TierConfig(name="host", driver="host", capacity=capacity), False, share)
    except ConfigError as error:
        raise ConfigError(f"host={host!r}: {error.what}", todo=error.todo) from None


def _check_tiers(tiers: Sequence[Tier]) -> None:
    names = [tier.info.name for tier in tiers]
    if not tiers or len(set(names)) < len(names):
        raise ConfigError(f"every tier needs a name of its own, not {names}" if tiers else "there are no tiers")
    ranks = [0 if isinstance(tier, GpuTier) else 1 if isinstance(tier, HostTier) else 2 for tier in tiers]
    if ranks != sorted(ranks) or ranks.count(0) > 1 or ranks.count(1) > 1 or ranks[-1] < 2:
        raise ConfigError(
            f"the gpu tier comes first, then the host tier and storage after it, not {names}",
            todo="Put the tiers in order, nearest first",
        )
