from hypothesis import given
from hypothesis import strategies as st

from stepwell.format.names import Attempt
from stepwell.format.records import Rewind
from stepwell.timeline import abandoned, add_rewind, by_step, current, merged


def attempt(step: int, epoch: int, call: int) -> Attempt:
    return Attempt(epoch=epoch, call=call, step=step)


def test_newest_is_the_highest_step_by_number() -> None:
    found = [attempt(9900, 1, 1), attempt(10000, 1, 2), attempt(10100, 1, 3), attempt(800, 1, 4)]
    assert [a.step for a in current(found, [])] == [10100, 10000, 9900, 800]


def test_a_rewind_abandons_what_came_before_it_and_lies_above() -> None:
    old = [attempt(100, 1, 1), attempt(200, 1, 2), attempt(300, 1, 3)]
    new = attempt(150, 2, 1)
    rewinds = [Rewind(100, 2, 1)]
    assert current([*old, new], rewinds) == [new, old[0]]
    assert abandoned(old[1], rewinds) and not abandoned(old[0], rewinds)


def test_of_two_attempts_at_a_step_the_current_one_comes_first() -> None:
    old, new = attempt(200, 1, 2), attempt(200, 2, 1)
    assert by_step([old, new], 200, [Rewind(100, 2, 1)]) == [new, old]
    assert by_step([old, new], 300, []) == []


def test_a_new_run_in_an_old_folder_keeps_its_saves() -> None:
    # case C5: steps 500..700 of an earlier run, then a rewind to 50 and saves at 100, 200
    found = [attempt(50, 1, 1), attempt(500, 1, 2), attempt(700, 1, 3), attempt(100, 2, 1), attempt(200, 2, 2)]
    assert [a.step for a in current(found, [Rewind(50, 2, 1)])] == [200, 100, 50]


@given(
    st.lists(st.integers(0, 20), max_size=6), st.lists(st.tuples(st.integers(0, 30), st.integers(0, 12)), max_size=20)
)
def test_dropping_redundant_rewinds_changes_nothing(steps: list[int], places: list[tuple[int, int]]) -> None:
    everything = [Rewind(step, i + 1, 1) for i, step in enumerate(steps)]
    kept: list[Rewind] = []
    for rewind in everything:
        kept = add_rewind(kept, rewind)
    for step, epoch in places:
        one = attempt(step, epoch, 0)
        assert abandoned(one, kept) == abandoned(one, everything)


def test_a_rewind_by_hand_joins_those_of_manifests() -> None:
    old = [attempt(100, 1, 1), attempt(200, 1, 2), attempt(300, 1, 3)]
    line = merged([Rewind(50, 1, 1)], [Rewind(200, 2, 0)])
    assert current(old, line) == [old[1], old[0]]
    assert merged(line, [Rewind(100, 3, 0)]) == [Rewind(50, 1, 1), Rewind(100, 3, 0)]
    assert merged() == []


REWINDS = st.lists(
    st.builds(Rewind, st.integers(0, 20), st.integers(1, 6), st.integers(0, 4)), max_size=8, unique_by=repr
)


@given(REWINDS, st.lists(st.tuples(st.integers(0, 25), st.integers(0, 7), st.integers(0, 5)), max_size=25), st.data())
def test_rewinds_give_one_line_wherever_and_in_whatever_order_they_are_told(
    rewinds: list[Rewind], places: list[tuple[int, int, int]], data: st.DataObject
) -> None:
    """Records, manifests that know only some of them, and pruned lists come to the same."""
    line = merged(rewinds)
    found = [attempt(*place) for place in places]
    assert [a for a in found if not abandoned(a, line)] == [a for a in found if not abandoned(a, rewinds)]
    shuffled = data.draw(st.permutations(rewinds))
    cut, again = data.draw(st.integers(0, len(rewinds))), data.draw(st.integers(0, len(rewinds)))
    assert merged(shuffled[:cut], merged(shuffled[again:]), shuffled[cut:]) == line
    assert merged(line) == line
    assert current(data.draw(st.permutations(found)), line) == current(found, merged(shuffled))


@given(REWINDS)
def test_a_later_save_with_a_rewind_of_its_own_goes_on_from_the_merged_line(rewinds: list[Rewind]) -> None:
    new = Rewind(10, 7, 1)
    assert add_rewind(merged(rewinds), new) == merged(rewinds, [new])
