"""Plans are looked for by signal handlers, too, while the thread that they interrupt looks for one."""

from __future__ import annotations

import dataclasses

import torch

from stepwell.state import PlanCache, capture
from stepwell.state.alias import NO_ALIASES
from stepwell.state.structure import Structure


class Interrupted(Structure):
    """A save comes in between whenever it is compared."""

    cache: PlanCache
    found: list[Structure]

    def __eq__(self, other: object) -> bool:
        assert isinstance(other, Structure)
        self.found.append(self.cache.plan(self.cache.known(other), NO_ALIASES).structure)
        return super().__eq__(other)

    __hash__ = None  # type: ignore[assignment]  # as of any structure


def test_a_plan_is_looked_for_while_another_one_is() -> None:
    plans = PlanCache()
    made = capture({"w": torch.zeros(3)}, plans=plans).plan
    fields = {field.name: getattr(made.structure, field.name) for field in dataclasses.fields(Structure)}
    asked = Interrupted(**fields)
    asked.__dict__.update(cache=plans, found=[])
    plans.known(asked)
    assert [id(structure) for structure in asked.found] == [id(made.structure)]
    assert capture({"w": torch.ones(3)}, plans=plans).plan is made


def test_what_differs_in_anything_gets_a_plan_of_its_own() -> None:
    plans = PlanCache()
    base = torch.zeros(4, 6)
    states = [
        {"w": base, "v": torch.zeros(4, 6)},
        {"w": base, "v": base},
        {"w": base, "v": base.view(24)},
        {"w": base, "v": base[1:]},
        {"w": base, "v": base[:, 1:]},
        {"w": base, "v": base.T},
        {"w": base.half(), "v": torch.zeros(4, 6)},
        {"w": base, "v": torch.nn.Parameter(torch.zeros(4, 6))},
        {"w": base, "v": torch.zeros(4, 6, requires_grad=True)},
        {"w": base, "v": torch.zeros(6, 4).T},
    ]
    assert len(states) > 8  # more than are kept
    for _ in range(2):
        skeletons = [capture(state, plans=plans).encoded_skeleton() for state in states]
        assert skeletons == [capture(state).encoded_skeleton() for state in states]
        assert len(set(skeletons)) == len(states)
