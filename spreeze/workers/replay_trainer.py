"""Takes gradient steps with batches from replay.

Two learner threads are a pair: each critic has its thread, and the actor's passes are split by rows or by outputs. No
sum is split, so results equal those of one core. ``--device split`` puts the actor on one GPU, critics and targets on
the other (Spreeze, section 3.1): only actions, log-densities, dQ/da and SAC's entropy coefficient cross. On a GPU
replay is copied to the device as far as memory allows, and whole updates are CUDA graphs (``gpu_replay``). Its kernels
can be fused by ``torch.compile`` before they are recorded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from time import perf_counter
from typing import Any

import numpy as np
import torch

from spreeze.algorithms import create
from spreeze.algorithms.algorithm import LazySnapshot
from spreeze.algorithms.averages import PolicyAverage
from spreeze.algorithms.off_policy import DeviceSplit, OffPolicyAlgorithm
from spreeze.algorithms.parallel_work import Parallel, TwoStreams
from spreeze.config.algorithm_bases import AlgorithmConfig
from spreeze.config.schema import LearnerConfig
from spreeze.inference.normalizer import Normalizer, ReturnMoments
from spreeze.inference.policy import with_exploring
from spreeze.metrics.table import TABLE
from spreeze.transport.replay_ring import ReplayReader
from spreeze.transport.weights import sha256_of
from spreeze.types import EnvSpec, RowLayout
from spreeze.workers.gpu_replay import (
    AnyGpuReplay,
    CudaGraph,
    DeviceReplay,
    DeviceStream,
    GraphedUpdates,
    fitted_gpu_replay,
    reason_against,
)
from spreeze.workers.replay_batches import DeviceNormalizer, ReplayBatches, ReplayStatistics
from spreeze.workers.torch_devices import out_of_memory, release_cached, resolve_device

_REFRESH_S = 0.005  # age at which the reader's windows are refreshed; older windows only miss the newest rows
_AVERAGE = "policy_average"
_MIN_BATCH = 32
_COMPILED = ("actor_forward", "critic_step", "action_gradient", "actor_step")
"""Parts of an update that ``torch.compile`` fuses; the optimizers between them are one kernel each already."""


class ReplayTrainer:
    """Draws batches, updates the algorithm, keeps timings and state; independent of processes."""

    def __init__(
        self,
        spec: EnvSpec,
        algo: str,
        config: AlgorithmConfig,
        layout: RowLayout,
        reader: ReplayReader | DeviceReplay,
        learner: LearnerConfig,
        *,
        seed: int,
        normalize_obs: bool,
        parallel: Parallel | None = None,
        session: float = 0.0,
        loaded_rows: tuple[int, ...] = (),
    ) -> None:
        """``learner.compile`` fuses the kernels of an update by ``torch.compile`` before this returns.

        ``loaded_rows`` of each shard came from an earlier session, so a checkpoint's statistics have them. A checkpoint
        with this ``session`` was written for the same rows.
        """
        device = resolve_device(learner.device)
        devices = DeviceSplit.parse(device)
        options: dict[str, Any] = {
            "frames": spec.frames,
            "overlap": learner.overlap or None,
            "masked": spec.action_mask or None,
            "team": spec.team,
            "num_continuous": spec.box.dim if spec.box is not None and spec.choices is not None else None,
        }
        self.algorithm: OffPolicyAlgorithm = create(
            algo,
            spec.obs_dim,
            spec.action_dim,
            config,
            seed,
            device,
            import_module=spec.import_module,
            num_actions=None if spec.choices is None else max(spec.choices.nvec),
            **{name: value for name, value in options.items() if value is not None},
        )
        self._is_custom_network = bool(config.network)
        self.set_parallel(parallel)
        self._graph_uses_two_streams = not (learner.compile or devices.split or config.network)
        self._meta = {"algo": algo, "env": dataclasses.asdict(spec)}
        self._average = PolicyAverage(self.algorithm, config.policy_average) if config.policy_average else None
        self._explore_average = config.explore_average
        self._reader, self._layout, self._seed = reader, layout, seed
        self._device, self._device_text = devices.critics, device
        self._is_split = devices.actor != devices.critics
        self._has_images = spec.frames is not None
        self.notes: list[str] = []
        """Decisions about replay, launches and a resume, each to be reported once."""
        self._updates_per_launch = learner.updates_per_launch
        self._graphed: GraphedUpdates | None = None
        self._recording_failed = False
        """After a failed recording the allocator treats the graph as unfinished, so ``empty_cache`` would fail."""
        # Rewards reduced to their sign have the same scale in all tasks.
        scales = config.normalize_returns and not (spec.frames and spec.frames.sign_rewards)
        self.statistics = ReplayStatistics(
            layout,
            Normalizer(spec.vector_dim, spec.mask_dim) if normalize_obs else None,
            ReturnMoments() if scales else None,
            session=session,
            loaded_rows=loaded_rows,
        )
        self.batches = ReplayBatches(spec, layout, reader, self.statistics, devices, config, seed=seed)
        self._prioritised = self.batches.prioritised
        self.set_batch_size(learner.batch_size)
        self.updates = 0
        self._progress_thousandths = self._rollbacks = 0
        if learner.gpu_replay and self._device.type == "cuda":
            self._open_gpu_replay()
        self.rows_redrawn = 0
        self.gather_s = self.critic_s = self.actor_s = 0.0
        self._has_batch = False
        self._refreshed_s = -1.0
        if learner.compile:
            self._compile()

    def set_parallel(self, parallel: Parallel | None) -> None:
        """Splits updates over two threads, or over one, from now on."""
        # A custom network is one module, which two threads cannot run with parameters of their own.
        if not self._is_custom_network:
            self.algorithm.set_parallel(parallel)

    def update_learning_rates(self, progress: float) -> None:
        """Sets learning rates and importance weights for this fraction of the run, rounded down to thousandths."""
        thousandths = int(1000.0 * min(max(progress, 0.0), 1.0))
        if thousandths != self._progress_thousandths:
            self._progress_thousandths = thousandths
            self.algorithm.anneal(thousandths / 1000.0)

    def _open_gpu_replay(self) -> None:
        if self._has_images:
            self.notes.append("image batches are gathered on the host, which assembles the frame stacks")
            return
        if self._layout.sequence is not None:
            self.notes.append("batches of sequences are gathered on the host, which finds where episodes begin")
            return
        if self._prioritised is not None:
            self.notes.append(
                "batches are gathered on the host, without CUDA graphs: row priorities are kept on the host"
            )
            return
        assert isinstance(self._reader, ReplayReader)
        free_bytes, _ = torch.cuda.mem_get_info(self._device)
        gpu_replay, note = fitted_gpu_replay(self._reader, self.batch_size, self._device, self._seed, free_bytes)
        self.notes.append(note)
        if gpu_replay is not None:
            self.use_gpu_replay(gpu_replay, lambda: CudaGraph(self._device))

    def use_gpu_replay(self, gpu_replay: AnyGpuReplay, make_graph: Callable[[], CudaGraph]) -> None:
        """Draws from GPU replay from now on, with several updates in one launch where possible."""
        graphs = self._updates_per_launch > 0
        no_graphs = reason_against(split=self._is_split, period=self.algorithm.period)
        if graphs and no_graphs is not None:
            self.notes.append(f"no CUDA graphs: {no_graphs}")
            graphs = False
        if graphs and self._graph_uses_two_streams:
            self.algorithm.set_parallel(TwoStreams())
        self._graphed = GraphedUpdates(
            self.algorithm,
            gpu_replay,
            self._update_with,
            DeviceStream(self._device),
            wanted=self._updates_per_launch,
            make_graph=make_graph if graphs else None,
            on_failure=self._note_failed_recording,
        )
        self.statistics.copy_to(DeviceNormalizer(self._layout, self._device, DeviceStream(self._device)))

    def _compile(self) -> None:
        """Compiles the update, without images, whose kernels are cuDNN's; a note says what came of it."""
        if self._has_images:
            self.notes.append("updates are not compiled: convolutions already use cuDNN kernels")
            return
        rows = torch.zeros(self.batches.rows.shape, device=self._device)
        self.notes.append(compile_updates(self.algorithm, lambda: self._update_with(rows.clone())))
        self.gather_s = self.critic_s = self.actor_s = 0.0
        self._has_batch = False

    @property
    def has_gpu_replay(self) -> bool:
        """True if a copy of replay is on the GPU, which can be given up."""
        return self._graphed is not None and self._graphed.gpu_replay.is_copy

    @property
    def updates_before_replay(self) -> int:
        """Updates before the first replay of a recorded graph; 0 if none is recorded."""
        return 0 if self._graphed is None else self._graphed.updates_before_replay

    def drop_gpu_replay(self) -> bool:
        """Frees GPU replay; batches come from the host from now on. False if there is none."""
        if self._graphed is None or not self.has_gpu_replay:
            return False
        graphed, self._graphed = self._graphed, None
        self.statistics.copy_to(None)
        graphed.gpu_replay.synchronize()
        self.algorithm.set_parallel(None)
        return True

    def shrink(self) -> str:
        """Continues with less memory, without GPU replay or else with half of the batch; returns what was done."""
        device, before = self._device_text, self.batch_size
        if self.drop_gpu_replay():
            done = f"out of memory on {device}: freed the GPU copy of replay; batches are gathered on the host"
        else:
            self.set_batch_size(before // 2)
            done = (
                f"batch {before} does not fit into the memory of {device}; continuing with {self.batch_size}; set "
                f"--batch-size {self.batch_size}"
            )
        self.release_cached()
        return done

    def release_cached(self) -> None:
        """Returns the memory that PyTorch caches to the GPUs, where that is possible."""
        if not self._recording_failed:
            release_cached()

    def _note_failed_recording(self, text: str) -> None:
        self._recording_failed = True
        self.algorithm.set_parallel(None)
        self.notes.append(text)

    @property
    def batch_size(self) -> int:
        """Env steps of an update."""
        return self.batches.num_env_steps

    def set_batch_size(self, batch_size: int) -> None:
        """Draws that many env steps at once from now on."""
        self.algorithm.drop_buffers()
        self.batches.resize(batch_size)
        if self._graphed is not None:
            self._graphed.set_batch_size(batch_size)

    def refresh(self) -> None:
        """Refreshes the reader's windows now, counts new rows, and copies them to GPU replay."""
        if self._graphed is None:
            self._reader.refresh()
        else:
            self._graphed.gpu_replay.pull()
        self.statistics.update_obs(self._reader)
        self._refreshed_s = perf_counter()

    def update(self, max_updates: int | None = None) -> int:
        """Takes one gradient step, or several with a graph; returns how many (``max_updates`` None: no limit)."""
        start = perf_counter()
        if start - self._refreshed_s > _REFRESH_S:
            self.refresh()
        if self._graphed is not None:
            return self._launch(self._graphed, start, max_updates)
        self.rows_redrawn += self.batches.draw(self._progress_thousandths / 1000.0)
        batch, actor_batch = self.batches.batch(), self.batches.actor_batch()
        self.gather_s += perf_counter() - start
        self._has_batch = True
        critic_s, actor_s = self.algorithm.update(batch, actor_batch)
        self.critic_s += critic_s
        self.actor_s += actor_s
        if self._prioritised is not None:
            self._prioritised.set_errors(self.algorithm.row_errors())
        self._finish_updates(1)
        return 1

    def update_within_memory(self, max_updates: int | None, on_shrink: Callable[[str], None]) -> int:
        """``update``, repeated with less memory if the device runs out of it, of which ``on_shrink`` gets a report."""
        while True:
            try:
                return self.update(max_updates)
            except (RuntimeError, MemoryError) as error:
                can_shrink = self.has_gpu_replay or (self.batch_size // 2 >= _MIN_BATCH and self.batches.num_rows > 1)
                if not out_of_memory(error) or not can_shrink:
                    raise
            # Outside the handler, so that the traceback no longer holds what the update allocated.
            on_shrink(self.shrink())

    def _finish_updates(self, done: int) -> None:
        self.updates += done
        if self._average is not None:
            self._average.advance(self.updates)

    def _launch(self, graphed: GraphedUpdates, start: float, max_updates: int | None) -> int:
        launched, before_s = perf_counter(), self.critic_s + self.actor_s
        self.gather_s += launched - start
        done, self._has_batch = graphed.run(max_updates), True
        # The time of a graph, waiting for the device included, is counted as the critics'.
        self.critic_s += perf_counter() - launched - (self.critic_s + self.actor_s - before_s)
        self._finish_updates(done)
        return done

    def _update_with(self, rows: torch.Tensor) -> None:
        """Runs one update with rows of GPU replay, without the host."""
        if self.statistics.on_device is not None:
            self.statistics.on_device.apply(rows)
        critic_s, actor_s = self.algorithm.update(self.batches.split(rows), self.batches.actor_batch_of(rows))
        self.critic_s += critic_s
        self.actor_s += actor_s

    def metrics(self, *, wait_s: float, publish_s: float) -> dict[str, float]:
        lag, age = 0.0, 0.0
        if self.updates > 0:
            source = self._reader if self._graphed is None else self._graphed.gpu_replay
            lag, age = source.last_lag_age(self.updates)
        return {
            "updates": self.updates,
            "batch_size": self.batch_size,
            "wait_s": wait_s,
            "gather_s": self.gather_s,
            **self._step_seconds(),
            "publish_s": publish_s,
            "policy_lag": lag,
            "transition_age": age * self._layout.env_steps_per_row,
            "replay_fill": self._reader.available / self._reader.capacity,
            "rows_redrawn": self.rows_redrawn,
            "updates_skipped": self.algorithm.updates_skipped(),
            "return_scale": self.statistics.return_scale,
            **({"rollbacks": self._rollbacks} if self._rollbacks else {}),
            **{name: self._in_task_units(name, value) for name, value in self.algorithm.metrics().items()},
        }

    def _step_seconds(self) -> dict[str, float]:
        """Seconds of critic and actor steps; without an actor all of them are the critic's."""
        if self.algorithm.actor is None:
            return {"critic_s": self.critic_s + self.actor_s}
        return {"critic_s": self.critic_s, "actor_s": self.actor_s}

    def _in_task_units(self, name: str, value: float) -> float:
        """A metric of the algorithm, which learns returns in units of their deviation."""
        metric = TABLE.get(name)
        return value if metric is None else value * self.statistics.return_scale**metric.return_power

    def health(self) -> dict[str, float]:
        """``Algorithm.health`` on the rows of the latest update; empty before the first."""
        if not self._has_batch:
            return {}
        drawn = self.batches.batch() if self._graphed is None else self.batches.split(self._graphed.gpu_replay.batch)
        return self.algorithm.health(drawn)

    def policy(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        arrays, meta = self.policy_snapshot()
        return arrays(), meta

    def policy_snapshot(self) -> tuple[Callable[[], dict[str, np.ndarray]], dict[str, Any]]:
        """``policy`` without waiting for the device; the arrays may be fetched later, in another thread."""
        snapshots = [] if self._average is None else [self._average.snapshot()]
        if not (snapshots and self._explore_average):
            snapshots.append(self.algorithm.policy_snapshot())
        scales = self._scales()

        def read() -> dict[str, np.ndarray]:
            arrays = [snapshot() for snapshot in snapshots]
            return (with_exploring(*arrays) if len(arrays) > 1 else arrays[0]) | scales

        return read, self._policy_meta()

    def value_snapshot(self) -> LazySnapshot | None:
        return self.algorithm.value_snapshot(self.statistics.return_scale)

    def exploring_policy(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        """The weights that choose the actions of a sampler in the same process."""
        if self._average is None or self._explore_average:
            return self.policy()
        return self.algorithm.policy_arrays() | self._scales(), self._policy_meta()

    def _scales(self) -> dict[str, np.ndarray]:
        normalizer = self.statistics.normalizer
        return {} if normalizer is None else normalizer.arrays()

    def _policy_meta(self) -> dict[str, Any]:
        return {**self.algorithm.policy_meta(), **self._meta, "updates": self.updates}

    def state(self) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
        state = {
            "algorithm": self.algorithm.state_json(),
            "updates": self.updates,
            "draw_rng": self.batches.rng.bit_generator.state,
            **self.statistics.state(),
            "rollbacks": self._rollbacks,
            "largest_error": self._prioritised.largest_error if self._prioritised else None,
        }
        tensors = self.algorithm.state_arrays()
        if self._average is not None:
            tensors[_AVERAGE] = self._average.weights.to("cpu", copy=True).numpy()
            state[_AVERAGE] = self._average.updates
        return tensors, state

    def parameters_sha256(self) -> str:
        return sha256_of(self.algorithm.state_arrays())

    def load_state(self, tensors: dict[str, np.ndarray], state: dict[str, Any]) -> None:
        """Loads what ``state`` returned, on any device; a CheckpointError if it belongs to another network."""
        fits = self.algorithm.load_state_arrays(tensors)
        self.algorithm.load_state_json(state["algorithm"])
        self.updates = int(state["updates"])
        if self._average is not None:
            self._average.restore(tensors.get(_AVERAGE), int(state.get(_AVERAGE, self.updates)))
        if not fits:
            self.algorithm.seed_noise(self._seed)
            self.notes.append(
                "the random state of the checkpoint is from another device type; the noise of updates is "
                f"reseeded from seed {self._seed} and update {self.updates}"
            )
        self.batches.rng.bit_generator.state = state["draw_rng"]
        if self._graphed is not None:
            self._graphed.gpu_replay.generator.manual_seed(self._seed + self.updates)  # do not repeat earlier draws
        self.statistics.load_state(state)
        if self._prioritised is not None:
            self._prioritised.reset_priorities(float(state.get("largest_error") or 1.0))
        self._set_rollbacks(int(state.get("rollbacks", state.get("times_back", 0))))

    def roll_back(self, tensors: dict[str, np.ndarray], state: dict[str, Any]) -> None:
        """Learns on from what ``state`` returned, at half the learning rates; the number of updates stays.

        Observations since then are those of policies that fell. They are left out of the normalizer's statistics, by
        which the policy of the checkpoint would act otherwise than it did.
        """
        counts = {"updates": self.updates, _AVERAGE: self.updates, "rollbacks": self._rollbacks + 1}
        counts |= {"counted": self.statistics.state()["counted"]}
        algorithm = state["algorithm"] | {"updates": self.updates}
        draws = self.batches.rng.bit_generator.state
        self.load_state(tensors, state | counts | {"algorithm": algorithm, "draw_rng": draws})

    def _set_rollbacks(self, times: int) -> None:
        self._rollbacks, multiplier = times, 0.5**times
        if multiplier == self.algorithm.lr_multiplier:
            return
        self.algorithm.lr_multiplier = multiplier
        self.algorithm.anneal(self._progress_thousandths / 1000.0)
        if self._graphed is not None:
            self._graphed.set_batch_size(self.batch_size)  # a recorded graph may hold the rate as a constant


def compile_updates(off_policy: OffPolicyAlgorithm, update: Callable[[], None]) -> str:
    """Compiles the parts of an update by a few calls of ``update``, which leave the state as it was; returns a note.

    That takes up to a minute. Without Triton or a C++ compiler the update stays as it is, and the note says why.
    """
    algorithm: Any = off_policy
    compiler: Any = torch.compiler
    arrays, state = algorithm.state_arrays(), algorithm.state_json()
    plain = {"draw_noise": algorithm.draw_noise, "_actor_update_due": algorithm._actor_update_due}
    try:
        for name, function in plain.items():
            setattr(algorithm, name, compiler.disable(function))
        for adam in algorithm._optimizers:
            adam.step = compiler.disable(adam.step)
        for name in _COMPILED:
            setattr(algorithm, name, torch.compile(getattr(algorithm, name), dynamic=False))
        for _ in range(max(3, min(algorithm.period, 16) + 1)):
            update()
        note = "updates are compiled by torch.compile"
    except Exception as error:  # the compiler raises many kinds; the update itself has run in tests
        for name in (*plain, *_COMPILED):
            vars(algorithm).pop(name, None)
        for adam in algorithm._optimizers:
            vars(adam).pop("step", None)
        note = "updates are not compiled: " + " ".join(str(error).split())[:200]
    algorithm.load_state_arrays(arrays)
    algorithm.load_state_json(state)
    return note
