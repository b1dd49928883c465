"""The circular buffer's protocol as a small machine: every interleaving, with a crash at every step.

N = 2 or 3 slots, rollouts of one step, which has two halves, so that a half-overwritten rollout can be seen. A dead
writer is replaced by a new one that starts from what is in memory, and so is a dead reader. The state space is
searched completely; natural mistakes must be found.
"""

from typing import NamedTuple

import pytest

MAX_STEPS, MAX_CRASHES = 6, 2
LOOK, COUNT, FIRST, SECOND, CHECK = range(5)


class State(NamedTuple):
    slots: tuple  # per slot (first half, second half): number of the rollout, or -1
    steps: int
    half: int  # halves of the step under way
    uses: tuple  # per slot: (rollout, uses) as counted in memory
    given: tuple  # rollout -> times that a reader used it
    crashes: int
    reader: int
    rollout: int
    first: int


def writer_moves(state):
    slots = len(state.slots)
    if state.half < 2 and state.steps < MAX_STEPS:
        pair = list(state.slots[state.steps % slots])
        pair[state.half] = state.steps
        changed = list(state.slots)
        changed[state.steps % slots] = tuple(pair)
        yield state._replace(slots=tuple(changed), half=state.half + 1)
    elif state.half == 2:
        yield state._replace(half=0, steps=state.steps + 1)
    if state.crashes < MAX_CRASHES and state.half:
        yield state._replace(half=0, crashes=state.crashes + 1)


def usable(state, rollout, uses_allowed, mutant):
    slots = len(state.slots)
    late = mutant == "one step too late"
    of, uses = state.uses[rollout % slots]
    used = uses if of == rollout or mutant == "uses of the slot" else 0
    return rollout < state.steps < rollout + slots + late and used < uses_allowed


def reader_moves(state, uses_allowed, mutant):
    """Ends with the moves after CHECK, from which it starts again: yields (state, whether something bad was given)."""
    slots, rollout = len(state.slots), state.rollout
    if state.reader == LOOK:
        for one in range(max(0, state.steps - slots), state.steps):
            if usable(state, one, uses_allowed, mutant):
                yield state._replace(reader=COUNT, rollout=one), False
    elif state.reader == COUNT:
        yield (state if mutant == "counted after the copy" else counted(state))._replace(reader=FIRST), False
    elif state.reader == FIRST:
        yield state._replace(reader=SECOND, first=state.slots[rollout % slots][0]), False
    elif state.reader == SECOND:
        whole = state.first == state.slots[rollout % slots][1] == rollout
        yield state._replace(reader=CHECK, first=int(whole)), False
    else:
        late = mutant == "one step too late"
        start = state._replace(reader=LOOK, rollout=0, first=0)
        if mutant == "no second look" or state.steps < rollout + slots + late:
            given = list(state.given)
            given[rollout] += 1
            bad = not state.first or given[rollout] > uses_allowed
            after = start._replace(given=tuple(given))
            if mutant == "counted after the copy":
                yield after, bad  # killed here
                after = counted(state)._replace(reader=LOOK, rollout=0, first=0, given=tuple(given))
            yield after, bad
        else:
            yield start, False
    if state.crashes < MAX_CRASHES and state.reader != LOOK:
        yield state._replace(reader=LOOK, rollout=0, first=0, crashes=state.crashes + 1), False


def counted(state):
    slots = list(state.uses)
    of, uses = slots[state.rollout % len(slots)]
    slots[state.rollout % len(slots)] = (state.rollout, uses + 1 if of == state.rollout else 1)
    return state._replace(uses=tuple(slots))


def search(slots, uses_allowed, mutant=None):
    """Returns (states visited, bad rollouts given, most uses of a good one)."""
    start = State(((-1, -1),) * slots, 0, 0, ((-1, 0),) * slots, (0,) * MAX_STEPS, 0, LOOK, 0, 0)
    seen, todo, bad, most = {start}, [start], 0, 0
    while todo:
        state = todo.pop()
        following = [(new, False) for new in writer_moves(state)] + list(reader_moves(state, uses_allowed, mutant))
        for new, is_bad in following:
            bad += is_bad
            most = max(most, *new.given)
            if new not in seen and not is_bad:
                seen.add(new)
                todo.append(new)
    return len(seen), bad, most


@pytest.mark.parametrize(("slots", "uses"), [(2, 1), (2, 2), (3, 1)])
def test_no_interleaving_and_no_crash_gives_a_torn_rollout_or_one_too_often(slots, uses):
    states, bad, most = search(slots, uses)
    assert states > 1_000
    assert bad == 0
    assert most == uses


MISTAKES = ("one step too late", "no second look", "counted after the copy")


@pytest.mark.parametrize("mutant", MISTAKES)
def test_the_search_finds_each_natural_mistake(mutant):
    _, bad, _ = search(2, 1, mutant)
    assert bad > 0


def test_uses_that_were_not_told_apart_by_rollout_would_leave_good_ones_unused():
    assert search(2, 1, "uses of the slot")[0] < search(2, 1)[0]
