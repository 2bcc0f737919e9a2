"""The line of steps that a store's saves go on with: what the next one must be above, and what it rewinds to."""

from __future__ import annotations

from stepwell.errors import StepExists
from stepwell.saving import Save

Place = tuple[int | None, int | None]


class Line:
    """Used by one thread at a time."""

    def __init__(self, run: str) -> None:
        self._run = run
        self.newest: int | None = None  # highest step saved or found; None: not looked yet
        self.number = 0  # restores and rewinds so far
        self._rewind_to: int | None = None

    @property
    def place(self) -> Place:
        """Where it stands, for a save that may fail and leave it as it was."""
        return self.newest, self._rewind_to

    def take_back(self, saves: list[Save]) -> None:
        """Drops saves at the end of the list that have failed: the next one goes on from before them."""
        while saves and saves[-1].failed and (before := saves.pop().line_before) is not None:
            self.newest, self._rewind_to = before

    def check(self, step: int) -> int | None:
        """The step to rewind to before saving `step`, if any. Raises StepExists."""
        assert self.newest is not None
        if self._rewind_to is None:
            if step <= self.newest:
                raise StepExists(
                    f"step {step} is not above the newest checkpoint, step {self.newest}",
                    todo="restore() first, or rewind() to an older step, or save under another run name",
                    run=self._run,
                )
            return None
        if step <= self._rewind_to:
            raise StepExists(f"step {step} is not above the step that was restored, {self._rewind_to}", run=self._run)
        return self._rewind_to if self._rewind_to < self.newest else None

    def go_on(self, step: int) -> None:
        """A save of `step` has begun."""
        self.newest, self._rewind_to = step, None

    def go_back(self, step: int, newest: int, saves: list[Save]) -> None:
        """A restore of `step`, or a rewind to it: saves from before leave the line as it is now, should they fail."""
        self.number += 1
        self.newest = newest if self.newest is None else max(newest, self.newest)
        self._rewind_to = step
        for save in saves:
            save.line_before = None
