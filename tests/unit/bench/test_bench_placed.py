"""The bench of the whole learner on a device or a split: its figures, and how waits of the host are counted."""

import warnings

import pytest
import torch
from learner_rates import HostWaits, learner_rows


@pytest.mark.parametrize(("device", "crossed"), [("cpu", 0), ("cpu+cpu", 4 * (8 * (3 * 6 + 1) + 1))])
def test_figures_of_a_batch_size_are_consistent_and_a_split_tells_what_crosses(device, crossed):
    rows = learner_rows([8], 2, device, repeat_s=0.05)
    found = {row["metric"]: row for row in rows}
    assert found["crossed_bytes_per_update"]["value"] == crossed
    assert found["host_waits_per_update"]["value"] == 0
    assert len(found["updates_per_s"]["repeats"]) == 2
    assert found["update_frames_per_s"]["value"] == pytest.approx(8 * found["updates_per_s"]["value"])
    shares = [found[f"learner_{part}_share"]["value"] for part in ("gather", "critic", "actor")]
    assert sum(shares) == pytest.approx(1.0)


def test_waits_of_the_host_for_a_gpu_are_counted_by_torchs_own_warnings(monkeypatch):
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    with HostWaits("cuda:0") as waits:
        for text in (
            "called a synchronizing CUDA operation",
            "something else",
            "called a synchronizing CUDA operation",
            "Synchronization debug mode is a prototype and does not detect all synchronizing operations",
        ):
            warnings.warn(text, stacklevel=1)
    assert waits.count == 2
    assert modes == ["warn", "default"]


def test_on_the_processor_nothing_waits_and_nothing_is_switched(monkeypatch):
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: pytest.fail("switched"))
    with HostWaits("cpu") as waits:
        torch.zeros(2).sum().item()
    assert waits.count == 0
