from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.config import Config, find_config, load_config
from stepwell.schema import BestRule, Capacity, EvictTable, FlushRule, Grace, RetainTable, Seconds
from tests.config.examples import NVME

#: the example of the design, but for what is not built: shared memory, and other policies than the least recently used
EXAMPLE = (
    """\
max_unsaved = "1h"

[[tier]]
name = "host"
driver = "host"
capacity = "25%"                 # of the job's cgroup, per node; or "64GiB"
shared = false
evict = { policy = "lru" }

"""
    + NVME
    + """
[[tier]]
name = "pfs"
driver = "pfs"
path = "/lustre/${PROJECT}/ckpt"
flush = [{ every_steps = 100, parts = ["model"] }, { every_steps = 1000 }]
retain = { last = 5, every_steps = 10000, best = { metric = "eval/acc", mode = "max", count = 2 } }
bandwidth_per_job = "20GB/s"
timeout = "1min 30s"
"""
)


def load(folder: Path, text: str, **environ: str) -> Config:
    file = folder / "c.toml"
    file.write_text(text)
    return load_config(file, environ)


def test_the_example_of_the_design(tmp_path: Path) -> None:
    config = load(tmp_path, EXAMPLE, USER="ann", PROJECT="p1")
    assert config.file == str(tmp_path / "c.toml")
    assert config.run is None
    assert config.settings == {"max_unsaved": 3600.0}
    host, nvme, pfs = config.tiers
    assert (host.name, host.driver, host.capacity, host.shared) == ("host", "host", Capacity(fraction=0.25), False)
    assert host.evict == EvictTable(policy="lru")
    assert (nvme.driver, nvme.path, nvme.capacity) == ("file", "/local/ann", Capacity(size_bytes=400 << 30))
    assert (nvme.survives, nvme.retain, nvme.flush) == ("reboot", RetainTable(last=3), None)
    assert (pfs.driver, pfs.path, pfs.capacity) == ("pfs", "/lustre/p1/ckpt", None)
    assert pfs.flush == [FlushRule(every_steps=100, parts=["model"]), FlushRule(every_steps=1000)]
    best = BestRule(metric="eval/acc", mode="max", count=2)
    assert pfs.retain == RetainTable(last=5, every_steps=10_000, best=best)
    assert (pfs.bandwidth, pfs.bandwidth_per_job, pfs.timeout) == (None, 20 * 10**9, 90.0)


def test_every_rule_that_there_is(tmp_path: Path) -> None:
    text = """
    on_pressure = "newest-wins"
    [[tier]]
    name = "a"
    driver = "memory"
    retain = { newer_than = "7d", every = "1h30m", tagged = true, best = [{ metric = "l", mode = "min", count = 1 }] }
    delete_grace = 0
    [[tier]]
    name = "b"
    driver = "memory"
    flush = { every = "10 min", when = "idle", backlog = "newest-wins" }
    retain = { tagged = ["release"] }
    verify_after_flush = "digest"
    delete_grace = "30 min"
    [[tier]]
    name = "c"
    driver = "memory"
    flush = "at-close"
    """
    config = load(tmp_path, text)
    a, b, c = config.tiers
    assert config.settings == {"on_pressure": "newest-wins"}
    best = [BestRule(metric="l", mode="min", count=1)]
    assert a.retain == RetainTable(newer_than=Seconds(604_800), every=Seconds(5400), tagged=True, best=best)
    assert [t.delete_grace for t in config.tiers] == [Grace(0), Grace(1800), None]
    assert b.flush == FlushRule(every=Seconds(600), when="idle", backlog="newest-wins")
    assert b.retain == RetainTable(tagged=["release"]) and b.verify_after_flush == "digest"
    assert c.flush == "at-close"


def test_times_and_run_at_the_top(tmp_path: Path) -> None:
    top = 'run = "sft"\nmax_unsaved = 1800\nblock_timeout = "500ms"\nexit_timeout = "1h30min"\n'
    config = load(tmp_path, top + '[[tier]]\nname = "m"\ndriver = "memory"\n')
    assert config.run == "sft"
    assert config.settings == {"max_unsaved": 1800.0, "block_timeout": 0.5, "exit_timeout": 5400.0}
    assert all(type(seconds) is float for seconds in config.settings.values())


def test_a_home_and_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ann")
    tiers = "".join(
        f'[[tier]]\nname = "t{i}"\ndriver = "file"\npath = "{p}"\n' for i, p in enumerate(("~/a", "b/../c"))
    )
    monkeypatch.chdir("/")
    config = load(tmp_path, tiers)
    assert [tier.path for tier in config.tiers] == ["/home/ann/a", str(tmp_path / "c")]


def test_the_process_environment_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SCRATCH", "/scratch/9")
    file = tmp_path / "c.toml"
    file.write_text('[[tier]]\nname = "d"\ndriver = "file"\npath = "$SCRATCH/x"\n')
    assert load_config(file).tiers[0].path == "/scratch/9/x"


def test_loading_makes_nothing(tmp_path: Path) -> None:
    load(tmp_path, f'[[tier]]\nname = "d"\ndriver = "file"\npath = "{tmp_path}/d"\n')
    assert [p.name for p in tmp_path.iterdir()] == ["c.toml"]


def test_a_percentage_is_of_what_the_job_may_use() -> None:
    assert Capacity(fraction=0.25).of(1000) == 250
    assert Capacity(size_bytes=7).of(1000) == 7
    assert repr(Capacity(fraction=0.25)) == "Capacity(25%)"
    assert Capacity(size_bytes=7) == Capacity(size_bytes=7) != Capacity(size_bytes=8)


def test_the_argument_comes_first_then_the_variable_then_the_site(tmp_path: Path) -> None:
    argument, variable, site = (tmp_path / name for name in ("a.toml", "v.toml", "site.toml"))
    for file in (argument, variable, site):
        file.touch()
    environ = {"STEPWELL_CONFIG": str(variable)}
    assert find_config(argument, environ, site) == argument
    assert find_config(None, environ, site) == variable
    assert find_config(None, {"STEPWELL_CONFIG": ""}, site) == site
    assert find_config(None, {}, tmp_path / "none.toml") is None


def test_a_runs_folder_is_no_config_whatever_its_name(tmp_path: Path) -> None:
    site = tmp_path / "site.toml"
    site.touch()
    (tmp_path / "run.toml").mkdir()
    assert find_config("ckpts/sft", {}, site) is None
    assert find_config(tmp_path / "run.toml", {}, site) is None


def test_a_relative_argument_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cluster.toml").touch()
    monkeypatch.chdir(tmp_path)
    assert find_config("cluster.toml", {}) == tmp_path / "cluster.toml"
