"""The bench of a card, on a processor in small: every item, what is written, what a second start takes, the figures."""

import dataclasses
import json

import pytest
import torch
from harness import PATIENCE_S
from test_launches import PlayedGraph

from spreeze.bench import __main__ as command
from spreeze.bench import gpu, gpu_checks, gpu_rates
from spreeze.bench.gpu import GpuBench, Journal, knees, markdown, missing_device, rate_rows, take_all, targets
from spreeze.bench.gpu_checks import CHECKS, Finding, Place, answer
from spreeze.bench.gpu_rates import BATCHES, KINDS, Rate, bounds, kernels, probe, wanted
from spreeze.errors import SpreezeError, UsageError
from spreeze.machine.gpu import GpuReport
from spreeze.workers.gpu_replay import NotRecorded

CPU, CARD = Place(device="cpu", small=True), Place(device="cuda:0")
IN_A_CHILD = "out of memory in mid-run"
SLOW = "fused against eager"


class Pretended(Place):
    """A processor that the checks take for a GPU."""

    on_gpu = True


PRETENDED = Pretended(device="cpu", small=True)


@pytest.mark.parametrize("name", sorted({*CHECKS} - {IN_A_CHILD, SLOW}))
def test_each_check_runs_on_a_processor(name):
    found = answer(name, CPU)
    only_on_gpus = name in ("graph against eager", "failed capture")
    assert found.ok is (None if only_on_gpus else True), found
    assert "\n" not in found.text


def test_a_check_runs_in_a_process_of_its_own():
    found = gpu.in_child(IN_A_CHILD, CPU)
    assert found.ok, found
    assert "times halved, goes on with" in found.text


@pytest.mark.slow
def test_fused_kernels_give_the_same_parameter_change():
    found = gpu.in_child(SLOW, CPU)  # the compiler keeps processes of its own
    assert found.ok, found


def test_what_a_check_raises_or_does_not_end_in_is_its_result(monkeypatch):
    def raises(place):
        raise torch.AcceleratorError("CUDA error: an illegal memory access\nwas encountered (pretended)")

    monkeypatch.setitem(gpu_checks.CHECKS, "made up", gpu_checks.GpuCheck(raises, 1.0))
    found = answer("made up", CPU)
    assert (found.ok, "illegal memory access was encountered" in found.text) == (False, True)
    assert gpu.in_child("made up", CPU) == Finding(False, "KeyError: 'made up'")
    monkeypatch.setattr(gpu, "_CHECK_LIMIT_S", 0.01)
    assert gpu.in_child(IN_A_CHILD, CPU) == Finding(False, "not done within 0 s")


# --- what only a card has, on stand-ins ---


class Idle(PlayedGraph):
    def replay(self):
        self.replays += 1


class Refusing(PlayedGraph):
    def record(self, work, generators):
        super().record(work, generators)
        raise NotRecorded("operation not permitted when stream is capturing")


@pytest.mark.parametrize(
    ("graph", "ok", "words"),
    [(PlayedGraph, True, "tolerance 0.01), 10 cases; the host waited 0 times"),
     (Idle, False, "parameter changes differ by"),
     (Refusing, False, "sac: kernels are launched one by one: no graph could be recorded")],
)
def test_graphs_are_compared_with_single_kernels(monkeypatch, graph, ok, words):
    monkeypatch.setattr(gpu_checks, "new_graph", lambda trainer, device: graph(trainer.algorithm))
    found = answer("graph against eager", PRETENDED)
    assert (found.ok, words in found.text) == (ok, True), found


def test_a_recording_that_fails_is_right_where_updates_go_on(monkeypatch):
    class Spoils:
        def __init__(self, device):
            assert device == torch.device("cpu")

        def record(self, work, generators):
            raise NotRecorded("a wait of the host (pretended)")

    monkeypatch.setattr(gpu_checks, "CudaGraph", Spoils)
    found = answer("failed capture", PRETENDED)
    assert found.ok, found
    assert found.text.endswith("no graph could be recorded: a wait of the host (pretended)")


def test_parameter_changes_that_differ_are_wrong_and_the_worst_case_is_named(monkeypatch):
    change = gpu_checks._parameter_change

    def off(case, place, device, dtype, **options):
        return change(case, place, device, dtype, **options) * (1.2 if device == "cpu+cpu" else 1.0)

    monkeypatch.setattr(gpu_checks, "_parameter_change", off)
    found = answer("split against one device", CPU)
    assert not found.ok
    assert "parameter changes differ by 2.0e-01 relative to their length at most" in found.text


# --- speed ---


def test_rates_of_a_processor_come_from_the_tuners_probe(monkeypatch):
    for limit_s in ("spreeze.bench.gpu_rates._DEADLINE_S", "spreeze.tuner.measure._LOADING_S"):
        monkeypatch.setattr(limit_s, PATIENCE_S)
    with probe(CPU) as measure:
        found = measure(Rate("float32", 64, "eager"), 2)
        refused = [measure(Rate(precision, 64, kind), 2) for precision, kind in (
            ("float32", "graph"), ("float32", "replay on the host"), ("tf32", "eager"))]
    machine = gpu_rates.read_machine()
    small = dataclasses.replace(machine, memory=dataclasses.replace(machine.memory, usable_bytes=10**9))
    monkeypatch.setattr(gpu_rates, "read_machine", lambda: small)
    with probe(CPU) as measure:
        failed = measure(Rate("float32", 2**24, "eager"), 2)
    assert (found["verdict"], len(found["updates_per_s"])) == ("measured", 2)
    assert min(found["updates_per_s"]) > 0
    assert [one["verdict"] for one in refused] == ["not taken"] * 3
    assert "learner.precision = tf32" in refused[2]["text"]
    assert (failed["verdict"], failed["text"].partition(":")[0]) == ("wrong", "out of memory")


def test_a_card_is_timed_at_every_batch_and_kind_once():
    rates = wanted(CARD)
    assert len(rates) == len(set(rates))
    for precision in ("float32", "tf32"):
        assert [one.batch_size for one in rates if one[::2] == (precision, "graph")] == list(BATCHES)
    assert {one.kind for one in rates} == set(KINDS)
    assert {one.precision for one in rates} == {"float32", "tf32", "bfloat16"}
    assert {one.precision for one in wanted(CPU)} == {"float32", "bfloat16"}


def test_the_kernels_of_an_update_are_counted_and_again_after_more_updates():
    assert kernels(CPU) == {"eager": 147}


def test_both_bounds_are_times_of_work_of_that_size():
    few, many = (bounds(CPU, count, 2) for count in (10, 2000))
    assert min(many["launch_s"]) > max(few["launch_s"])
    assert set(few["matmul_s"]) == {"float32 64", "float32 256"}
    assert few["flop"]["256"] == pytest.approx(4 * few["flop"]["64"])


# --- results that are kept ---


def run_of(document=None):
    known = {"time_to_target_s": 7.5, "process_s": 9.0, "env_steps": 1000, "updates": 20, "eval_return_best": -150.0}
    return lambda flags, timeout_s: known | (document or {})


def bench_of(place=CPU, **changes):
    changes = {"check": lambda name, place: Finding(True, "as it should be"), "run": run_of(), **changes}
    return GpuBench(place=place, repeats=2, runs_dir="r", **changes)


@pytest.fixture
def no_children(monkeypatch):
    """Answers in place of the processes that are not the subject of a test."""
    def child(module, arguments, limit_s):
        if module == "spreeze.bench":
            best = {"metric": "score_of_pick_over_best_of_grid", "value": 0.97, "best": "batch 1024"}
            return {"rows": [best, {"metric": "tuning_s", "value": 51.0}, {"metric": "a point"}]}
        if arguments[0] == "kernels":
            return {"eager": 100, "fused": 40}
        return {"launch_s": [1e-4, 1.2e-4, 1.1e-4], "count": int(arguments[2]), "matmul_s": {}, "flop": {}}

    monkeypatch.setattr(gpu, "_child", child)


@pytest.fixture
def quick_probe(monkeypatch):
    class Probe:
        def __init__(self, place):
            pass

        def __enter__(self):
            return lambda rate, repeats: {**rate._asdict(), "verdict": "measured", "text": "fast",
                                          "updates_per_s": [5000.0 / (1 + rate.batch_size / 8192)] * repeats,
                                          "memory_bytes": 1}  # fmt: skip

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(gpu, "probe", Probe)


def test_a_second_start_takes_what_is_missing_and_what_was_wrong(tmp_path, no_children, quick_probe):
    taken, told = [], []

    def check(name, place):
        taken.append(name)
        return Finding(len(taken) != 2, "it came out otherwise" if len(taken) == 2 else "right")

    bench, identity = bench_of(check=check), {"machine": "m"}
    take_all(bench, Journal(tmp_path, identity), 1e9, command.GPU_PARTS, told.append)
    assert taken == list(CHECKS)
    assert all("\n" not in line for line in told)
    with (tmp_path / "gpu.jsonl").open("a") as file:
        file.write('{"item": "half a li')
    journal = Journal(tmp_path, identity)
    assert journal.records["tuner over its grid"]["share"] == 0.97
    take_all(bench, journal, 1e9, command.GPU_PARTS, told.append)
    assert taken[len(CHECKS) :] == [list(CHECKS)[1]]
    assert journal.records[list(CHECKS)[1]]["verdict"] == "right"
    assert Journal(tmp_path, {"machine": "another"}).records == {}
    assert Journal(tmp_path, identity, fresh=True).records == {}
    assert Journal(tmp_path, identity).records.keys() == journal.records.keys()
    assert Journal(tmp_path, identity).records[list(CHECKS)[1]]["verdict"] == "right"


def test_nothing_is_begun_without_the_time_for_it_and_parts_can_be_chosen(tmp_path, no_children, quick_probe):
    now = iter(range(10**6))
    told = []
    journal = Journal(tmp_path, {})
    take_all(bench_of(CARD), journal, 100.0, ["correctness", "learning"], told.append, clock=lambda: float(next(now)))
    assert set(journal.records) <= set(CHECKS), "no run to a return fits into the time"
    assert 0 < len(journal.records) < len(CHECKS) + 1
    assert any("time is up before 'Pendulum-v1 to -200 on cuda:0" in line for line in told)


def test_a_run_that_fails_is_a_result_and_the_others_go_on(tmp_path, no_children, quick_probe):
    def run(flags, timeout_s):
        if "Pendulum-v1" in flags:
            raise SpreezeError("exit code 1: the driver\nis gone")
        return run_of({"time_to_target_s": None})(flags, timeout_s)

    journal = Journal(tmp_path, {})
    take_all(bench_of(run=run), journal, 1e9, ["learning"], lambda text: None)
    found = {key.split(" to ")[0]: one for key, one in journal.records.items()}
    assert found["Pendulum-v1"]["verdict"] == "wrong"
    assert found["Pendulum-v1"]["text"] == "SpreezeError: exit code 1: the driver is gone"
    (walker,) = {one["text"] for name, one in found.items() if name != "Pendulum-v1"}
    assert walker == "not reached in 9 s; 1000 env steps, 20 updates, best -150"


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="name one that can be written"):
        Journal(tmp_path / "file", {})


# --- figures ---


def taken(tmp_path):
    journal = Journal(tmp_path, {})
    take_all(bench_of(CARD), journal, 1e9, command.GPU_PARTS, lambda text: None)
    return journal.records


def test_every_figure_of_a_card_stands_beside_its_target(tmp_path, no_children, quick_probe):
    records = taken(tmp_path)
    found = {one.figure: one for one in targets(records, CARD)}
    assert [one.verdict for one in found.values()] == 7 * ["measured"]
    assert found["updates/s at 256, graph"].measured.startswith("4,848 [4,848 .. 4,848], n=2 (tf32, batch 256")
    assert found["time that the tuner takes"].measured == "51 s", "not that of the grid"
    assert found["correctness list"].measured == "10 right, 0 wrong, 0 not taken"
    assert "on cpu, 2 cores: 8 s" in [*found.values()][-1].measured
    text = markdown(records, CARD, "a machine")
    assert "| updates/s at 256, graph | >= 4,000 | 4,848" in text
    assert "| 256 | tf32 | graph | 4,848 [4,848 .. 4,848] | 1,241,212 | 100 | 0.53 | - |" in text
    assert "FastTD3, about 1.0 M update frames/s; here: 1,000 updates/s, 32,768,000 update frames/s (tf32" in text
    # t(B) = (1 + B / 8192) / 5000: 85 % of the asymptotic rate needs 0.85 / 0.15 * 8192 = 46,421 rows.
    assert knees(records)["tf32, graph"] == 65_536
    assert {one["metric"] for one in rate_rows(records)} == {"updates_per_s", "update_frames_per_s",
                                                             "knee_of_the_papers_rule"}  # fmt: skip


def test_a_missed_figure_is_bold_and_what_was_not_taken_is_no_number(tmp_path, no_children, quick_probe):
    records = taken(tmp_path)
    slow = {key: {**one, "updates_per_s": [10.0, 11.0]} if key.startswith("rate") else one
            for key, one in records.items()}
    text = markdown(slow, CARD, "a machine")
    assert "| updates/s at 256, graph | >= 4,000 | **missed**: 10" in text
    assert {one.verdict for one in targets({}, CARD)} == {"not taken"}
    wrong = records | {"failed capture": {**records["failed capture"], "verdict": "wrong"}}
    (list_,) = (one for one in targets(wrong, CARD) if one.figure == "correctness list")
    assert (list_.verdict, list_.measured) == ("missed", "9 right, 1 wrong, 0 not taken")


def test_rates_of_a_stand_in_are_no_figures_of_a_card(tmp_path, no_children, quick_probe):
    found = targets(taken(tmp_path), dataclasses.replace(CARD, device="cpu"))
    assert [one.verdict for one in found][:3] == ["not taken"] * 3


# --- the command ---


@pytest.mark.parametrize(
    ("built", "gpus", "words"),
    [(None, (), "is built without CUDA, and no NVIDIA driver: gone; install a CUDA build of PyTorch on a machine with"),
     (None, ("a card",), "is built without CUDA; install a CUDA build of PyTorch, or try"),
     ("12.9", ("a card",), "PyTorch finds no GPU that it can use; see that the driver"),
     ("12.9", (), "no CUDA device: no NVIDIA driver: gone; take a machine with an NVIDIA GPU and its driver, or try")],
)
def test_without_a_card_one_line_says_what_is_missing(monkeypatch, built, gpus, words):
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu, "read_gpus", lambda: GpuReport(gpus, "no NVIDIA driver: gone"))
    said = missing_device()
    assert words in said
    assert said.endswith("try the bench itself with --device cpu")


def test_the_command_ends_with_the_code_of_a_request_that_cannot_work(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["gpu", "--results", str(tmp_path / "none")]) == 2
    shown = capsys.readouterr().err
    assert (shown.count("\n"), shown.startswith("error: no CUDA device")) == (1, True)
    assert not (tmp_path / "none").exists()


def test_the_command_writes_results_and_a_table_as_they_come(monkeypatch, capsys, tmp_path, no_children, quick_probe):
    monkeypatch.setattr(gpu, "GpuBench", lambda place, repeats, runs_dir: bench_of(place))
    code = command.main(["gpu", "--device", "cpu", "--small", "--repeats", "2", "--results", str(tmp_path), "--json"])
    document = json.loads(capsys.readouterr().out)
    assert code == 0
    assert document["rows"][5]["value"] == "10 right, 0 wrong, 0 not taken"
    assert (tmp_path / "gpu.md").read_text().startswith("`python -m spreeze.bench gpu --device cpu` on ")
    kept = {json.loads(text)["item"] for text in (tmp_path / "gpu.jsonl").read_text().splitlines()}
    assert kept >= {*CHECKS, *(rate.key for rate in wanted(CPU)), "bounds", "kernels of an update",
                    "tuner over its grid"}
