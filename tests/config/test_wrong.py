"""Every mistake in a config file is answered with the file, the key, what is wrong and what would be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from stepwell.building import Node, build
from stepwell.config import find_config, load_config
from stepwell.errors import ConfigError
from tests.config.examples import NVME

ENVIRON = {"USER": "ann", "PROJECT": "p1", "EMPTY": ""}
NODE = Node(local_ranks=4, limit_bytes=1 << 40)

GOOD = (
    """\
max_unsaved = "1h"
block_timeout = "2min"
on_pressure = "newest-wins"

[[tier]]
name = "host"
driver = "host"
capacity = "25%"
evict = "lru"

"""
    + NVME
    + """
[[tier]]
name = "pfs"
driver = "pfs"
path = "/lustre/$PROJECT/ckpt"
flush = [{ every_steps = 100, parts = ["model"] }, { every_steps = 1000 }]
retain = { last = 5, every_steps = 10000, best = { metric = "eval/acc", mode = "max", count = 2 } }
bandwidth = "20GB/s"
bandwidth_per_job = "200GB/s"
verify_after_flush = "digest"
delete_grace = 0
timeout = "30s"
"""
)
BEST = '{ metric = "eval/acc", mode = "max", count = 2 }'

HOST_LINES = 'name = "host"\ndriver = "host"\ncapacity = "25%"\nevict = "lru"'
HOST = '[[tier]]\nname = "host"\ndriver = "host"\n'
MEMORY = '[[tier]]\nname = "m"\ndriver = "memory"\n'

#: (what to write for what, key, tier, what the message must say)
CHANGED: dict[str, tuple[str, str, str, str | None, str]] = {
    "typo at the top": ("max_unsaved", "max_unsavd", "max_unsavd", None, "no key 'max_unsavd'.*mean 'max_unsaved'"),
    "typo in a tier": ("capacity = \"4", "capasity = \"4", "tier[1].capasity", "nvme", "Did you mean 'capacity'"),
    "typo in retain": ("{ last = 3 }", "{ lsat = 3 }", "tier[1].retain.lsat", "nvme", "Did you mean 'last'"),
    "nonsense key": ('"lru"', '"lru"\nxyzzy = 1', "tier[0].xyzzy", "host", "There are name, driver, path"),
    "a tier's key at the top": ('max_unsaved = "1h"', 'capacity = "1GB"', "capacity", None, r"inside a \[\[tier\]\]"),
    "a top key in a tier": ('"lru"', '"lru"\nexit_timeout = 3', "tier[0].exit_timeout", "host", "top of the file"),
    "size of two meanings": ('"400GiB"', '"400G"', "tier[1].capacity", "nvme", "400GiB .*1024.* or 400GB"),
    "size in words": ('"400GiB"', '"lots"', "tier[1].capacity", "nvme", "'lots' is not a size.*'400GiB'"),
    "size zero": ('"400GiB"', "0", "tier[1].capacity", "nvme", "out of range.*'400GiB'"),
    "size a table": ('"400GiB"', "{ bytes = 4 }", "tier[1].capacity", "nvme", "is not a size.*'400GiB'"),
    "size a float": ('"400GiB"', "1.5", "tier[1].capacity", "nvme", "1.5 is not a size.*whole number"),
    "percentage of a disk": ('"400GiB"', '"50%"', "tier[1].capacity", "nvme", "only for gpu and host tiers.*'400GiB'"),
    "percentage over 100": ('"25%"', '"250%"', "tier[0].capacity", "host", "out of range.*'25%'"),
    "percentage of nothing": ('"25%"', '"%"', "tier[0].capacity", "host", "not a percentage.*'25%'"),
    "duration unit": ('"1h"', '"1 fortnight"', "max_unsaved", None, "unknown unit 'fortnight'.*'90s'"),
    "duration without unit": ('"2min"', '"2"', "block_timeout", None, "'2' has no unit.*'90s'"),
    "duration negative": ('"2min"', "-1", "block_timeout", None, "-1 is out of range.*'90s'"),
    "duration bool": ('"2min"', "true", "block_timeout", None, "True is not a time.*'90s'"),
    "rate without time": ('"20GB/s"', '"20GB"', "tier[2].bandwidth", "pfs", "'20GB' is not a rate.*'20GB/s'"),
    "rate in bits": ('"20GB/s"', '"20Gb/s"', "tier[2].bandwidth", "pfs", "unknown unit 'Gb'.*20GB/s"),
    "last of the wrong type": ("last = 3", 'last = "3"', "tier[1].retain.last", "nvme", "number, got text.*last = 3"),
    "last zero": ("last = 3", "last = 0", "tier[1].retain.last", "nvme", "keeps nothing.*at least 1"),
    "retain a number": ("{ last = 3 }", "3", "tier[1].retain", "nvme", "table, got whole number.*last = 3"),
    "retain empty": ("{ last = 3 }", "{}", "tier[1].retain", "nvme", "no rule.*last = 3.*without retain, all stay"),
    "survives": ('"reboot"', '"forever"', "tier[1].survives", "nvme", "'forever' cannot be chosen.*\"node-loss\""),
    "no name": ('name = "nvme"\n', "", "tier[1].name", None, "'name' is missing.*Write name"),
    "no driver": ('driver = "file"\n', "", "tier[1].driver", "nvme", "'driver' is missing.*Write driver"),
    "no path": ('path = "/local/$USER"\n', "", "tier[1].path", "nvme", "file driver needs a path.*Write path"),
    "name not a text": ('"nvme"', "7", "tier[1].name", None, "expected text, got whole number.*name = \"nvme\""),
    "name of two words": ('"nvme"', '"my disk"', "tier[1].name", "my disk", "cannot name a tier.*letters"),
    "unknown driver": ('"file"', '"flie"', "tier[1].driver", "nvme", "no driver 'flie'.*mean 'file'"),
    "far driver": ('"file"', '"zzz"', "tier[1].driver", "nvme", "no driver 'zzz'.*host, memory, file, pfs"),
    "unset variable": ("$USER", "$NOPE", "tier[1].path", "nvme", "variable NOPE is not set.*'/local/\\$NOPE'"),
    "unset in braces": ("$USER", "${NOPE}", "tier[1].path", "nvme", "variable NOPE is not set"),
    "empty variable": ("$USER", "$EMPTY", "tier[1].path", "nvme", "variable EMPTY is empty.*Set it"),
    "broken variable": ("$USER", "${USER", "tier[1].path", "nvme", "is not a path.*\\$NAME"),
    "no such home": ("/local/$USER", "~nobody-here/x", "tier[1].path", "nvme", "no home folder.*Write the path out"),
    "empty path": ('"/local/$USER"', '""', "tier[1].path", "nvme", "is not a path"),
    "two of one name": ('"pfs"\ndriver', '"nvme"\ndriver', "tier[2].name", "nvme", "two tiers are named 'nvme'"),
    "two of one place": ("/lustre/$PROJECT/ckpt", "/local/./ann/", "tier[2].path", "pfs", "same folder, /local/ann"),
    "retain on host": ('"lru"', '"lru"\nretain = { last = 1 }', "tier[0].retain", "host", "has no 'retain'.*Leave it"),
    "flush on host": ('"lru"', '"lru"\nflush = "all"', "tier[0].flush", "host", "has no 'flush'.*Leave it"),
    "path on host": ('"lru"', '"lru"\npath = "/x"', "tier[0].path", "host", "no path.*or write shared = true"),
    "evict on a disk": ('"reboot"', '"reboot"\nevict = "lru"', "tier[1].evict", "nvme", "take it: gpu, host"),
    "bandwidth on a disk": ('"reboot"', '"reboot"\nbandwidth = "1GB/s"', "tier[1].bandwidth", "nvme", "take it: pfs"),
    "pfs survives less": ('"30s"', '"30s"\nsurvives = "reboot"', "tier[2].survives", "pfs", "it is 'node-loss'"),
    "run with a slash": ('"1h"', '"1h"\nrun = "a/b"', "run", None, "'a/b' cannot name a run.*without '/'"),
    "evict: word": ('"lru"', '"fifo"', "tier[0].evict", "host", "'fifo' cannot.*s3-fifo.*or.*lru.*or.*cost-aware"),
    "evict: policy": ('"lru"', '{ policy = "lur" }', "tier[0].evict.policy", "host", "no policy 'lur'.*mean 'lru'"),
    "evict: no policy": ('"lru"', "{}", "tier[0].evict.policy", "host", "'policy' is missing.*Write policy = "),
    "evict: key": ('"lru"', '{ policy = "lru", x = 1 }', "tier[0].evict.x", "host", "no key 'x'.*There are policy"),
    "flush: typo": ("{ every_steps = 100,", "{ every_step = 100,", "tier[2].flush[0].every_step", "pfs",
                    "no key 'every_step'.*Did you mean 'every_steps'"),
    "flush: typo in a single rule": ("flush = [{ every_steps = 100, parts = [\"model\"] }, { every_steps = 1000 }]",
                                     "flush = { prats = [] }", "tier[2].flush.prats", "pfs", "Did you mean 'parts'"),
    "flush: two windows": ("every_steps = 1000", 'every_steps = 1000, every = "1h"', "tier[2].flush[1].every", "pfs",
                           "one window.*two rules"),
    "flush: no window": ("every_steps = 1000", "every_steps = 0", "tier[2].flush[1].every_steps", "pfs",
                         "every_steps = 0 is no window.*at least 1"),
    "flush: steps as text": ("every_steps = 1000", 'every_steps = "1k"', "tier[2].flush[1].every_steps", "pfs",
                             "whole number, got text.*every_steps = 100"),
    "flush: steps as a time": ("every_steps = 1000", 'every = "1k"', "tier[2].flush[1].every", "pfs",
                               "unknown unit 'k'.*'1h'"),
    "flush: no parts": ('["model"]', "[]", "tier[2].flush[0].parts", "pfs", "no part is named.*as in parts = "),
    "flush: part without a name": ('["model"]', '[""]', "tier[2].flush[0].parts", "pfs", "a part has no name.*once"),
    "flush: part twice": ('["model"]', '["model", "model"]', "tier[2].flush[0].parts", "pfs", "'model' is named twice"),
    "flush: one part as text": ('["model"]', '"model"', "tier[2].flush[0].parts", "pfs",
                                r"list, got text.*parts = \[\"model\"\]"),
    "flush: when": ("every_steps = 1000", 'when = "busy"', "tier[2].flush[1].when", "pfs",
                    "'busy' cannot be chosen.*when = \"idle\""),
    "flush: backlog": ("every_steps = 1000", 'backlog = "drop"', "tier[2].flush[1].backlog", "pfs",
                       "'drop' cannot be chosen.*\"keep-all\" or \"newest-wins\""),
    "flush: same rule twice": ("{ every_steps = 1000 }", "{}, {}", "tier[2].flush[2]", "pfs",
                               "same as rule 1.*Leave one"),
    "flush: no rules": ('[{ every_steps = 100, parts = ["model"] }, { every_steps = 1000 }]', "[]", "tier[2].flush",
                        "pfs", "no rules.*at-close"),
    "flush: word": ('[{ every_steps = 100, parts = ["model"] }, { every_steps = 1000 }]', '"idle"', "tier[2].flush",
                    "pfs", "'idle' cannot be chosen.*\"all\" or \"at-close\", or flush = "),
    "flush: number": ('[{ every_steps = 100, parts = ["model"] }, { every_steps = 1000 }]', "100", "tier[2].flush",
                      "pfs", "text or table or list, got whole number.*\"all\""),
    "flush: policy nobody has": ("{ every_steps = 1000 }", '{ policy = "xyzzy", a = 1 }', "tier[2].flush[1].policy",
                                 "pfs", "no policy 'xyzzy'"),
    "flush: policy a number": ("{ every_steps = 1000 }", "{ policy = 3 }", "tier[2].flush[1].policy",
                               "pfs", "text, got whole number.*Write policy"),
    "flush: hidden field": ("{ every_steps = 1000 }", "{ keywords = {} }", "tier[2].flush[1].keywords", "pfs",
                            "no key 'keywords'"),
    "flush: a rule for the first tier": (HOST_LINES, 'name = "m"\ndriver = "memory"\nflush = { every_steps = 9 }',
                                         "tier[0].flush", "m", "first tier: there is nothing above.*add a host tier"),
    "flush: at-close for the first tier": (HOST_LINES, 'name = "m"\ndriver = "memory"\nflush = "at-close"',
                                           "tier[0].flush", "m", "first tier: there is nothing above.*tier below"),
    "a rule's key in the tier": ('"reboot"', '"reboot"\nparts = ["model"]', "tier[1].parts", "nvme",
                                 "inside a rule, flush = { parts"),
    "a window in the tier": ('"reboot"', '"reboot"\nevery_steps = 5', "tier[1].every_steps", "nvme",
                             "inside flush = { every_steps = … } or retain = { every_steps"),
    "retain's key in the tier": ('"reboot"', '"reboot"\nlast = 5', "tier[1].last", "nvme",
                                 "inside retain = { last"),
    "retain: no window": ("every_steps = 10000", "every_steps = -1", "tier[2].retain.every_steps", "pfs",
                          "every_steps = -1 is no window.*at least 1"),
    "retain: window of time": ("every_steps = 10000", "every = 0", "tier[2].retain.every", "pfs", "0 is out of range"),
    "retain: newer than": ("every_steps = 10000", 'newer_than = "a week"', "tier[2].retain.newer_than", "pfs",
                           "'a week' is not a time.*'1h'"),
    "retain: best of nothing": ('"eval/acc"', '""', "tier[2].retain.best.metric", "pfs", "no name.*metric = "),
    "retain: best without mode": (', mode = "max"', "", "tier[2].retain.best.mode", "pfs",
                                  "'mode' is missing.*mode = \"min\" or \"max\""),
    "retain: best of mode": ('"max"', '"most"', "tier[2].retain.best.mode", "pfs", "'most' cannot.*\"min\" or"),
    "retain: none of the best": ("count = 2", "count = 0", "tier[2].retain.best.count", "pfs",
                                 "count = 0 keeps nothing.*at least 1"),
    "retain: typo in best": ("count = 2", "cuont = 2", "tier[2].retain.best.cuont", "pfs", "Did you mean 'count'"),
    "retain: best a text": (BEST, '"eval/acc"', "tier[2].retain.best", "pfs", "got text.*best = { metric"),
    "retain: best empty": (BEST, "[]", "tier[2].retain.best", "pfs", "best has no rule.*name a metric"),
    "retain: best twice": (BEST, f"[{BEST}, {BEST}]", "tier[2].retain.best[1]", "pfs",
                           "two rules for the max of 'eval/acc'.*Leave out"),
    "retain: no tag": ("every_steps = 10000", "tagged = []", "tier[2].retain.tagged", "pfs",
                       "no tag is named.*tagged = true"),
    "retain: not tagged": ("every_steps = 10000", "tagged = false", "tier[2].retain.tagged", "pfs", "no tag.*true"),
    "retain: empty tag": ("every_steps = 10000", 'tagged = [""]', "tier[2].retain.tagged", "pfs", "an empty tag.*true"),
    "retain: tag as text": ("every_steps = 10000", 'tagged = "x"', "tier[2].retain.tagged", "pfs",
                            "list, got text.*for any tag"),
    "retain: policy nobody has": ("{ last = 3 }", '{ policy = "xyzzy" }', "tier[1].retain.policy", "nvme",
                                  "no policy 'xyzzy'.*(own keys|There are)"),
    "verify at the top": ('"1h"', '"1h"\nverify_after_flush = "size"', "verify_after_flush", None,
                          r"no key 'verify_after_flush'.*inside a \[\[tier\]\]"),
    "verify of another kind": ('"digest"', '"sha256"', "tier[2].verify_after_flush", "pfs",
                               "'sha256' cannot be chosen.*\"size\" or \"digest\""),
    "verify where nothing is flushed": ('"reboot"', '"reboot"\nverify_after_flush = "size"',
                                        "tier[1].verify_after_flush", "nvme", "nothing is flushed to it.*tier below"),
    "grace negative": ("delete_grace = 0", "delete_grace = -1", "tier[2].delete_grace", "pfs", "-1 is out of range"),
    "grace of a host": ('"lru"', '"lru"\ndelete_grace = 0', "tier[0].delete_grace", "host",
                        "host driver has no 'delete_grace'.*take it: memory, file, pfs"),
    "pressure in a tier": ('"lru"', '"lru"\non_pressure = "skip"', "tier[0].on_pressure", "host", "top of the file"),
    "pressure of another kind": ('"newest-wins"', '"drop"', "on_pressure", None,
                                 "'drop' cannot be chosen.*\"block\" or \"skip\" or \"newest-wins\""),
    "per job on a disk": ('"reboot"', '"reboot"\nbandwidth_per_job = "1GB/s"', "tier[1].bandwidth_per_job", "nvme",
                          "take it: pfs"),
    "per job without a time": ('"200GB/s"', '"200GB"', "tier[2].bandwidth_per_job", "pfs", "'200GB' is not a rate"),
}  # fmt: skip

#: whole files: (text, key, tier, what the message must say)
WHOLE: dict[str, tuple[str, str, str | None, str]] = {
    "empty": ("", "tier", None, r"'tier' is missing.*Begin a tier with \[\[tier\]\]"),
    "single brackets": ('[tier]\nname = "x"\ndriver = "file"\n', "tier", None, r"list, got table.*\[\[tier\]\]"),
    "tiers as texts": ('tier = ["nvme"]\n', "tier[0]", None, r"table, got text.*\[\[tier\]\]"),
    "no tiers": ("tier = []\n", "tier", None, "no storage tier.*driver = \"file\""),
    "only memory of the host": (HOST, "tier", None, "no storage tier.*driver = \"file\""),
    "host below": (MEMORY + HOST, "tier[1]", "host", "host tier is not the nearest.*Move it up"),
    "two hosts": (HOST + HOST.replace('name = "host"', 'name = "h2"') + MEMORY, "tier[1]", "h2", "Move it up"),
    "node below shared": (
        '[[tier]]\nname = "p"\ndriver = "pfs"\npath = "/l"\n' + MEMORY, "tier[1]", "m", "of one node.*before 'p'",
    ),
    "memory outlives": (MEMORY + 'survives = "reboot"\n', "tier[0].survives", "m", "not survive 'reboot'.*'process'"),
}  # fmt: skip


def refusal(file: Path, text: str, says: str) -> ConfigError:
    file.write_text(text)
    with pytest.raises(ConfigError, match=says) as caught:
        load_config(file, ENVIRON)
    assert str(file) in str(caught.value)
    assert caught.value.todo, "no remedy"
    return caught.value


@pytest.mark.parametrize("case", CHANGED)
def test_one_mistake_in_a_good_file(case: str, tmp_path: Path) -> None:
    right, wrong, key, tier, says = CHANGED[case]
    assert right in GOOD
    error = refusal(tmp_path / "c.toml", GOOD.replace(right, wrong, 1), says)
    assert (error.where.get("key"), error.where.get("tier")) == (key, tier)
    assert f"key {key}" in str(error)


@pytest.mark.parametrize("case", WHOLE)
def test_a_file_that_is_wrong_as_a_whole(case: str, tmp_path: Path) -> None:
    text, key, tier, says = WHOLE[case]
    error = refusal(tmp_path / "c.toml", text, says)
    assert (error.where.get("key"), error.where.get("tier")) == (key, tier)


def test_the_good_file_is_good(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(GOOD)
    assert [tier.name for tier in load_config(file, ENVIRON).tiers] == ["host", "nvme", "pfs"]


def test_a_syntax_error_names_its_line(tmp_path: Path) -> None:
    refusal(tmp_path / "c.toml", GOOD.replace('"/local/$USER"', "/local/ann"), "not valid TOML.*line 14")


def test_what_is_no_text_is_said_to_be_none(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match=f"not a text file in UTF-8.*{file}.*Give a TOML file"):
        load_config(file)


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=f"No such file.*{tmp_path}/none.toml.*Mend its path"):
        load_config(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="Is a directory"):
        load_config(tmp_path)


def test_a_named_file_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such config file.*gone.toml.*Mend the path"):
        find_config(tmp_path / "gone.toml")
    with pytest.raises(ConfigError, match="STEPWELL_CONFIG names.*gone.toml.*unset it"):
        find_config(None, {"STEPWELL_CONFIG": str(tmp_path / "gone.toml")})


def test_no_run(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(MEMORY)
    with pytest.raises(ConfigError, match=f"nothing says which run.*{file}.*run='my-run'.*STEPWELL_RUN"):
        build(load_config(file), node=NODE, environ={})


def test_more_host_memory_than_there_is(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(HOST + 'capacity = "2TiB"\n' + MEMORY)
    with pytest.raises(ConfigError, match=r"2.00 TiB are more than the 1.00 TiB.*tier\[0\].capacity.*'25%'") as caught:
        build(load_config(file), run="r", node=NODE)
    assert caught.value.where == {"file": str(file), "key": "tier[0].capacity", "tier": "host"}


def test_less_host_memory_than_a_rank_needs(tmp_path: Path) -> None:
    file = tmp_path / "c.toml"
    file.write_text(HOST + 'capacity = "64MiB"\n' + MEMORY)
    says = r"16.0 MiB for each of 4 local ranks are too little.*tier\[0\].capacity.*at least (\d+ MiB)"
    with pytest.raises(ConfigError, match=says) as caught:
        build(load_config(file), run="r", node=NODE)
    least = caught.value.todo.removeprefix("Write at least ")
    file.write_text(HOST + f'capacity = "{least}"\n' + MEMORY)
    assert build(load_config(file), run="r", node=NODE).tiers
