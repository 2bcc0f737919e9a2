"""`evict` in a config file: the built-in policies, and one that another package brings."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from stepwell.building import Node, build
from stepwell.config import load_config
from stepwell.errors import ConfigError
from stepwell.policies.announced import Announced
from stepwell.policies.evict import EVICTION
from stepwell.schema import Eviction
from stepwell.tiers.host import HostTier

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).with_name("example_package")

#: saves four times what fits into memory, and says who was asked, and which chunks are still there
STORE = """
import sys
import numpy, stepwell
from stepwell.building import build
from stepwell.config import load_config

built = build(load_config(sys.argv[1]), run="run")
host = built.tiers[0]
print("policy", host.arena.eviction.inner)
with stepwell.open(run="run", tiers=built.tiers, policies=built.policies) as store:
    for step in range(1, 5):
        store.save(step, {"model": {"w": numpy.full(6 << 20, step, numpy.float32)}}).wait()
    assert host.arena.evicted_bytes > 0
    left = [sorted(host.arena.chunks(shard)) for shard in host.arena.shards() if len(host.arena.chunks(shard)) > 1]
    state = {"model": {"w": numpy.zeros(6 << 20, numpy.float32)}}
    assert store.restore(state).step == 4 and (state["model"]["w"] == 4).all()
print("prefixes", all(chunks[0] == 0 for chunks in left) and len(left) >= 1)
"""


def host_of(file: Path, evict: str = "") -> HostTier:
    disk = f'[[tier]]\nname = "disk"\ndriver = "file"\npath = "{file.parent}/disk"\n'
    file.write_text(f'[[tier]]\nname = "host"\ndriver = "host"\ncapacity = "64MiB"\n{evict}\n{disk}')
    host = build(load_config(file, {}), run="run", node=Node(1, 1 << 30)).tiers[0]
    assert isinstance(host, HostTier)
    return host


def policy_of(host: HostTier) -> Announced:
    policy = host.arena.eviction
    assert isinstance(policy, Announced)
    return policy


def test_the_schema_has_the_names_of_all_built_in_policies() -> None:
    assert list(get_args(Eviction)) == list(EVICTION)


@pytest.mark.parametrize("name", EVICTION)
def test_a_word_or_a_table_names_the_policy_and_announcements_count_whichever_it_is(tmp_path: Path, name: str) -> None:
    for text in (f'evict = "{name}"', f'evict = {{ policy = "{name}" }}'):
        assert type(policy_of(host_of(tmp_path / "c.toml", text)).inner) is EVICTION[name]


def test_s3_fifo_is_the_default(tmp_path: Path) -> None:
    assert type(policy_of(host_of(tmp_path / "c.toml")).inner) is EVICTION["s3-fifo"]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example package, installed as a user would."""
    folder = tmp_path_factory.mktemp("third")
    shutil.copytree(PACKAGE, folder / "source", ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-build-isolation", "--no-deps"]
    done = subprocess.run(
        [*command, "--target", folder / "site", folder / "source"], capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    return folder / "site"


def test_another_package_s_policy_is_named_in_a_config_and_used(tmp_path: Path, site: Path) -> None:
    host_of(tmp_path / "c.toml")  # writes the file
    file = tmp_path / "c.toml"
    file.write_text(file.read_text().replace("\n\n", '\nevict = { policy = "first-chunks", count = 2 }\n', 1))
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    command = [sys.executable, "-W", "error", "-c", STORE, str(file)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    assert re.search("^policy <FirstChunks on host: 2 of each shard>$", done.stdout, re.MULTILINE)
    assert "prefixes True" in done.stdout


@pytest.mark.parametrize(
    ("evict", "key", "says"),
    [
        ('{ policy = "first-chunk" }', "evict.policy", "no policy 'first-chunk'.*Did you mean 'first-chunks'"),
        ('{ policy = "zzz" }', "evict.policy", "no policy 'zzz'.*There are s3-fifo, lru, cost-aware, .*first-chunks"),
        ('{ policy = "first-chunks", cuont = 1 }', "evict", "cannot be made.*'cuont'.*keys that it takes"),
        ('{ policy = "gone" }', "evict", "cannot be made.*nowhere.*the package that brings the policy 'gone'"),
        ('{ policy = "lost" }', "evict", r"'lost' has no entered\(\), as dict shows.*base.EvictionPolicy"),
    ],
)
def test_what_can_be_wrong_with_it(
    tmp_path: Path, site: Path, monkeypatch: pytest.MonkeyPatch, evict: str, key: str, says: str
) -> None:
    metadata = tmp_path / "more" / "more-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: more\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[stepwell.policies]\ngone = nowhere:X\nlost = builtins:dict\n")
    for folder in (site, tmp_path / "more"):
        monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(ConfigError, match=says) as caught:
        host_of(tmp_path / "c.toml", f"evict = {evict}")
    where = {"file": str(tmp_path / "c.toml"), "key": f"tier[0].{key}", "tier": "host"}
    assert caught.value.where == where
