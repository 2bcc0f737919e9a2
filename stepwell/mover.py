"""The mover: chunks between the state, slots of the host arena and tiers.

Everything here runs on the one event loop and only decides: bytes are copied, checksummed, written and
read by native threads. Each direction between two tiers is an edge with a queue, a bound and a limit of its
own (`stepwell.edges`), so a slow tier delays only what goes there. A chunk's operation is a task of its own
that is never cancelled, because its memory belongs to the kernel until the operation has ended; whoever gives
up stops feeding and leaves the tasks that run to finish.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from stepwell.edges import VERIFY, Turn
from stepwell.errors import CorruptData, StepwellError
from stepwell.groups import Group
from stepwell.putting import Putting, write
from stepwell.ranges import Read
from stepwell.reading import Crcs, Healing, Reading
from stepwell.tiers.base import ChunkIO, ShardKey, Tier
from stepwell.tiers.host import Priority, Slot


class Mover(Putting):
    """Moves chunks with one copier engine and the slots of one arena.

    host: the tier whose arena it is, if checkpoints are kept there; else the arena is only for staging.
    """

    async def settled(self, keys: Iterable[ShardKey]) -> None:
        """Returns once no chunk of these shards is on its way: then their files may be closed."""
        await self._tasks.settled(keys)

    # -- between tiers ---------------------------------------------------------------------

    async def copy(
        self, reading: Reading, target: Tier, size: int, *, resumed: bool = False,
        on_there: Callable[[int], None] = lambda size_bytes: None,
    ) -> None:  # fmt: skip
        """One shard to another tier, verified on the way. The target has reserved it; `reading.target` names it.

        resumed: its file was begun by an earlier try; chunks that are good there are not written again.
        on_there: is told of bytes that have got there, or that were there already.
        """

        async def move(read: Read, address: int) -> None:
            await write(target, ChunkIO(reading.key, read.start, read.length, address))
            on_there(read.length)

        reads = self.all_of(size)
        if resumed and reading.crcs is not None:
            reads = await self._missing(reading, target, reads)
            on_there(size - sum(read.length for read in reads))
        await self.get(reading, reads, move)

    async def _missing(self, reading: Reading, target: Tier, reads: Sequence[Read]) -> list[Read]:
        """Those of `reads` whose bytes are not good on the target yet."""
        check = Reading(reading.key, [target], reading.crcs, Healing(), reading.priority, target=VERIFY)
        edge = self._edge(target.info.name, VERIFY, reading.priority)
        missing: set[int] = set()

        async def one(read: Read, slot: Slot, turn: Turn) -> None:
            try:
                await self._get_read(check, read, slot, turn, None)
            except CorruptData:
                missing.add(read.start)

        group = Group(self._tasks)
        for read in reads:
            try:
                turn = await edge.enter(read.length, reading.priority)
                slot = await self._slot(turn, reading.priority)
            except StepwellError as error:
                group.fail(error)
                break
            group.start(reading.key, one(read, slot, turn))
        await group.end()
        return [read for read in reads if read.start in missing]

    async def verify(self, sources: Sequence[Tier], key: ShardKey, size: int, crcs: Crcs, *, first: int = 0) -> None:
        """Raises CorruptData unless every block, from byte `first` on, is good on one of these tiers at least."""
        chunks = [read for read in self.all_of(size) if read.start + read.length > first]
        reads = [Read(start, read.start + read.length - start) for read in chunks for start in [max(read.start, first)]]
        memory = self.host in sources  # else a good chunk in memory would hide a bad one on the tier
        reading = Reading(key, sources, crcs, Healing(), Priority.FLUSH, target=VERIFY, from_memory=memory)
        await self.get(reading, reads)
