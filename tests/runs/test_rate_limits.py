"""The band of samples per insert, kept in real runs: within 5 % on either side."""

from harness import BATCH_SIZE, FAULT, PENDULUM, Run

MIN_INSERTS = 500
"""From here on a batch or a turn more or less is below the 5 %."""


def _inserts_since_learning_began(numbers):
    ratio = numbers.get("samples_per_insert")
    return numbers["updates"] * BATCH_SIZE / ratio if ratio else 0


def _held_in_band(run, bound, waiting):
    """Until samples per insert are at the bound and somebody waits for it; then the end of the run."""

    def held():
        numbers = run.numbers()
        within = 0.95 * bound <= numbers.get("samples_per_insert", 0.0) <= 1.05 * bound
        return within and numbers.get(waiting, 0.0) > 0.3 and _inserts_since_learning_began(numbers) > MIN_INSERTS

    run.wait_for(held, what=f"{bound} samples per insert, {waiting} above 0.3")
    code, document = run.stop()
    assert code == 0
    return document


def test_minimum_throttles_fast_samplers(tmp_path):
    with Run(tmp_path, *PENDULUM, "--samples-per-insert", "16:100000", "--no-evaluator") as run:
        document = _held_in_band(run, 16, "sampler_wait_share")
    assert document["samples_per_insert"] >= 16 * 0.95, "however fast samplers are"


def test_maximum_throttles_a_fast_learner(tmp_path):
    # 5 ms a step, one environment after the other: 200 env steps/s, 25 updates/s of batch 32.
    with Run(tmp_path, *FAULT, "--samples-per-insert", "0.5:4", "--no-evaluator", faults={"step_s": 0.005}) as run:
        document = _held_in_band(run, 4, "learner_wait_share")
    assert document["samples_per_insert"] <= 4 * 1.05, "however fast the learner is"
