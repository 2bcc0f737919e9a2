"""Every error that stepwell raises: one tree, split by what the caller can do next.

An error says what happened, where (run, step, rank, tier, key, path) and what to do. Foreign errors
are translated once, at the edge where they come in (`stepwell.tiers.base.tier_error` for the operating
system's).
"""

from __future__ import annotations

from collections.abc import Sequence


class StepwellError(Exception):
    """Base of all of stepwell's errors.

    what: one sentence on what went wrong. todo: what the reader can do about it. where: run, step,
    rank, tier, key, path and so on; shown in the message and kept as the attribute `where`.
    retry: whether the same call may work later, because a tier did not answer or could not be read.
    """

    retry = False

    def __init__(self, what: str, *, todo: str = "", **where: object) -> None:
        self.what = what
        self.todo = todo
        self.where = {name: value for name, value in where.items() if value is not None}
        super().__init__(self._message())

    def _message(self) -> str:
        place = ", ".join(f"{name} {value}" for name, value in self.where.items())
        return self.what + (f" ({place})" if place else "") + (f". {self.todo}" if self.todo else "")

    def __reduce__(self) -> tuple[object, ...]:  # keyword arguments do not survive the default pickling
        return (_rebuild, (type(self), self.__dict__.copy(), self.args))


def _rebuild(cls: type[StepwellError], attributes: dict[str, object], args: tuple[object, ...]) -> StepwellError:
    error = cls.__new__(cls, *args)
    error.args = args
    error.__dict__.update(attributes)
    return error


class ConfigError(StepwellError, ValueError):
    """An argument or a config file is wrong: correct it."""


class StateError(StepwellError, ValueError):
    """The state holds something that cannot be saved; `where["key"]` names it. No file was made."""


class KeyMismatch(StepwellError, ValueError):
    """State and checkpoint do not fit. Carries every difference at once; the target is untouched."""

    def __init__(
        self,
        what: str,
        *,
        missing: Sequence[str] = (),
        unexpected: Sequence[str] = (),
        mismatched: Sequence[str] = (),
        todo: str = "",
        **where: object,
    ) -> None:
        self.missing = list(missing)
        self.unexpected = list(unexpected)
        self.mismatched = list(mismatched)
        super().__init__(what, todo=todo, **where)


class PickleRefused(StepwellError):
    """The value can only be loaded by unpickling, which may run code: pass allow_pickle=True if you trust it."""


class WorldChanged(StepwellError):
    """Values saved per rank cannot be restored at another world size; `keys` lists them."""

    def __init__(self, what: str, *, keys: Sequence[str] = (), todo: str = "", **where: object) -> None:
        self.keys = list(keys)
        super().__init__(what, todo=todo, **where)


class FormatError(StepwellError, ValueError):
    """A file is not what its name says, or comes from a newer stepwell; `where["path"]` names it."""


class CorruptData(StepwellError):
    """Stored bytes are not those that were saved, and no tier holds a good copy."""


class TierError(StepwellError, OSError):
    """A tier could not do what was asked. `errno` is set where the operating system gave one."""


class TierFull(TierError):
    """No room (or quota) on the tier. Nothing that was there is lost; saving goes on when there is room."""


class TierUnavailable(TierError):
    """A tier does not answer, is not mounted, or is not the one it was."""

    retry = True


class CheckpointNotFound(StepwellError, LookupError):
    """No such run, step or reference."""


class CheckpointGone(CheckpointNotFound):
    """The checkpoint was deleted while it was being read."""


class NoGoodCheckpoint(CheckpointNotFound):
    """Checkpoints exist, but none can be used; `reasons` maps each step to why not."""

    def __init__(self, what: str, *, reasons: dict[int, str] | None = None, todo: str = "", **where: object) -> None:
        self.reasons = dict(reasons or {})
        super().__init__(what, todo=todo, **where)


class RunBusy(StepwellError):
    """Another live writer owns the run: the message names user, host, pid and job."""


class StepExists(StepwellError, ValueError):
    """Saving at or below an existing step without having restored or rewound."""


class SaveFailed(StepwellError):
    """This save did not become durable; the cause is chained."""


class SaveSkipped(SaveFailed):
    """This checkpoint was given up so that training need not wait (`on_pressure = "skip"`)."""


class NotPlanned(StepwellError):
    """No policy sends this checkpoint to the tier that was waited for."""


class WaitTimeout(StepwellError, TimeoutError):
    """The time given to a wait has passed; the work goes on."""


class StoreClosed(StepwellError):
    """The store was closed, or that of a rank that is needed; or it belongs to the parent of this forked process."""
