"""The ring's protocol as a small machine: every interleaving, with a crash at every step.

C = 3 slots, writes of 1 or 2 rows, each row in two halves, so that a half-overwritten row can be seen.
A dead writer is replaced by a new one that starts from what is in memory. The reader draws one row.
The state space is searched completely; three natural mistakes must be found.
"""

from typing import NamedTuple

import pytest

CAPACITY, MAX_BATCH, MAX_ROWS, MAX_CRASHES = 3, 2, 7, 2
IDLE, DATA, PUBLISH = 0, 1, 2
DONE = 99


class State(NamedTuple):
    slots: tuple  # per slot (first half, second half): logical index, or -1
    reserved: int
    committed: int
    step: int  # of the writer
    count: int  # rows of the write under way
    half: int  # halves of it written so far
    crashes: int
    reader: int  # program counter
    reserved_0: int
    committed_0: int
    drawn: int
    first: int


def writer_moves(state, protocol):
    if state.step == IDLE:
        for count in range(1, MAX_BATCH + 1):
            end = state.committed + count
            if end <= MAX_ROWS:
                intent = state.reserved if protocol == "intent after data" else max(state.reserved, end)
                yield state._replace(step=DATA, count=count, half=0, reserved=intent)
    elif state.step == DATA:
        logical = state.committed + state.half // 2
        slots = list(state.slots)
        pair = list(slots[logical % CAPACITY])
        pair[state.half % 2] = logical
        slots[logical % CAPACITY] = tuple(pair)
        half = state.half + 1
        yield state._replace(slots=tuple(slots), half=half, step=PUBLISH if half == 2 * state.count else DATA)
    else:
        end = state.committed + state.count
        if protocol == "intent after data" and state.reserved < end:
            yield state._replace(reserved=end)
        else:
            yield state._replace(committed=end, step=IDLE, count=0, half=0)
    if state.crashes < MAX_CRASHES:
        reserved = state.committed if protocol == "reserved reset at takeover" else state.reserved
        yield state._replace(step=IDLE, count=0, half=0, crashes=state.crashes + 1, reserved=reserved)


def reader_moves(state):
    if state.reader == 0:
        yield state._replace(reader=1, reserved_0=state.reserved)
    elif state.reader == 1:
        yield state._replace(reader=2, committed_0=state.committed)
    elif state.reader == 2:
        for drawn in range(max(0, state.reserved_0 - CAPACITY), state.committed_0):
            yield state._replace(reader=3, drawn=drawn)
    elif state.reader == 3:
        yield state._replace(reader=4, first=state.slots[state.drawn % CAPACITY][0])
    elif state.reader == 4:
        second = state.slots[state.drawn % CAPACITY][1]
        whole = state.first == second == state.drawn
        yield state._replace(reader=5, first=int(whole))


def accepted(state, protocol):
    bound = state.committed if protocol == "validating against committed" else state.reserved
    return state.drawn >= bound - CAPACITY


def search(protocol):
    """Returns (states visited, bad reads accepted, good reads accepted)."""
    start = State(((-1, -1),) * CAPACITY, 0, 0, IDLE, 0, 0, 0, 0, 0, 0, 0, 0)
    seen, todo, bad, good = {start}, [start], 0, 0
    while todo:
        state = todo.pop()
        if state.reader == 5:
            if accepted(state, protocol):
                bad, good = bad + (not state.first), good + state.first
            following = list(writer_moves(state, protocol))
        else:
            following = [*writer_moves(state, protocol), *reader_moves(state)]
        for new in following:
            if new not in seen:
                seen.add(new)
                todo.append(new)
    return len(seen), bad, good


def test_no_interleaving_and_no_crash_lets_a_bad_row_through():
    states, bad, good = search("as built")
    assert states > 5_000
    assert good > 0
    assert bad == 0


@pytest.mark.parametrize("mutant", ["reserved reset at takeover", "intent after data", "validating against committed"])
def test_the_search_finds_each_natural_mistake(mutant):
    _, bad, _ = search(mutant)
    assert bad > 0
