"""The ring's figures, in short; by hand: ``python tests/slow/replay_rates.py``."""

from replay_rates import replay_rows


def test_no_row_is_torn_while_another_process_writes():
    rows = {row["metric"]: row for row in replay_rows(1, checked_rows=200_000)}
    assert rows["torn_rows"]["value"] == 0
