"""Processes that use one arena, and are killed, stopped and followed by others: what is served is right, or is not."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stepwell.tiers import _shm
from tests.core.moving import MIB
from tests.neighbours.nearby import OnDisk, on_disk

ROOT = Path(__file__).parents[2]
SIZE = 64 * MIB + 77


class Process:
    """One that shares the arena; see `tests.neighbours.process`."""

    def __init__(self, memory: Path, shard: OnDisk, mode: str, mib: int, silent_s: float) -> None:
        command = [sys.executable, "-m", "tests.neighbours.process", memory, shard.root, mode, mib, silent_s]
        self._popen = subprocess.Popen(
            [str(each) for each in command], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.pid = self._popen.pid

    def ready(self) -> Process:
        self.first = self.answer()
        return self

    def order(self, line: str) -> None:
        assert self._popen.stdin is not None
        self._popen.stdin.write(line + "\n")
        self._popen.stdin.flush()

    def answer(self) -> dict[str, Any]:
        assert self._popen.stdout is not None
        line = self._popen.stdout.readline()
        assert line, "it has died"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, line: str) -> dict[str, Any]:
        self.order(line)
        return self.answer()

    def load(self) -> dict[str, Any]:
        return self.ask("load")

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def end(self, *, kill: bool = False) -> None:
        if kill:
            self._popen.kill()
        elif self._popen.poll() is None:
            self.order("quit")
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):  # what it had not read
                pipe.close()


class Processes:
    """All of one test; none is left behind."""

    def __init__(self, memory: Path, shard: OnDisk) -> None:
        self.memory, self.shard = memory, shard
        self._all: list[Process] = []

    def start(self, mode: str = "r", mib: int = 96, silent_s: float = 60.0) -> Process:
        """silent_s: on a busy machine an owner may be silent for long without any fault."""
        self._all.append(Process(self.memory, self.shard, mode, mib, silent_s))
        return self._all[-1].ready()

    def end(self) -> None:
        for each in self._all:
            each.end(kill=True)


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> OnDisk:
    made = on_disk(tmp_path_factory.mktemp("neighbours") / "disk", SIZE)
    (made.root / "expected").write_bytes(made.data)
    return made


@pytest.fixture
def processes(shard: OnDisk) -> Iterator[Processes]:
    memory = Path(tempfile.mkdtemp(prefix="stepwell-test-", dir="/dev/shm"))
    made = Processes(memory, shard)
    yield made
    made.end()
    shutil.rmtree(memory)


def test_two_processes_that_load_at_once_read_every_byte_once(processes: Processes) -> None:
    one, other = processes.start(), processes.start()
    assert one.first["owned"] and not other.first["owned"]
    one.order("load")
    other.order("load")
    first, second = one.answer(), other.answer()
    assert first["good"] and second["good"]
    assert first["took"]["disk"] + second["took"].get("disk", 0) == SIZE
    assert first["disk_bytes"] + second["disk_bytes"] <= 1.02 * SIZE
    assert other.load()["took"] == one.load()["took"] == {"host": SIZE}


@pytest.mark.slow
def test_owners_killed_at_any_moment_serve_no_wrong_byte_and_the_next_one_goes_on(processes: Processes) -> None:
    chosen = random.Random(0)
    owner, client = processes.start(), processes.start()
    for _ in range(8):
        client.order("load")
        owner.order("load")
        time.sleep(chosen.uniform(0.0, 0.3))
        owner.end(kill=True)
        owner = processes.start()
        assert owner.first["owned"]
        assert client.answer()["good"]
    assert client.load()["good"] and owner.load()["good"]
    until = time.monotonic() + 30
    while not client.ask("linked")["linked"]:  # one that has just not answered is asked again a moment later, by a load
        assert time.monotonic() < until and client.load()["good"]
    client.end()
    owner.end()
    [left] = _shm.arenas(processes.memory)
    assert not left.alive
    assert _shm.remove(left.folder) > 0 and not os.listdir(_shm.user_folder(processes.memory))


@pytest.mark.slow
def test_clients_killed_at_any_moment_leave_every_slot_to_the_owner(processes: Processes) -> None:
    chosen = random.Random(1)
    owner = processes.start(mib=24)
    for _ in range(6):
        client = processes.start()
        client.order("load")
        time.sleep(chosen.uniform(0.0, 0.3))
        client.end(kill=True)
        until = time.monotonic() + 30
        while owner.ask("used")["used"]:
            assert time.monotonic() < until
    assert owner.load()["good"]


def test_a_client_killed_while_it_holds_slots_leaves_them_to_the_owner(processes: Processes) -> None:
    owner = processes.start(mib=16)
    client = processes.start()
    assert client.ask("hold 3") == {"held": 3}
    client.end(kill=True)
    assert owner.load()["good"]  # more than the arena holds: no slot may be lost
    other = processes.start()
    assert other.ask("hold 3") == {"held": 3}


def test_a_stopped_owner_holds_up_nobody(processes: Processes) -> None:
    owner, client = processes.start(), processes.start(silent_s=1.0)
    assert client.ask("hold 2") == {"held": 2}
    owner.signal(signal.SIGSTOP)
    began = time.monotonic()
    assert client.load()["good"]
    assert time.monotonic() - began < 60
    owner.signal(signal.SIGCONT)
    assert owner.load()["good"]


def test_a_stopped_client_holds_up_nobody(processes: Processes) -> None:
    owner, client, other = processes.start(mib=24), processes.start(), processes.start()
    assert client.ask("hold 3") == {"held": 3}
    client.signal(signal.SIGSTOP)
    owner.order("load")
    other.order("load")
    assert owner.answer()["good"] and other.answer()["good"]
    client.signal(signal.SIGCONT)
    assert client.load()["good"]


def test_a_reader_hands_its_arena_over_to_a_writer_and_uses_it_as_others_do(processes: Processes) -> None:
    reader = processes.start()
    assert reader.load()["took"]["disk"] == SIZE
    writer = processes.start("w")
    assert writer.first["owned"]
    assert writer.load()["took"] == {"host": SIZE}  # what the reader had brought is still there
    assert reader.load()["good"]
    second = processes.start("w")
    assert not second.first["owned"] and second.load()["took"] == {"host": SIZE}


def test_a_forked_child_of_a_dead_owner_holds_nothing(processes: Processes) -> None:
    owner, client = processes.start(), processes.start()
    assert client.ask("linked") == {"linked": True}
    child = owner.ask("fork")["forked"]
    try:
        owner.end(kill=True)
        until = time.monotonic() + 30
        while client.ask("linked")["linked"]:  # nobody asks for anything: only the connection's end can tell
            assert time.monotonic() < until
        assert processes.start().first["owned"]
    finally:
        os.kill(child, signal.SIGKILL)
