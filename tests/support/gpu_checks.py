"""Checks of what has to be right on a card before its speed counts, which ``test_gpu_checks.py`` makes.

They run at full size on a GPU, and small on a processor, so that a check is known to work before there is a card.

*Parameter change*: what so many updates add to all networks. Two changes that should be one are compared by the length
of their difference over their own length: parameters that are equal because nothing moved them are found out so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import torch
from harness import PATIENCE_S
from learner_rates import HostWaits
from rings import checked_rows, torn_rows
from torch import Tensor
from whole_runs import train

from spreeze.algorithms import create
from spreeze.algorithms.off_policy import DeviceSplit, OffPolicyAlgorithm
from spreeze.algorithms.parallel_work import TwoStreams
from spreeze.cli.bench import synthetic_spec
from spreeze.config.algorithm_bases import AlgorithmConfig
from spreeze.config.layers import Layer, resolve
from spreeze.config.schema import SECTIONS, LearnerConfig
from spreeze.envs.probe import probe_env
from spreeze.errors import SpreezeError
from spreeze.formatting import size
from spreeze.machine.hardware import read_machine
from spreeze.metrics.store import MetricsReader
from spreeze.modes.replay_modes import ReplayData
from spreeze.runtime.interrupts import Interrupts
from spreeze.runtime.plan import RunPlan
from spreeze.transport.replay_ring import ReplayReader, ReplayRing, RingSpec
from spreeze.transport.transitions import fill_with_synthetic_rows
from spreeze.tuner.problem import BATCH, DEVICE, ENVS, JOINT, PRECISION, RATIO, SAMPLERS, THREADS, Setting, TrialResult
from spreeze.tuner.trials import REPLAY, Trial
from spreeze.types import Choices, EnvSpec, Jsonable, RowLayout, TeamSpec, TransitionBatch
from spreeze.workers.gpu_replay import CudaGraph, GpuReplay
from spreeze.workers.replay_trainer import ReplayTrainer
from spreeze.workers.roles import ROLES, role_of
from spreeze.workers.torch_devices import gpus_of, learner_threads, matmuls_in, synchronize

FLOAT64_TOLERANCE, ROUNDED_TOLERANCE, SAME_TOLERANCE = 1e-6, 0.1, 1e-2
"""Of a parameter change: in float64; in float32 where two devices, placements or compilers round differently; in
float32 by the same kernels, of which a few add in any order. Adam divides by what may be next to nothing, so rounding
grows: weights altered by 6e-8 of themselves, what float32 rounds, altered the change of 200 updates by up to 0.03 (TD3,
processor)."""
_SEED, _ROWS = 1, 8192
LIMIT_S = 240.0
"""Longest time of a check in a process of its own."""
_TEAM = TeamSpec(actions=(3, 3), obs_dim=6, state_dim=5)
_PENDULUM = (
    "--env",
    "Pendulum-v1",
    "--samplers",
    "1",
    "--envs-per-sampler",
    "4",
    "--no-visualizer",
    "--no-governor",
    "--set",
    "replay.learning_starts=200",
    "--set",
    "evaluation.episodes=1",
)


@dataclass(frozen=True, kw_only=True)
class Place(Jsonable):
    """Where and how large."""

    device: str
    """``cuda:N``, or ``cpu`` as a stand-in."""
    small: bool = False
    """Small networks and few updates: the way through a check, not its weight."""
    others: tuple[str, ...] = ()
    """Further GPUs of this machine."""

    @property
    def on_gpu(self) -> bool:
        return bool(gpus_of(self.device))

    @property
    def updates(self) -> int:
        return 12 if self.small else 200

    @property
    def hidden(self) -> tuple[int, ...]:
        return (16, 16) if self.small else (256, 256)

    @property
    def batch_size(self) -> int:
        return 16 if self.small else 256


class Finding(NamedTuple):
    """``ok``: True right, False wrong, None not taken; with the reason in one line."""

    ok: bool | None
    text: str


class Trained(NamedTuple):
    """An algorithm with settings of its own, and the task's actions if these are not vectors."""

    algo: str
    changes: dict[str, Any]
    task: dict[str, Any]

    @property
    def text(self) -> str:
        return " ".join(
            (
                self.algo,
                *(f"{name}={value}" for name, value in self.changes.items()),
                *(["discrete"] if self.task else []),
            )
        )

    def spec(self) -> EnvSpec:
        return synthetic_spec(**self.task)

    def config(self, place: Place) -> AlgorithmConfig:
        part = SECTIONS[self.algo]
        assert issubclass(part, AlgorithmConfig)
        return dataclasses.replace(part(), hidden_sizes=place.hidden, **self.changes)


_NORMS = {"actor_layer_norm": True, "critic_layer_norm": True}
VECTORS = (
    Trained("sac", {}, {}), Trained("sac", {"critics": "quantile"}, {}), Trained("td3", {"critics": "categorical"}, {}),
    Trained("sac", _NORMS, {}), Trained("td3", {}, {}), Trained("ddpg", {}, {}),
)  # fmt: skip
DISCRETE = (
    Trained("sac", {}, {"action": Choices((4,))}), Trained("dqn", {}, {"action": Choices((4,))}),
    Trained("qmix", {}, {"action": Choices(_TEAM.actions, shape=(2,)), "obs_dim": 17, "team": _TEAM}),
)  # fmt: skip


def _made(case: Trained, place: Place, device: str, dtype: torch.dtype, *, overlap: bool = False) -> OffPolicyAlgorithm:
    """The algorithm on a device, with noise that is drawn on the host: the same on all devices."""
    options: dict[str, Any] = {"overlap": True} if overlap else {}
    torch.set_default_dtype(dtype)
    try:
        spec = case.spec()
        found = create(
            case.algo,
            spec.obs_dim,
            spec.action_dim,
            case.config(place),
            _SEED,
            device,
            num_actions=None if spec.choices is None else max(spec.choices.nvec),
            **options,
        )
    finally:
        torch.set_default_dtype(torch.float32)
    generator = torch.Generator().manual_seed(_SEED)

    def draw(out: Tensor) -> None:
        out.copy_(torch.empty(out.shape, dtype=out.dtype).normal_(generator=generator))

    found.draw_noise = draw  # type: ignore[method-assign]
    return found


def _networks(algorithm: OffPolicyAlgorithm) -> np.ndarray:
    """All parameters that are learned, in one vector."""
    return np.concatenate(
        [
            array.ravel().astype(np.float64)
            for name, array in algorithm.state_arrays().items()
            if name.endswith(("online", "target", "log_alpha"))
        ]
    )


def _batches(spec: EnvSpec, place: Place, dtype: torch.dtype) -> Iterator[TransitionBatch]:
    """The same batches of synthetic rows each time, on the processor."""
    with ring_of(spec) as ring:
        reader, rng = ReplayReader(ring), np.random.default_rng(_SEED)
        reader.refresh()
        rows = np.empty((place.batch_size, ring.spec.layout.width), np.float32)
        for _ in range(place.updates):
            reader.sample(rng, rows)
            yield ring.spec.layout.split(torch.from_numpy(rows.copy()).to(dtype), 0.99)


@contextlib.contextmanager
def ring_of(spec: EnvSpec) -> Iterator[ReplayRing]:
    with contextlib.closing(ReplayRing.create(RingSpec(RowLayout.of(spec), 1, _ROWS))) as ring:
        fill_with_synthetic_rows(ring, spec)
        yield ring


def _on(batch: TransitionBatch, device: torch.device) -> TransitionBatch:
    return TransitionBatch(*(part.to(device) if isinstance(part, Tensor) else part for part in batch))


def _parameter_change(
    case: Trained, place: Place, device: str, dtype: torch.dtype, *, overlap: bool = False
) -> np.ndarray:
    algorithm, sides = _made(case, place, device, dtype, overlap=overlap), DeviceSplit.parse(device)
    before = _networks(algorithm)
    for batch in _batches(case.spec(), place, dtype):
        seen = _on(batch, sides.actor)._replace(action=None, obs_action=None, reward=None, terminated=None)
        algorithm.update(_on(batch, sides.critics), seen if sides.split else None)
    if algorithm.updates_skipped():
        raise SpreezeError(f"{case.text} on {device}: {algorithm.updates_skipped()} updates were skipped")
    change: np.ndarray = _networks(algorithm) - before
    return change


def _compared(pairs: Sequence[tuple[str, np.ndarray, np.ndarray]], tolerance: float, what: str) -> Finding:
    """The pair of parameter changes that differs most, over the length of the first."""
    shares = {
        name: float(np.linalg.norm(other - one) / max(float(np.linalg.norm(one)), 1e-300)) for name, one, other in pairs
    }
    worst = max(shares, key=lambda name: shares[name])
    return Finding(
        shares[worst] <= tolerance,
        f"{what}: parameter changes differ by {shares[worst]:.1e} relative to "
        f"their length at most ({worst}; tolerance {tolerance:g}), {len(pairs)} cases",
    )


# --- the same numbers ---


def _against_the_processor(place: Place, dtype: torch.dtype, tolerance: float) -> Finding:
    with matmuls_in("float32", place.device):
        pairs = [
            (
                case.text,
                _parameter_change(case, place, "cpu", dtype),
                _parameter_change(case, place, place.device, dtype),
            )
            for case in VECTORS
        ]
    return _compared(pairs, tolerance, f"{place.updates} updates on {place.device} against cpu")


def processor_float64(place: Place) -> Finding:
    """One device against the processor, in float64."""
    return _against_the_processor(place, torch.float64, FLOAT64_TOLERANCE)


def processor_float32(place: Place) -> Finding:
    """One device against the processor, in float32."""
    return _against_the_processor(place, torch.float32, ROUNDED_TOLERANCE)


def split_against_one(place: Place) -> Finding:
    """Actor and critics apart against one device: both on one card, card and processor, two cards."""
    device = place.device
    splits = [f"{device}+{device}"]
    if place.on_gpu:
        splits += [f"cpu+{device}", f"{device}+cpu", *(f"{device}+{other}" for other in place.others)]
    pairs = []
    with matmuls_in("float32", device):
        for overlap in (False, True):
            for case in (VECTORS[0], VECTORS[4]):
                one = _parameter_change(case, place, device, torch.float32, overlap=overlap)
                pairs += [
                    (
                        f"{case.text} on {split}{', overlapped' if overlap else ''}",
                        one,
                        _parameter_change(case, place, split, torch.float32, overlap=overlap),
                    )
                    for split in splits
                ]
    return _compared(pairs, ROUNDED_TOLERANCE, f"{place.updates} updates of {', '.join(splits)} against {device}")


def fused_against_eager(place: Place) -> Finding:
    """Kernels fused by torch.compile against single ones."""
    case = VECTORS[5] if place.small else VECTORS[0]
    with matmuls_in("float32", place.device), ring_of(case.spec()) as ring:
        changes = []
        for fused in (False, True):
            trainer = trainer_of(ring, case, place, compile=fused)
            if fused and (said := [note for note in trainer.notes if "not compiled" in note]):
                return Finding(None, said[0])
            changes.append(_change_by_training(trainer, place.updates))
    what = f"{place.updates} fused updates against plain ones"
    return _compared([(case.text, changes[0], changes[1])], ROUNDED_TOLERANCE, what)


# --- replay on the card, graphs ---


def new_graph(trainer: ReplayTrainer, device: str) -> CudaGraph:
    return CudaGraph(torch.device(device))


def trainer_of(
    ring: ReplayRing,
    case: Trained,
    place: Place,
    *,
    per_launch: int | None = None,
    compile: bool = False,
    make_graph: Callable[[], CudaGraph] | None = None,
    branches: bool = False,
) -> ReplayTrainer:
    """The learner's trainer; where ``per_launch`` is given, with replay on the device, as a learner on a GPU has it.

    With ``branches`` its kernels are those that a graph has, whose branches run at once.
    """
    spec = case.spec()
    trainer = ReplayTrainer(
        spec,
        case.algo,
        case.config(place),
        ring.spec.layout,
        ReplayReader(ring),
        LearnerConfig(
            batch_size=place.batch_size,
            compile=compile,
            device=place.device,
            gpu_replay=False,
            updates_per_launch=per_launch or 0,
        ),
        seed=_SEED,
        normalize_obs=False,
    )
    if per_launch is not None:
        gpu_replay = GpuReplay(ReplayReader(ring), place.batch_size, torch.device(place.device), _SEED)
        trainer.use_gpu_replay(gpu_replay, make_graph or (lambda: new_graph(trainer, place.device)))
    if branches:
        trainer.algorithm.set_parallel(TwoStreams())
    return trainer


def _change_by_training(trainer: ReplayTrainer, updates: int) -> np.ndarray:
    before = _networks(trainer.algorithm)
    while trainer.updates < updates:
        trainer.update(updates - trainer.updates)
    change: np.ndarray = _networks(trainer.algorithm) - before
    return change


def graph_against_eager(place: Place) -> Finding:
    """Updates from captured graphs against single kernels, of every algorithm that learns from replay."""
    if not place.on_gpu:
        return Finding(None, "a processor has no graphs")
    cases = [*VECTORS, *DISCRETE, Trained("sac", {"policy_average": 0.9, "lr_schedule": "linear"}, {})]
    pairs, failed, waits = [], [], 0
    with matmuls_in("float32", place.device):
        for case in cases:
            with ring_of(case.spec()) as ring:
                changes = []
                for per_launch in (0, 4):
                    trainer = trainer_of(ring, case, place, per_launch=per_launch, branches=True)
                    changes.append(_change_by_training(trainer, place.updates))
                    failed += [f"{case.text}: {note}" for note in trainer.notes if "no CUDA graphs" in note]
                    with HostWaits(place.device) as waiting:
                        trainer.update()
                    waits += waiting.count
                pairs.append((case.text, changes[0], changes[1]))
    found = _compared(pairs, SAME_TOLERANCE, f"{place.updates} updates in graphs of 4 against single kernels")
    if failed:
        return Finding(False, failed[0])
    return Finding(found.ok and waits == 0, f"{found.text}; the host waited {waits} times in {2 * len(cases)} launches")


def mirror_against_host(place: Place) -> Finding:
    """Rows drawn from replay on the device against the ring, while real samplers write it: bytes and checksums."""
    wanted, draws, device = 4_000 if place.small else 200_000, 512 if place.small else 4096, torch.device(place.device)
    checked = same = torn = 0
    with _sampled_ring() as ring:
        mirror, first = GpuReplay(ReplayReader(ring), draws, device, _SEED), ring.total_committed()
        capacity, stride = ring.spec.rows_per_shard, ring.spec.stride_rows
        end_s = time.monotonic() + 60.0
        while (checked < wanted or ring.total_committed() - first < wanted // 4) and time.monotonic() < end_s:
            mirror.pull()
            rows = mirror.draw().cpu().numpy()
            logical, shards = mirror.logical.cpu().numpy(), mirror.shard.cpu().numpy()
            torn += torn_rows(rows, logical)
            host = ring.rows[shards * stride + logical % capacity]
            # Those that a sampler may have written over since cannot be compared.
            kept = logical >= np.array(ring.counters())[shards, 0] - capacity
            same += int((host[kept].view(np.uint32) == rows[kept].view(np.uint32)).all(1).sum())
            torn += int((host[kept].view(np.uint32) != rows[kept].view(np.uint32)).any(1).sum())
            checked += len(rows)
        written = ring.total_committed() - first
        mirror.synchronize()
    return Finding(
        torn == 0 and same > 0 and written > 0,
        f"{checked} rows drawn on {place.device} while 2 samplers "
        f"wrote {written}: {torn} torn or other than the host's, {same} compared byte by byte",
    )


@contextlib.contextmanager
def _sampled_ring() -> Iterator[ReplayRing]:
    """A small replay with checksums that two sampler processes write; a learner on the processor is beside them."""
    settings = resolve(
        [
            Layer(
                "bench",
                {
                    "env": {"id": "Pendulum-v1"},
                    "replay": {"capacity": 4096, "learning_starts": 100},
                    "sac": {"hidden_sizes": (16, 16)},
                    "learner": {"device": "cpu"},
                    "visualizer": {"enabled": False},
                },
            )
        ]
    )
    plan = RunPlan(settings=settings, spec=probe_env("Pendulum-v1", steps=0).spec, samplers=2, free_core=False)
    setting = Setting({DEVICE: "cpu", BATCH: 32, THREADS: 1, PRECISION: "float32", SAMPLERS: 2, ENVS: 4, RATIO: 0.0})
    candidate, failures = TrialResult(trial=JOINT, setting=setting), []
    machine = read_machine()
    with (
        checked_rows(),
        Interrupts() as interrupts,
        Trial(
            REPLAY,
            plan,
            [candidate],
            lambda result: failures.append(result.failure),
            usable_cores=machine.cores.usable,
            memory_cap_bytes=machine.memory.usable_bytes,
            interrupts=interrupts,
        ) as trial,
    ):
        trial.attempt(trial.start)
        trial.attempt(lambda: trial.begin(60.0))
        if failures:
            raise SpreezeError(f"no sampler runs: {failures[0]}")
        trial.resume_workers()
        (data,) = trial.run.data
        assert isinstance(data, ReplayData)
        yield data.ring


def failed_capture(place: Place) -> Finding:
    """A recording that a wait of the host spoils: updates go on by single kernels, with the reason; none is lost."""
    if not place.on_gpu:
        return Finding(None, "a processor has no graphs")

    class Spoiled(CudaGraph):
        def record(self, work: Callable[[], object], generators: Sequence[torch.Generator]) -> None:
            def waits() -> None:
                work()
                torch.zeros(1, device=place.device).item()

            super().record(waits, generators)

    case = VECTORS[0]
    with ring_of(case.spec()) as ring, matmuls_in("float32", place.device):
        plain = _change_by_training(trainer_of(ring, case, place, per_launch=0), place.updates)
        trainer = trainer_of(ring, case, place, per_launch=1, make_graph=lambda: Spoiled(torch.device(place.device)))
        trainer.algorithm.set_parallel(None)  # until the recording fails it would take the kernels of two streams
        spoiled = _change_by_training(trainer, place.updates)
        said = [note for note in trainer.notes if "recording failed" in note]
        trainer.drop_gpu_replay()
        trainer.release_cached()
        trainer.update()
    found = _compared([(case.text, plain, spoiled)], SAME_TOLERANCE, "updates go on one by one")
    return Finding(found.ok and len(said) == 1, f"{found.text}; {said[0] if said else 'nothing was said'}")


# --- what goes wrong, and goes on ---


def out_of_memory_midway(place: Place) -> Finding:
    """Too little memory for the batch in mid-run: the batch halves until it fits, with a line for each, and goes on."""
    case, large = VECTORS[0], 4096 if place.small else 65_536
    place = dataclasses.replace(place, small=False)
    with ring_of(case.spec()) as ring, learner_threads(case.spec(), 1, place.device):
        trainer = trainer_of(ring, case, place)
        trainer.update()
        synchronize(place.device)
        room = _leave_only(place.device, 20 * 2**20 if large == 4096 else 256 * 2**20)
        said: list[str] = []
        try:
            trainer.set_batch_size(large)
        except (RuntimeError, MemoryError) as error:
            return Finding(False, f"the batch itself has no room: {' '.join(str(error).split())[:150]}")
        for _ in range(5):
            trainer.update_within_memory(None, said.append)
        synchronize(place.device)
        skipped = trainer.algorithm.updates_skipped()
    halved = trainer.batch_size < large and len(said) >= 1
    return Finding(
        halved and skipped == 0 and trainer.updates == 6,
        f"batch {large} with room for {size(room)} more: "
        f"{len(said)} times halved, continuing with {trainer.batch_size}; "
        f"{said[0] if said else 'memory sufficed'}",
    )


def _leave_only(device: str, room: int) -> int:
    """Lets this process take ``room`` bytes more on the device; returns that."""
    if gpus_of(device):
        torch.cuda.empty_cache()
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved(device) + room) / total, device)
    else:
        limit = psutil.Process().memory_info().vms + room
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    return room


def resumed_elsewhere(place: Place) -> Finding:
    """A run goes on where another kind of device left it, both ways; asynchronous and serial."""
    told = []
    for mode in ("serial",) if place.small else ("serial", "spreeze"):
        for first, second in ((place.device, "cpu"), ("cpu", place.device)):
            with tempfile.TemporaryDirectory(prefix="spreeze-bench-") as folder:
                common = ["--runs-dir", folder]
                flags = [*_PENDULUM, "--mode", mode, "--batch-size", str(place.batch_size), "--name", "one"]
                begun = train([*flags, "--device", first, "--updates", "30", *common], 120.0)
                ended = train(["--resume", "one", "--device", second, "--updates", "60", *common], 120.0)
            found = (begun["updates"], begun["device"], ended["updates"], ended["device"])
            told.append(f"{mode} {first} to {second}")
            if found[0] < 30 or found[2] < 60 or (found[1], found[3]) != (first, second):
                return Finding(False, f"{told[-1]}: updates {found[0]} on {found[1]}, then {found[2]} on {found[3]}")
    return Finding(True, f"30 updates, then on to 60: {'; '.join(told)}")


def killed_in_a_kernel(place: Place) -> Finding:
    """A learner that is killed amid its kernels: the run starts it again, from its checkpoint on."""
    with tempfile.TemporaryDirectory(prefix="spreeze-bench-") as folder:
        run = Path(folder) / "one"
        command = [
            sys.executable,
            "-m",
            "spreeze.train",
            *_PENDULUM,
            "--device",
            place.device,
            "--batch-size",
            str(place.batch_size),
            "--set",
            "learner.checkpoint_interval_s=0.5",
            "--runs-dir",
            folder,
            "--name",
            "one",
            "--json",
            "--seconds",
            "180",
        ]
        with (
            open(Path(folder) / "out", "wb") as out,
            subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
            ) as process,
        ):
            try:
                _until(process, lambda: _number(run, "updates") >= 50 and any((run / "checkpoints").glob("ckpt-*")))
                learner = next(
                    child
                    for child in psutil.Process(process.pid).children()
                    if role_of(child.name()) is ROLES["learner"]
                )
                learner.kill()
                _until(process, lambda: _number(run, "restarts") >= 1)
                before = _number(run, "updates")
                _until(process, lambda: _number(run, "updates") > before)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGINT)
                try:
                    process.wait(PATIENCE_S)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
        document = json.loads((run / "summary.json").read_text(encoding="utf-8"))
        restarts, code = int(_number(run, "restarts")), process.returncode
    return Finding(
        code == 0 and restarts == 1 and document.get("error") is None,
        f"learner on {place.device} killed: "
        f"{restarts} restart, exit code {code}, went on from update {before:.0f}, error "
        f"{document.get('error')}",
    )


def _number(run: Path, name: str) -> float:
    with contextlib.suppress(SpreezeError):
        point = MetricsReader(run / "metrics.db").latest().get(name)
        return 0.0 if point is None else point.value
    return 0.0


def _until(process: subprocess.Popen[bytes], condition: Callable[[], bool]) -> None:
    end_s = time.monotonic() + 90.0
    while not condition():
        if process.poll() is not None:
            raise SpreezeError(f"the run ended with exit code {process.returncode}")
        if time.monotonic() > end_s:
            raise SpreezeError("not within 90 s")
        time.sleep(0.05)


CHECKS = {
    "one device against the processor, float64": processor_float64,
    "one device against the processor, float32": processor_float32,
    "split against one device": split_against_one,
    "graph against eager": graph_against_eager,
    "fused against eager": fused_against_eager,
    "mirror against host replay": mirror_against_host,
    "resume across device kinds": resumed_elsewhere,
    "out of memory in mid-run": out_of_memory_midway,
    "failed capture": failed_capture,
    "killed in a kernel": killed_in_a_kernel,
}


def in_child(name: str, place: Place) -> Finding:
    """A check in a process of its own, which a fault of the device or a hang ends."""
    command = [sys.executable, __file__, name, json.dumps(place.to_json())]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=LIMIT_S, check=False, text=True
        )
    except subprocess.TimeoutExpired:
        return Finding(False, f"not done within {LIMIT_S:.0f} s")
    try:
        return Finding(*json.loads(done.stdout.strip().rpartition("\n")[2]))
    except ValueError:
        return Finding(False, f"its process ended with {done.returncode}: {done.stderr[-2000:]}")


if __name__ == "__main__":
    check = CHECKS[sys.argv[1]]
    sys.stdout.write(json.dumps(check(Place.from_json(json.loads(sys.argv[2])))) + "\n")
