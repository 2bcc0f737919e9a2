"""From a config file to drivers and policies; with tiers that are started and written to where it matters."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from stepwell.building import Built, Node, build
from stepwell.config import load_config
from stepwell.errors import ConfigError
from stepwell.policies.base import Policy
from stepwell.policies.flush import FlushNewest, FlushRule
from stepwell.policies.retain import Best, Retain
from stepwell.settings import TierOptions
from stepwell.tiers.base import RecordKey
from stepwell.tiers.file import FileTier
from stepwell.tiers.host import HostTier
from stepwell.tiers.memory import MemoryTier
from stepwell.tiers.pfs import PfsTier
from stepwell.tiers.shared import SharedHostTier

NODE = Node(local_ranks=4, limit_bytes=1 << 30)


def built(folder: Path, text: str, **more: object) -> Built:
    file = folder / "c.toml"
    file.write_text(text)
    arguments: dict[str, object] = {"run": "sft", "node": NODE, "environ": {}, **more}
    return build(load_config(file, {}), **arguments)  # type: ignore[arg-type]  # some by name, for short tests


def tier(name: str, driver: str, *lines: str) -> str:
    return "\n".join(["[[tier]]", f'name = "{name}"', f'driver = "{driver}"', *lines, ""])


def told(policies: Sequence[Policy]) -> list[str]:
    return [repr(policy) for policy in policies]


def test_a_whole_chain(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    chain = built(
        tmp_path,
        'max_unsaved = "1h"\n'
        + tier("host", "host", 'capacity = "25%"')
        + tier("nvme", "file", f'path = "{tmp_path}/nvme"', 'capacity = "1GiB"', "retain = { last = 3 }")
        + tier(
            "pfs", "pfs", f'path = "{tmp_path}/pfs"', "retain = { last = 5 }", 'bandwidth = "20GB/s"', "timeout = 9"
        ),
    )
    host, nvme, pfs = chain.tiers
    assert isinstance(host, HostTier) and isinstance(nvme, FileTier) and isinstance(pfs, PfsTier)
    assert [t.info.name for t in chain.tiers] == ["host", "nvme", "pfs"]
    assert host.info.capacity_bytes == (1 << 30) // 4 // 4
    assert nvme.info.capacity_bytes == 1 << 30
    assert nvme.info.survives == "reboot" and pfs.info.survives == "node-loss"
    assert pfs.info.write_bytes_per_s == 20e9 / 4
    whole, keep = [*told([FlushNewest("pfs"), FlushRule("pfs")])], told([Retain("nvme", last=3), Retain("pfs", last=5)])
    assert told(chain.policies) == whole + keep
    assert chain.options == {"nvme": TierOptions(), "pfs": TierOptions()}
    assert chain.settings == {"max_unsaved": 3600.0}
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.toml", "pfs"]  # nothing was started


def test_a_host_tier_without_a_capacity_grows(tmp_path: Path) -> None:
    host = built(tmp_path, tier("host", "host") + tier("m", "memory")).tiers[0]
    assert isinstance(host, HostTier) and host.grows


def test_shared_memory_has_a_size_and_a_place_of_its_own(tmp_path: Path) -> None:
    text = tier("host", "host", "shared = true", 'path = "/dev/shm"') + tier("d", "file", f'path = "{tmp_path}/d"')
    arenas = set()
    for run, rank, place in (("a", 0, "d"), ("a", 0, "d"), ("a", 1, "d"), ("b", 0, "d"), ("a", 0, "e")):
        node = Node(local_ranks=4, limit_bytes=1 << 30, local_rank=rank)
        [host, _] = built(tmp_path, text.replace('/d"', f'/{place}"'), run=run, node=node).tiers
        assert isinstance(host, SharedHostTier) and not host.grows and not host.owned
        assert host.info.capacity_bytes == (1 << 30) // 4 // 4
        arenas.add(host.arena_name)
    assert len(arenas) == 4


def test_private_memory_is_shared_out_to_the_local_ranks(tmp_path: Path) -> None:
    chain = built(tmp_path, tier("host", "host", 'capacity = "256MiB"') + tier("m", "memory", 'capacity = "4MiB"'))
    assert [t.info.capacity_bytes for t in chain.tiers] == [64 << 20, 1 << 20]


def test_every_tier_below_the_first_storage_tier_gets_everything(tmp_path: Path) -> None:
    three = tier("a", "memory", 'flush = "all"') + tier("b", "memory") + tier("c", "memory")
    for text in (three, tier("host", "host") + three):
        all_of_both: list[Policy] = [FlushNewest("b"), FlushRule("b"), FlushNewest("c"), FlushRule("c")]
        assert told(built(tmp_path, text).policies) == told(all_of_both)


def test_policies_are_those_of_the_rules(tmp_path: Path) -> None:
    a = tier("a", "memory", 'retain = { every = "1d", newer_than = "7d", tagged = true }')
    b = tier(
        "b",
        "memory",
        'flush = [{ every_steps = 100, parts = ["model"] }, { every = "1h", when = "idle" }, '
        '{ backlog = "newest-wins" }]',
    )
    c = tier("c", "memory", 'flush = "at-close"', 'retain = { tagged = ["best"] }')
    best = '[{ metric = "acc", mode = "max", count = 2 }, { metric = "loss", mode = "min", count = 1 }]'
    d = tier("d", "memory", "flush = { every_steps = 9 }", f"retain = {{ every_steps = 50, last = 2, best = {best} }}")
    assert told(built(tmp_path, a + b + c + d).policies) == told(
        [
            FlushRule("b", every_s=3600, idle=True),  # whole checkpoints before parts, else as they are written
            FlushRule("b", newest_wins=True),
            FlushRule("b", every_steps=100, parts=["model"]),
            FlushNewest("c"),
            FlushNewest("d"),  # of the last tier, whatever its rules
            FlushRule("d", every_steps=9),
            Retain("a", every_s=86400, newer_than_s=7 * 86400, tagged=True),
            Retain("c", tagged=["best"]),
            Retain("d", last=2, every_steps=50, best=[Best("acc", "max", 2), Best("loss", "min", 1)]),
        ]
    )


def test_options_of_the_tiers(tmp_path: Path) -> None:
    chain = built(
        tmp_path,
        'on_pressure = "skip"\n'
        + tier("host", "host")
        + tier("a", "memory", "delete_grace = 0")
        + tier("b", "memory", 'delete_grace = "30 min"', 'verify_after_flush = "size"'),
    )
    assert chain.options == {
        "a": TierOptions(delete_grace_s=0.0),
        "b": TierOptions(delete_grace_s=1800.0, verify_after_flush="size"),
    }
    assert chain.settings == {"on_pressure": "skip"}


@pytest.mark.parametrize(
    ("lines", "world", "each"),
    [
        (['bandwidth_per_job = "32GB/s"'], 16, 2e9),
        (['bandwidth_per_job = "32GB/s"'], None, 8e9),  # one node: its four ranks are all
        (['bandwidth = "20GB/s"', 'bandwidth_per_job = "32GB/s"'], 16, 2e9),
        (['bandwidth = "4GB/s"', 'bandwidth_per_job = "32GB/s"'], 16, 1e9),
        ([], 16, None),
    ],
)
def test_each_rank_gets_its_share_of_the_bandwidth(
    tmp_path: Path, lines: list[str], world: int | None, each: float | None
) -> None:
    (tmp_path / "pfs").mkdir()
    node = Node(local_ranks=4, limit_bytes=1 << 30, world=world)
    [pfs] = built(tmp_path, tier("p", "pfs", f'path = "{tmp_path}/pfs"', *lines), node=node).tiers
    assert pfs.info.write_bytes_per_s == each


def test_readers_get_tiers_that_write_nothing_and_no_policies(tmp_path: Path) -> None:
    (tmp_path / "pfs").mkdir()
    chain = built(
        tmp_path,
        tier("d", "file", f'path = "{tmp_path}"', "retain = { last = 1 }")
        + tier("p", "pfs", f'path = "{tmp_path}/pfs"'),
        mode="r",
    )
    assert all(t.info.read_only for t in chain.tiers)
    assert chain.policies == []


def test_the_run_is_the_arguments_the_variables_or_the_files(tmp_path: Path) -> None:
    text = 'run = "file"\n' + tier("m", "memory")
    environ = {"STEPWELL_RUN": "variable"}
    assert built(tmp_path, text, run="argument", environ=environ).run == "argument"
    assert built(tmp_path, text, run=None, environ=environ).run == "variable"
    assert built(tmp_path, text, run=None).run == "file"
    with pytest.raises(ConfigError, match="cannot name a run"):
        built(tmp_path, text, run=None, environ={"STEPWELL_RUN": "a/b"})


def test_the_tiers_work(tmp_path: Path) -> None:
    async def put() -> bytes | None:
        (disk,) = built(tmp_path, tier("d", "file", f'path = "{tmp_path}/d"', 'survives = "process"')).tiers
        await disk.start()
        try:
            assert disk.info.survives == "process"
            assert await disk.commit(RecordKey("sft", "run.json"), b"{}")
            return await disk.fetch(RecordKey("sft", "run.json"))
        finally:
            await disk.close()

    assert asyncio.run(put()) == b"{}"
    assert (tmp_path / "d" / "sft" / "run.json").read_bytes() == b"{}"


# -- other people's drivers and policies -------------------------------------------------

THEIR_CODE = """\
from stepwell.tiers.memory import MemoryTier

class Tape(MemoryTier):
    def __init__(self, *, name, read_only, path, capacity_bytes=None, survives="reboot"):
        super().__init__(name, capacity_bytes, survives=survives)
        self.path, self.read_only = path, read_only

class Cloud(MemoryTier):
    def __init__(self, *, name, read_only):
        super().__init__(name, scope="shared", survives="node-loss")

def lost(**_):
    return "not a tier"

class Weekly:
    def __init__(self, *, tier, parts=(), day="monday"):
        self.said = f"{tier} {day} {parts}"
    def __repr__(self):
        return self.said
    def decide(self, event, view):
        return []
"""


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A package with drivers and policies, as pip would leave it."""
    site = tmp_path / "site"
    metadata = site / "their_drivers-1.0.dist-info"
    metadata.mkdir(parents=True)
    (site / "their_drivers.py").write_text(THEIR_CODE)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: their-drivers\nVersion: 1.0\n")
    points = [
        "[stepwell.tiers]",
        "tape = their_drivers:Tape",
        "cloud = their_drivers:Cloud",
        "lost = their_drivers:lost",
        "gone = nowhere:X",
        "[stepwell.policies]",
        "weekly = their_drivers:Weekly",
        "lost = their_drivers:lost",
    ]
    (metadata / "entry_points.txt").write_text("\n".join([*points, ""]))
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.delitem(sys.modules, "their_drivers", raising=False)


@pytest.mark.usefixtures("installed")
def test_policies_from_entry_points(tmp_path: Path) -> None:
    rules = 'flush = [{ policy = "weekly", parts = ["model"] }, { every_steps = 5 }]'
    text = tier("m", "memory", 'retain = { policy = "weekly" }') + tier("n", "memory", rules)
    own = told([FlushNewest("n"), FlushRule("n", every_steps=5)])
    assert told(built(tmp_path, text).policies) == [own[0], "n monday ['model']", own[1], "m monday ()"]
    one = tier("m", "memory") + tier("n", "memory", 'flush = { policy = "weekly", day = "friday" }')
    assert told(built(tmp_path, one).policies) == [own[0], "n friday ()"]


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("line", "key", "says"),
    [
        ('retain = { policy = "weekley" }', "retain.policy", "no policy 'weekley'.*Did you mean 'weekly'"),
        ('flush = [{}, { policy = "zzz" }]', "flush[1].policy", "no policy 'zzz'.*There are"),
        ('flush = { policy = "weekly", dya = 1 }', "flush", "cannot be made.*'dya'.*keys that it takes"),
        ('flush = [{ policy = "weekly", dya = 1 }]', "flush[0]", "cannot be made.*'dya'.*keys that it takes"),
        ('retain = { policy = "lost" }', "retain", "'lost' has no decide.*as str shows.*base.Policy"),
    ],
)
def test_what_can_be_wrong_with_a_policy(tmp_path: Path, line: str, key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        built(tmp_path, tier("m", "memory") + tier("n", "memory", line))
    assert caught.value.where == {"file": str(tmp_path / "c.toml"), "key": f"tier[1].{key}", "tier": "n"}


@pytest.mark.usefixtures("installed")
def test_a_driver_from_an_entry_point(tmp_path: Path) -> None:
    lines = ('path = "/dev/st0"', 'capacity = "1TB"', 'survives = "node-loss"', "retain = { last = 2 }")
    chain = built(tmp_path, tier("m", "memory") + tier("archive", "tape", *lines))
    tape = chain.tiers[1]
    assert isinstance(tape, MemoryTier) and type(tape).__name__ == "Tape"
    assert (tape.info.name, tape.info.capacity_bytes, tape.info.survives) == ("archive", 10**12, "node-loss")
    assert vars(tape)["path"] == "/dev/st0" and vars(tape)["read_only"] is False
    assert told(chain.policies) == told([FlushNewest("archive"), FlushRule("archive"), Retain("archive", last=2)])


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("text", "key", "says"),
    [
        (tier("x", "tape"), "tier[0].driver", "cannot be made.*'path'.*keys that it takes"),
        (tier("x", "cloud", 'path = "/x"'), "tier[0].driver", "cannot be made.*unexpected keyword.*'path'"),
        (tier("x", "gone"), "tier[0].driver", "cannot be made.*nowhere"),
        (tier("x", "lost"), "tier[0].driver", "'lost' is no tier, but str.*stepwell.tiers.base.Tier"),
        (tier("x", "cloud") + tier("m", "memory"), "tier[1]", "'m' is of one node.*before 'x'"),
        (tier("x", "tapes"), "tier[0].driver", "no driver 'tapes'.*Did you mean 'tape'"),
        (tier("x", "tape", 'evict = "lru"'), "tier[0].evict", "tape driver has no 'evict'.*take it: gpu, host"),
    ],
)
def test_what_can_be_wrong_with_it(tmp_path: Path, text: str, key: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says) as caught:
        built(tmp_path, text)
    assert caught.value.where["key"] == key
    assert caught.value.where["file"] == str(tmp_path / "c.toml")
    assert caught.value.where["tier"] == ("m" if key == "tier[1]" else "x")
