"""What simulated worlds do to their processes and places."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from tests.sim.medium import Medium
from tests.sim.weather import Weather

if TYPE_CHECKING:
    from tests.sim.world import World

NODES = ("node-a", "node-b")


class Chaos:
    """All that goes wrong in a world, drawn from its seed."""

    def __init__(self, world: World) -> None:
        self._world = world

    def happen(self) -> None:
        """Something happens, or nothing."""
        actions: list[tuple[float, Callable[[], None]]] = [
            (3.0, self._start_one),
            (3.0, self._evaluate),
            (2.0, self._kill_one),
            (0.7, self._lose_node),
            (2.5, self._pause_one),
            (1.0, self._stick),
            (0.7, self._slow),
            (0.7, self._flip),
            (0.5, self._change_weather),
            (0.1, self._lose_disk),
        ]
        [action] = self._world.rng.choices([action for _, action in actions], [weight for weight, _ in actions])
        action()

    def _start_one(self) -> None:
        if len(self._world.writers) < 2:
            self._world.spawn(self._world.training.train)

    def _evaluate(self) -> None:
        """A job that reads, mostly on another node."""
        if len(self._world.alive) == len(self._world.writers):
            job = self._world.rng.choice((self._world.evaluating.evaluate, self._world.evaluating.watch))
            self._world.spawn(job, reads_only=True)

    def _kill_one(self) -> None:
        if self._world.alive:
            self._world.kill(self._world.rng.choice(self._world.alive))

    def _lose_node(self) -> None:
        node = self._world.rng.choice(NODES)
        self._world.note("node lost", node)
        for process in self._world.alive:
            if process.node == node:
                self._world.kill(process)
        for medium in self._world.media:
            self._world.invariants.back_again |= medium.lose_node(node, self._world.rng)
        self._world.invariants.node_lost()

    def _lose_disk(self) -> None:
        if len(self._world.media) < 2:
            return
        for process in self._world.alive:
            self._world.kill(process)
        self._world.note("disk lost")
        for saved in self._world.model.saves:
            saved.acked.discard(self._world.media[0].name)
        self._world.media[0].destroy()
        self._world.invariants.node_lost()

    def _pause_one(self) -> None:
        if self._world.alive:
            process, seconds = (
                self._world.rng.choice(self._world.alive),
                self._world.rng.choice((1.0, 30.0, 65.0, 90.0, 200.0)),
            )
            self._world.note("pause", process.pid, seconds)
            process.paused_at = self._world.timeline.now + seconds
            process.loop.pause(seconds)
            if self._world.rng.random() < 0.7:
                self._start_one()  # whoever waits for the run gets it meanwhile

    def _weather(self) -> tuple[Medium, Weather]:
        return self._world.rng.choice(list(self._world.places.values()))

    def _stick(self) -> None:
        medium, weather = self._weather()
        seconds = self._world.rng.choice((1.0, 20.0, 100.0, 400.0))
        weather.stuck_until = weather.troubled_at = self._world.timeline.now + seconds
        self._world.note("stuck", medium.name, seconds)

    def _slow(self) -> None:
        medium, weather = self._weather()
        weather.slow_until = weather.troubled_at = self._world.timeline.now + self._world.rng.choice((10.0, 100.0))
        self._world.note("slow", medium.name)

    def _change_weather(self) -> None:
        medium, weather = self._weather()
        weather.trouble_rate = self._world.rng.choice((0.0, 0.02, 0.1, 0.5))
        self._world.note("weather", medium.name, weather.trouble_rate)

    def _flip(self) -> None:
        medium, _ = self._weather()
        shards = [(shard, file) for shard, file in medium.files.items() if file.blocks]
        if self._world.rng.random() < 0.7 and shards:
            shard, file = self._world.rng.choice(shards)
            block = self._world.rng.choice(sorted(file.blocks))
            self._world.note("flip", medium.name, str(shard), block)
            flip = medium.name, shard.checkpoint.attempt, shard.name, block
            self._world.invariants.flipped_at[flip] = self._world.timeline.now
            self._world.invariants.garbled.add(shard.checkpoint.attempt)
            medium.flip_block(shard, block, self._world.rng)
        records = [key for key in medium.records if key.name.endswith(("manifest.json", "rank-00000.json"))]
        if self._world.rng.random() < 0.2 and records:
            record = self._world.rng.choice(records)
            self._world.note("flip", medium.name, str(record))
            self._world.invariants.garbled.add(record.name.rpartition("/")[0])
            medium.flip_record(record, self._world.rng)
