"""What long forms tell reaches the terminal at once, captured or not."""

import pytest

from spreeze.bench import line


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
