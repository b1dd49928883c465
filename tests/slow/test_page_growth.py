"""The Live page open in a real browser for a long time beside a run: what it costs, and whether anything grows (Linux).

By hand: ``SPREEZE_LONG_TESTS=1 SPREEZE_STRESS_MINUTES=60 SPREEZE_STRESS_ENV=Walker2DBulletEnv-v0 pytest
tests/slow/test_page_growth.py``. The short forms are in ``tests/page/test_page_cost.py``.
"""

import dashboard_browser as page
import pytest
from long_form import asked, by_hand
from watched_page import visit, watched_rows

MINUTES, ENV = asked("MINUTES", 60.0), asked("ENV", "Walker2DBulletEnv-v0")


@by_hand
@pytest.mark.timeout(60.0 * MINUTES + 600.0)
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.skipif(page.missing() is not None, reason=str(page.missing()))
def test_a_page_that_stays_open_does_not_grow(tmp_path, report):
    with page.living_run(None, ENV, str(tmp_path / "runs")) as run, visit(run) as seen:
        rows = report(watched_rows(seen, 60.0 * MINUTES))
    assert rows["requests_hidden_in_10_s"]["value"] == 0
    assert rows["connections"]["value"] <= 3
    assert max(rows["data_age_worst"]["repeats"]) < 6
    for name in ("dom_nodes", "listeners"):
        grown = rows[f"{name}_slope"]["last"] / rows[f"{name}_slope"]["first"]
        assert grown < 1.5, name
