"""The plan for many hosts: the simulated flow keeps to what costs and networks allow, and its unit costs are real."""

import math

import numpy as np
import pytest

from spreeze.bench import cluster_plan
from spreeze.bench.__main__ import build_parser
from spreeze.bench.cluster_plan import Costs, Design, NetworkPath, designs, full_at, gossip_updates, simulate
from spreeze.transport.gloo_gossip import MemberStore
from spreeze.types import RowLayout

COSTS = Costs(row_bytes=208, chunk_s=2e-5, row_s=2.5e-7, weights_bytes=6e5, message_s=2e-3, message_bytes=6e5,
              linked=0.6, packed=0.45, unpack_row_s=7e-7)  # fmt: skip
AS_IT_IS = Design(name="as it is")


@pytest.fixture(scope="module", autouse=True)
def _first_store():
    """The library under the stores keeps one pipe for the life of the process, from the first store on."""
    MemberStore().close()


def path(delay_s=0.0, mbit=1e6, driver_mbit=1e6, loss=0.0):
    return NetworkPath(name="", delay_s=delay_s, driver_bytes_per_s=driver_mbit * 125_000.0,
                       host_up_bytes_per_s=mbit * 125_000.0, host_down_bytes_per_s=mbit * 125_000.0, loss=loss)


@pytest.mark.parametrize("hosts", [1, 7, 64])
@pytest.mark.parametrize("delay_s", [0.0, 0.05])
def test_where_nothing_is_full_all_rows_arrive_and_are_as_old_as_their_way(hosts, delay_s):
    flow = simulate(hosts, 5000.0, COSTS, path(delay_s), AS_IT_IS)
    assert flow.rows_per_s == pytest.approx(5000.0 * hosts, rel=0.01)
    assert flow.row_age_s == pytest.approx(cluster_plan.LINGER_S / 2.0 + delay_s, rel=0.3)
    assert flow.weights_age_s >= 0.05 + delay_s


def test_no_more_rows_arrive_than_the_core_the_network_and_the_hosts_connections_take():
    slow = COSTS.__class__(**{**vars(COSTS), "row_s": 1e-4})
    assert simulate(8, 5000.0, slow, path(), AS_IT_IS).rows_per_s == pytest.approx(1e4, rel=0.05)
    assert simulate(8, 5000.0, slow, path(), AS_IT_IS).core_share == pytest.approx(1.0, abs=0.01)
    for full in (path(driver_mbit=10.0), path(mbit=1.25)):
        flow = simulate(8, 5000.0, COSTS, full, AS_IT_IS, seconds=1000.0)
        assert flow.rows_per_s == pytest.approx(1.25e6 / 208, rel=0.1)
        assert flow.row_age_s > 1.0, "rows wait in full buffers"


def test_a_long_way_with_loss_limits_each_connection():
    lossy = path(0.05, loss=0.01)
    assert lossy.connection_bytes_per_s == pytest.approx(176_656)
    flow = simulate(4, 5000.0, COSTS, lossy, AS_IT_IS, seconds=1000.0)
    assert flow.rows_per_s == pytest.approx(4 * 176_656 / 208, rel=0.1)
    small = simulate(4, 5000.0, COSTS, lossy, Design(name="", most_chunk_bytes=1 << 18))
    assert small.row_age_s < flow.row_age_s / 3.0, "less waits where chunks are small"


def test_smaller_rows_help_a_full_network_and_a_tree_helps_the_weights():
    full = path(driver_mbit=250.0)
    plain, linked, packed, tree, _ = (simulate(64, 5000.0, COSTS, full, design) for design in designs(COSTS))
    assert linked.rows_per_s > 1.3 * plain.rows_per_s
    assert packed.rows_per_s >= linked.rows_per_s
    assert tree.weights_age_s < plain.weights_age_s / 3.0


def test_the_driver_is_full_at_as_many_hosts_as_the_costs_say():
    found = full_at(5000.0, COSTS, path(driver_mbit=1000.0), 10.0)
    assert found["driver_network_in"] == pytest.approx(125e6 / (5000 * 208))
    assert found["driver_network_out"] == pytest.approx(125e6 / 6e6)
    assert found["driver_core"] == pytest.approx(1.0 / (5000 * 2.5e-7 + 10 * 2e-5))


def test_learners_mix_less_often_the_longer_a_message_takes():
    assert gossip_updates(COSTS, path(), 100.0) == 1.0
    assert gossip_updates(COSTS, path(0.05), 100.0) == pytest.approx(10.2, abs=0.1)
    assert gossip_updates(COSTS, path(0.05, mbit=48.0), 100.0) == pytest.approx(20.2, abs=0.1)


def test_linked_and_packed_rows_are_restored_to_the_bit():
    layout, rng = RowLayout(3, 1), np.random.default_rng(0)
    obs = rng.normal(size=(402, 3)).astype(np.float32)
    rows = np.zeros((400, layout.width), np.float32)
    rows[:, layout.obs], rows[:, layout.next_obs] = obs[:400], obs[2:]  # two environments in turn
    rows[100, layout.next_obs] = 7.0  # an episode ends
    linked, packed, unpack_s = cluster_plan._compressed(layout, rows, 2, 1)
    assert linked == pytest.approx((400 * 6 + 3 * 3) / (400 * 9))
    assert packed < linked
    assert unpack_s[0] > 0.0


def test_unit_costs_are_measured_and_the_picture_is_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(cluster_plan, "_ROWS", 2000)
    monkeypatch.setattr(cluster_plan, "_SIMULATED_S", 2.0)
    monkeypatch.setattr(cluster_plan, "HOSTS", (1, 2))
    out = tmp_path / "plan.png"
    args = build_parser().parse_args(["cluster-plan", "--env", "Pendulum-v1", "--repeats", "1", "--out", str(out)])
    rows = cluster_plan.cluster_plan_rows(args, lambda text: None)
    found = {row["metric"]: row["value"] for row in rows}
    assert found["row"] == 4 * 9
    assert found["driver_for_a_million_rows"] > 0.0
    assert found["gossip_message_both_sides"] > 0.0
    assert all(not isinstance(value, float) or math.isfinite(value) for value in found.values())
    assert out.read_bytes().startswith(b"\x89PNG")
