"""Memory for algorithms with replay: one recurrent cell, learned by the critics' loss through sequences.

R2D2 (Kapturowski et al. 2019): a sequence begins with the state that its sampler had, and over its first steps, the
burn-in, the present parameters only bring that up to date. Episodes within a sequence begin with zeros. Actor and
critics read what the cell gives at each step, so that for them a batch of sequences is one of transitions. As with
images (``image_encoder``), no gradient of the actor flows back, and the policy's state is all that samplers have to
keep. Target networks read a target cell, which runs over the same steps. Departures from R2D2: rewards are scaled as
everywhere here, instead of a transform of values; the cell's gradient is bounded apart from the critics'.
"""

from __future__ import annotations

import numpy as np

from spreeze.algorithms.off_policy import TrainedNetworks
from spreeze.algorithms.recurrent_networks import Gradients, Packing, RecurrentCell
from spreeze.config.algorithm_settings import RecurrentReplayConfig
from spreeze.inference.lazy_torch import Tensor, torch
from spreeze.types import SequenceBatch, TransitionBatch

_MOST_SHARE = 0.9
"""Share of a sequence's largest error in its priority; the rest is the mean (R2D2, section 2.3)."""


def n_step_sums(
    reward: Tensor, terminated: Tensor, valid: Tensor, discount: float, steps: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Discounted sums of up to n rewards from each slot on, within its episode and its sequence; all are [B, T].

    Returns:
        Sums, the number of rewards in each as int64, which is 0 where there is no step, and 1.0 where the MDP ended.
    """
    length = reward.shape[1]
    total, ended = torch.zeros_like(reward), torch.zeros_like(reward)
    count = torch.zeros_like(reward, dtype=torch.int64)
    goes_on = torch.ones_like(reward)
    for age in range(min(steps, length)):
        live = goes_on[:, : length - age] * valid[:, age:]
        total[:, : length - age] += discount**age * live * reward[:, age:]
        ended[:, : length - age] += live * terminated[:, age:]
        count[:, : length - age] += live.long()
        goes_on = torch.zeros_like(reward)
        goes_on[:, : length - age] = live * (1.0 - terminated[:, age:])
    return total, count, ended


class RecurrentEncoder:
    """A cell with its target and its optimizer, which turns batches of sequences into batches of its outputs."""

    def __init__(
        self,
        obs_dim: int,
        config: RecurrentReplayConfig,
        n_step: int,
        seed: int,
        device: torch.device,
        *,
        lr: float,
        max_norm: float | None = None,
    ) -> None:
        kind, size = config.recurrent, config.recurrent_size
        self.size, self.meta = size, {"recurrent": kind, "recurrent_size": size}
        """Inputs of actor and critics; JSON values for samplers."""

        def made() -> RecurrentCell:
            return RecurrentCell(
                obs_dim, kind, size, torch.zeros(RecurrentCell.count(obs_dim, kind, size), device=device)
            )

        self._cell = TrainedNetworks(made, lr, torch.Generator().manual_seed(seed + 2), max_norm=max_norm)
        self.online, self.adam = self._cell.online, self._cell.adam
        self._burn_in, self._n_step = config.burn_in, n_step
        self._recorded: Gradients | None = None
        self._valid = torch.zeros(0)

    def encode(self, batch: SequenceBatch, noise: torch.Generator) -> TransitionBatch:
        """The B T slots after the burn-in as transitions; keeps what ``step`` needs of their gradient."""
        first, count = self._burn_in, len(batch.obs)
        begins = batch.begins.cpu().numpy() > 0.0
        target, (state, target_state) = self._cell.target, (batch.state, batch.state)
        with torch.no_grad():
            if first:
                x, packing = batch.obs[:, :first].flatten(0, 1), Packing(begins[:, :first])
                _, state = self.online.run(x, packing, batch.state)
                _, target_state = target.run(x, packing, batch.state)
            x = batch.obs[:, first:].flatten(0, 1)
            packing = Packing(np.concatenate((begins[:, first:], np.zeros((count, 1), bool)), 1))
            of_target, _ = target.run(x, packing, target_state)
        features, self._recorded = self.online.record(x, packing, state)
        valid, action = batch.valid[:, first:], batch.action[:, first:].flatten(0, 1)
        total, steps, ended = n_step_sums(
            batch.reward[:, first:], batch.terminated[:, first:], valid, batch.discount, self._n_step
        )
        rows, length = torch.arange(count, device=x.device).unsqueeze(1), valid.shape[1]
        places = torch.arange(length, device=x.device) + rows * (length + 1)
        obs, following = features[places.flatten()], (places + steps).flatten()
        weight = valid * (valid.numel() / valid.sum().clamp(min=1.0))
        if batch.weight is not None:
            weight = weight * batch.weight.unsqueeze(1)
        self._valid = valid
        return TransitionBatch(
            obs=obs,
            action=action,
            obs_action=torch.cat((obs, action), 1),
            reward=total.flatten(),
            terminated=ended.flatten(),
            discount=(batch.discount ** steps.to(x.dtype)).flatten(),
            next_obs=features[following],
            weight=weight.flatten(),
            target_obs=of_target[following],
        )

    def step(self, grad_obs: Tensor) -> None:
        """One gradient step by the derivative [B T, H] of the critics' loss by the outputs."""
        assert self._recorded is not None
        grad = grad_obs.new_zeros(len(self._valid), self._valid.shape[1] + 1, self.size)
        grad[:, :-1] = grad_obs.view(*self._valid.shape, self.size)
        found, self._recorded = self._recorded(grad.flatten(0, 1)), None
        for own, gradient in zip(self._cell.gradient.weights, found, strict=True):
            own.copy_(gradient)
        self.adam.step()

    def update_target(self, tau: float) -> None:
        self._cell.update_target(tau)

    def row_errors(self, errors: Tensor) -> Tensor:
        """Priorities [B] of sequences by the errors [B T] of their steps."""
        errors = errors.view(self._valid.shape) * self._valid
        mean = errors.sum(1) / self._valid.sum(1).clamp(min=1.0)
        return _MOST_SHARE * errors.amax(1) + (1.0 - _MOST_SHARE) * mean

    def arrays(self) -> dict[str, np.ndarray]:
        """Copies of the cell, as ``inference.recurrence.Cell`` reads them."""
        return self.online.arrays()

    def tensors(self) -> dict[str, Tensor]:
        """The state that a checkpoint stores."""
        return self._cell.tensors()
