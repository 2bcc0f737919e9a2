"""When a record of objects is made, and when it is relied on; with a state that is a list, and looks that are told."""

from __future__ import annotations

from collections.abc import Callable

from stepwell.state.again import SKIPPED_MAX, Again


class Looks:
    """A list that is found while it is what is `wanted`; its record is a copy of it."""

    def __init__(self) -> None:
        self.state: list[int] = [1]
        self.wanted: list[int] = [1]
        self.told: list[str] = []
        self.can_be_studied = True
        self.meanwhile: Callable[[], None] = lambda: None  # what happens before the close look
        self.again = Again(self.study, self.glance)

    def study(self, at: list[int]) -> bytearray | None:
        self.told.append("study")
        return bytearray(at) if self.can_be_studied else None

    def glance(self, at: list[int], record: bytearray) -> str | None:
        self.told.append("glance")
        return f"glance at {at}" if bytes(at) == record else None

    def closely(self, at: list[int]) -> str | None:
        self.meanwhile()
        self.told.append("closely")
        return f"closely {at}" if at == self.wanted else None

    def look(self) -> tuple[str | None, list[str]]:
        """What is found, and how."""
        self.told = []
        return self.again.look(self.state, self.closely), self.told

    def become(self, number: int) -> None:
        self.state[:] = self.wanted[:] = [number]


STUDIED = ["study", "closely", "glance"]


def test_what_does_not_change_is_looked_at_closely_once() -> None:
    looks = Looks()
    assert looks.look() == ("closely [1]", STUDIED)
    for _ in range(5):
        assert looks.look() == ("glance at [1]", ["glance"])


def test_a_record_that_was_of_use_is_made_anew_after_a_change() -> None:
    looks = Looks()
    looks.look()
    for number in range(2, 6):
        looks.look()
        looks.become(number)
        assert looks.look() == (f"closely [{number}]", ["glance", *STUDIED])
    assert looks.look() == ("glance at [5]", ["glance"])


def test_records_that_are_of_no_use_are_made_ever_more_rarely() -> None:
    looks = Looks()
    made = []
    for number in range(400):
        looks.become(number % 7)
        made += [number] if "study" in looks.look()[1] else []
    assert made[:6] == [0, 1, 3, 7, 15, 31] and max(map(int.__sub__, made[1:], made)) == SKIPPED_MAX + 1
    while "study" not in looks.look()[1]:  # it stays as it is now
        pass
    for _ in range(3):
        assert looks.look() == (f"glance at {looks.state}", ["glance"])
    looks.become(8)
    assert looks.look() == ("closely [8]", ["glance", *STUDIED])  # a record was of use, so the next is made at once


def test_use_counts_for_one_record_only() -> None:
    looks = Looks()
    for _ in range(3):
        looks.look()
    looks.become(2)
    assert looks.look() == ("closely [2]", ["glance", *STUDIED])
    looks.become(3)
    assert looks.look() == ("closely [3]", ["glance", "closely"])


def test_one_for_a_state_that_has_become_another_goes_on_from_what_was_learnt() -> None:
    looks, made = Looks(), []
    for number in range(100):
        looks.state[:] = [number]  # which is not what was wanted
        found, told = looks.look()
        assert found is None
        made += [number] if "study" in told else []
        looks.wanted[:], looks.again = looks.state, looks.again.anew()
    assert made == [0, 1, 3, 7, 15, 31, 63]
    for _ in range(SKIPPED_MAX + 1):
        looks.look()
    assert looks.look() == ("glance at [99]", ["glance"])


def test_what_a_close_look_does_not_find_is_not_recorded() -> None:
    looks = Looks()
    looks.state[:] = [2]
    for how in (["study", "closely"], ["study", "closely"], ["closely"]):
        assert looks.look() == (None, how)
    looks.become(1)
    assert looks.look() == ("closely [1]", STUDIED)
    assert looks.look() == ("glance at [1]", ["glance"])


def test_a_record_does_not_outlive_a_glance_that_failed() -> None:
    looks = Looks()
    looks.look()
    looks.look()
    looks.state[:] = [2]
    assert looks.look()[0] is None
    looks.state[:] = [1]  # as recorded, but what else happened is not known
    assert looks.look() == ("closely [1]", STUDIED)


def test_what_changes_between_study_and_close_look_is_not_recorded() -> None:
    looks = Looks()
    looks.meanwhile = lambda: looks.become(2)
    assert looks.look() == ("closely [2]", STUDIED)
    looks.meanwhile = lambda: None
    assert looks.look() == ("closely [2]", STUDIED)
    assert looks.look() == ("glance at [2]", ["glance"])


def test_what_cannot_be_studied_is_looked_at_closely() -> None:
    looks = Looks()
    looks.can_be_studied = False
    for _ in range(3):
        assert looks.look() == ("closely [1]", ["study", "closely"])
    looks.can_be_studied = True
    looks.look()
    assert looks.look() == ("glance at [1]", ["glance"])


def test_nothing_can_be_what_is_found() -> None:
    told: list[str] = []
    again = Again[str, bytes](lambda at: bytearray(), lambda at, record: b"")
    for _ in range(3):
        assert again.look("", lambda at: told.append(at) or b"") == b""  # type: ignore[func-returns-value]
    assert told == [""]
