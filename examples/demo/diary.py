"""What a training process writes down while it runs, for whoever watches it: JSON lines, there even if it is killed."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any

from stepwell import CheckpointStore, Save

LOOK_S = 0.1  # between two looks at the store


class Diary:
    """A thread of its own notes, ten times a second, how far the store's saves and tiers are."""

    def __init__(self, path: Path, store: CheckpointStore) -> None:
        self._file = path.open("a", buffering=1)  # line by line
        self._store = store
        self._saves: list[tuple[Save, int]] = []  # with the number of tiers that it was on at the last look
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._look_again, name="diary")

    def __enter__(self) -> Diary:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ended.set()
        self._thread.join()
        self._file.close()

    def note(self, **record: Any) -> None:
        with self._lock:
            self._file.write(json.dumps(record) + "\n")

    def follow(self, save: Save) -> None:
        """Notes from now on what becomes of it."""
        with self._lock:
            self._saves.append((save, -1))

    def wait_until_all_is_flushed(self) -> None:
        """Returns once the last tier has everything; what was moved until then is noted. Raises SaveFailed."""
        with self._lock:
            saves = [save for save, _ in self._saves]
        for save in saves:
            save.wait(self._store.tiers[-1].info.name)
        while self._store.status().tiers[-1].backlog:  # what earlier processes left
            time.sleep(LOOK_S)
        self._look()

    def _look_again(self) -> None:
        while not self._ended.wait(LOOK_S):
            self._look()

    def _look(self) -> None:
        with self._lock:
            followed, self._saves = self._saves, []
        for save, known in followed:
            report = save.report()
            if len(report.tier_seconds) != known:
                self.note(kind="save", **asdict(report))
            with self._lock:
                self._saves.append((save, len(report.tier_seconds)))
        status = self._store.status()
        tiers = {tier.name: {"step": tier.newest_step, "to_go": tier.backlog_bytes} for tier in status.tiers}
        edges = [[edge.source, edge.target, edge.moved_bytes] for edge in status.edges]
        self.note(kind="status", at=time.monotonic(), tiers=tiers, edges=edges)
