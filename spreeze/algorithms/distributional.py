"""Critics that learn the distribution of the return instead of its mean, as settings of SAC and TD3.

*quantile*: truncated quantile critics (TQC; Kuznetsov et al. 2020, arXiv 2005.04269). Each critic gives K quantiles of
the return; targets are the pooled quantiles of all critics without the highest ones, which limits overestimation
instead of the minimum of two critics. The actor maximizes the mean of all quantiles.

*categorical*: C51 (Bellemare et al. 2017, arXiv 1707.06887) with the critic of the lower mean in each row, as in
FastTD3 (arXiv 2505.22642). Each critic gives the probabilities of K returns on a grid from ``v_min`` to ``v_max``.

Both have the interface of ``Critics``: ``next_value`` gives M returns [M, B] instead of one per row, the algorithm
computes a target from each, and ``step`` takes these [M, B].
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import numpy as np

from spreeze.algorithms.losses import drop_top_quantiles, pairs_for, projected, quantile_huber_gradient
from spreeze.algorithms.networks.fused_mlp import MlpBuffers
from spreeze.algorithms.off_policy import Chunk, Critics
from spreeze.config.algorithm_bases import ActorCriticConfig, DistributionalConfig
from spreeze.inference.lazy_torch import Tensor, torch


def create_critics(config: ActorCriticConfig, *arguments: Any) -> Critics:
    """The critics selected by an algorithm's settings; ``arguments`` as for ``Critics``."""
    kinds: dict[str, type[Critics]] = {"twin": Critics, "quantile": QuantileCritics, "categorical": CategoricalCritics}
    kind = kinds[config.critics] if isinstance(config, DistributionalConfig) else Critics
    return kind(config, *arguments)


class _Distributional(Critics):
    """Base of both kinds; the chunks and threads are those of ``Critics``."""

    _values: Tensor | None = None  # [S, B], means of the critics at the latest actions of the current policy

    @abstractmethod
    def next_value(self, next_obs: Tensor, next_action: Tensor) -> Tensor:
        """Future returns [M, B] of actions [A, B] from the target networks, in new memory."""

    @abstractmethod
    def _fill_loss_gradient(self, buffers: MlpBuffers, loss_target: Tensor, td_error: Tensor) -> None:
        """Fills ``buffers.grad_out``, the gradient of the summed loss, and ``td_error`` [S, rows], mean errors."""

    @abstractmethod
    def _fill_mean_gradient(self, buffers: MlpBuffers, values: Tensor) -> None:
        """Fills ``values`` [S, rows] with each mean, and ``buffers.grad_out`` with its derivative."""

    def _differentiate(
        self, obs_action: Tensor, target: Tensor, loss_target: Tensor, mean_td_target: Tensor, weight: Tensor | None
    ) -> None:
        """One gradient step toward ``target`` [M, B].

        ``loss_target`` is for ``_fill_loss_gradient``, ``mean_td_target`` [B] for the metrics. Clamps hide non-finite
        values, so the gradient of such a row is set to NaN, and the optimizer rejects it.
        """
        total = target.sum(0)
        per_row = torch.sub(total, total).add_(self._sized(obs_action.shape[0]).inverse_rows)
        if weight is not None:
            per_row.mul_(weight)

        def fill(chunk: Chunk) -> None:
            self._fill_loss_gradient(chunk.buffers, loss_target[:, chunk.rows], chunk.td_error)
            chunk.buffers.grad_out.mul_(per_row[chunk.rows])

        self._take_step(obs_action, mean_td_target, fill)

    def _action_gradients(self, obs: Tensor, action: Tensor, *, first: bool = False) -> tuple[Tensor, Tensor]:
        """Means [S, B] and their derivatives by the action [S, A, B], in buffers; ``first``: only that critic's."""
        buffers = self._sized(obs.shape[0])
        if self._values is None or self._values.shape[1] != len(obs):
            self._values = torch.zeros_like(buffers.td_error)
        values = self._values
        buffers.fill(obs, action)

        def descend(chunks: list[Chunk]) -> None:
            for chunk in chunks:
                chunk.online.forward(chunk.x, chunk.buffers)
                self._fill_mean_gradient(chunk.buffers, values[chunk.critics, chunk.rows])
                chunk.online.backward(chunk.buffers, None, None)
                torch.bmm(chunk.action_weights, chunk.buffers.grads_t[0], out=chunk.action_gradients)

        self._run(descend, buffers.first if first else buffers.groups)
        return values, buffers.action_gradients

    def drop_buffers(self) -> None:
        super().drop_buffers()
        self._values = None


class QuantileCritics(_Distributional):
    """S networks of K quantiles at the middle levels ``(2 k + 1) / (2 K)``."""

    def __init__(self, config: DistributionalConfig, *arguments: Any) -> None:
        super().__init__(config, *arguments, outputs=config.quantiles)
        count, like = config.quantiles, self.online.flat
        self._drop = config.drop_quantiles * self.online.stack
        self._levels = torch.arange(count, device=like.device, dtype=like.dtype).add_(0.5).div_(count)
        self._mean_gradient = 1.0 / count

    def next_value(self, next_obs: Tensor, next_action: Tensor) -> Tensor:
        """The pooled quantiles without the highest, in any order."""
        out = self._evaluate(next_obs, next_action).out
        return drop_top_quantiles(out.flatten(0, 1).t(), self._drop).t().contiguous()

    def step(self, obs_action: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        """One gradient step toward targets [M, B]; the loss of a critic is the mean over its quantiles."""
        self._differentiate(obs_action, target, target, target.mean(0), weight)

    def _fill_loss_gradient(self, buffers: MlpBuffers, loss_target: Tensor, td_error: Tensor) -> None:
        quantiles = buffers.out.flatten(0, 1)
        if buffers.loss_scratch is None:
            buffers.loss_scratch = pairs_for(quantiles, len(loss_target))
        levels = self._levels.repeat(buffers.stack)
        gradient = quantile_huber_gradient(quantiles, loss_target, levels, buffers.loss_scratch)
        torch.mul(gradient.view_as(buffers.out), self._mean_gradient, out=buffers.grad_out)
        torch.sub(buffers.out.mean(1), loss_target.mean(0), out=td_error)

    def _fill_mean_gradient(self, buffers: MlpBuffers, values: Tensor) -> None:
        buffers.grad_out.fill_(self._mean_gradient)
        torch.mean(buffers.out, 1, out=values)

    def action_gradient(self, obs: Tensor, action: Tensor, *, use_min: bool) -> Tensor:
        """dQ/da [A, B] of the mean of all quantiles (arXiv 2005.04269, eq. 13), regardless of ``use_min``."""
        values, gradients = self._action_gradients(obs, action)
        buffers = self._buffers
        torch.mean(values, 0, out=buffers.q_action)
        return torch.mean(gradients, 0, out=buffers.min_gradient)


class CategoricalCritics(_Distributional):
    """S networks of K logits for returns on a grid."""

    def __init__(self, config: DistributionalConfig, *arguments: Any) -> None:
        super().__init__(config, *arguments, outputs=config.atoms)
        like = self.online.flat
        self._range = config.v_min, config.v_max
        self.grid = torch.linspace(*self._range, config.atoms, device=like.device, dtype=like.dtype).unsqueeze(1)
        self._next_prob: Tensor | None = None

    def value_arrays(self) -> dict[str, np.ndarray]:
        return {"atoms": self.grid[:, 0].cpu().numpy().astype(np.float32)}

    def next_value(self, next_obs: Tensor, next_action: Tensor) -> Tensor:
        """The grid; stores the probabilities from the critic of the lowest mean in each row for ``step``."""
        prob = self._evaluate(next_obs, next_action).out.softmax(1)
        lowest = (prob * self.grid).sum(1).argmin(0)
        self._next_prob = prob.gather(0, lowest.expand(1, prob.shape[1], -1))[0]
        return self.grid.expand_as(self._next_prob).clone()

    def step(self, obs_action: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        """One gradient step on the cross-entropy with the projection of the targets [K, B]."""
        assert self._next_prob is not None
        loss_target = projected(self._next_prob, target, *self._range)
        self._differentiate(obs_action, target, loss_target, (loss_target * self.grid).sum(0), weight)

    def _fill_loss_gradient(self, buffers: MlpBuffers, loss_target: Tensor, td_error: Tensor) -> None:
        torch.sub(buffers.out.softmax(1), loss_target, out=buffers.grad_out)
        torch.sum(buffers.grad_out * self.grid, 1, out=td_error)

    def _fill_mean_gradient(self, buffers: MlpBuffers, values: Tensor) -> None:
        prob = buffers.out.softmax(1)
        torch.sum(prob * self.grid, 1, out=values)
        torch.mul(prob, self.grid - values.unsqueeze(1), out=buffers.grad_out)

    def action_gradient(self, obs: Tensor, action: Tensor, *, use_min: bool) -> Tensor:
        """dQ/da [A, B] of the critics' lowest mean, or of the first critic."""
        buffers = self._sized(obs.shape[0])
        values, gradients = self._action_gradients(obs, action, first=not use_min)
        if not use_min:
            buffers.q_action.copy_(values[0])
            return gradients[0]
        lowest, index = values.min(0)
        buffers.q_action.copy_(lowest)
        torch.gather(gradients, 0, index.expand(1, gradients.shape[1], -1), out=buffers.min_gradient.unsqueeze(0))
        return buffers.min_gradient

    def drop_buffers(self) -> None:
        super().drop_buffers()
        self._next_prob = None
