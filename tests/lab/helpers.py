"""Configs and speeds that the lab's tests share: numbers that are easy to reckon with."""

from __future__ import annotations

from pathlib import Path

from stepwell.config import Config, load_config
from stepwell.lab import Speed, Speeds

GB = 10**9
CHUNK = 8 << 20
HOST = '[[tier]]\nname = "host"\ndriver = "host"\ncapacity = "8GiB"\n'
NVME = '[[tier]]\nname = "nvme"\ndriver = "file"\npath = "nvme"\n'
PFS = '[[tier]]\nname = "pfs"\ndriver = "pfs"\npath = "pfs"\n'
SPEEDS = Speeds(8 * GB, {"nvme": Speed(2 * GB, 4 * GB), "pfs": Speed(GB / 2, GB)})
MEMORY = 64 << 30


def config(folder: Path, *tiers: str, head: str = "", name: str = "config.toml") -> Config:
    file = folder / name
    file.write_text(head + "\n".join(tiers))
    return load_config(file)
