"""All of these start cold and are slow, but for the few in ``UNMARKED``; long forms print at once, captured or not."""

from pathlib import Path

import pytest
from figures import line
from sources import UNMARKED


def pytest_collection_modifyitems(items):
    """Marks the tests of this folder."""
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.cold)
            if item.name not in UNMARKED:
                item.add_marker(pytest.mark.slow)


@pytest.fixture
def say(capsys):
    """Prints a line of progress."""

    def tell(text):
        with capsys.disabled():
            print(text, flush=True)

    return tell


@pytest.fixture
def report(say, request):
    """Prints rows, and returns them by their metrics."""

    def tell(rows):
        say("\n".join(["", request.node.name, *map(line, rows)]))
        return {row["metric"]: row for row in rows}

    return tell
