"""QMIX: Q-learning for a team that shares one reward (Rashid et al. 2018, arXiv 1803.11485), and VDN as its ablation.

Each agent has values Q_i(o_i, .) of its own actions, and acts only by them. A mixing network combines the values of the
chosen actions to the team's value Q_tot(s, a). It is monotonic in each: its weights are absolute values, computed by
linear maps of the state (hypernetworks). So the best action of each agent is also best for Q_tot. VDN (Sunehag et al.
2017, arXiv 1706.05296) takes the sum instead. Agents share one perceptron, and a one-hot of their number distinguishes
them. If an observation hides the past, stack it in the environment.

*Departures*: feed-forward instead of recurrent agents, Adam instead of RMSProp, a soft target update, epsilon by env
steps. The next actions are those of the online network (double Q-learning), as in the authors' later code.

*The norm of the state.* Both layers' weights are linear in the state, so Q_tot grows with the square of its norm, and
the highest values would lie far outside the visited states (``assets/figures.md``). So the mixer reads states in units
of their running root mean square, and clips their norm to twice the usual one. If ``q_mean`` still leaves the range of
possible returns (Pan et al. 2021, arXiv 2103.11883), a lower discount and n-step returns limit it.

Gradients come from autograd. Shapes besides those of ``types``: n agents, o values of an agent's observation, E units
of the mixer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from spreeze.algorithms import losses
from spreeze.algorithms.networks.fused_mlp import host_copies, uniform_
from spreeze.algorithms.off_policy import ActorOutputs, CriticNetworks, OffPolicyAlgorithm, action_value_meta
from spreeze.config.algorithm_bases import ActionValueConfig
from spreeze.config.algorithms import AlgorithmRow
from spreeze.config.section import setting
from spreeze.errors import ConfigError
from spreeze.inference.lazy_torch import Tensor, functional, torch
from spreeze.types import EnvSpec, TeamSpec, TransitionBatch

_LONGEST = 2.0  # largest norm of a state that the mixer reads, relative to the usual norm


@dataclass(frozen=True, kw_only=True)
class QMIXConfig(ActionValueConfig):
    """QMIX for teams of agents (Rashid et al. 2018, arXiv 1803.11485), and VDN (arXiv 1706.05296) as its ablation."""

    hidden_sizes: tuple[int, ...] = setting(
        (64, 64), "units per hidden layer of the agents' network", unit="units", low=1, high=4096, fixed=True
    )
    mixer: str = setting(
        "qmix",
        "how the team's value follows from the agents': qmix: a monotonic network conditioned on the state; "
        "vdn: their sum",
        choices=("qmix", "vdn"),
        fixed=True,
    )
    mixing_units: int = setting(
        32, "mixer = qmix: units of the mixing network", unit="units", low=1, high=1024, fixed=True
    )

    def check_task(self, spec: EnvSpec) -> None:
        super().check_task(spec)
        if self.network:
            raise ConfigError(f"network = {self.network!r}: agents share a perceptron; remove it and set hidden_sizes")


class QMIX(OffPolicyAlgorithm):
    name = "qmix"
    _config: QMIXConfig
    critics: TeamValues

    def __init__(
        self, obs_dim: int, num_actions: int, config: QMIXConfig, seed: int, device: str = "cpu", *, team: TeamSpec
    ) -> None:
        torch_device = torch.device(device)
        noise = torch.Generator(torch_device).manual_seed(seed + 1)
        self.critics = TeamValues(team, config, torch.Generator().manual_seed(seed), torch_device)
        self._config, self.period = config, config.target_interval
        meta = action_value_meta(config, obs_dim, num_actions)
        meta |= {"team_obs_dim": team.obs_dim, "team_actions": list(team.actions)}
        meta |= {"hidden_sizes": list(config.hidden_sizes), "activation": config.activation}
        super().__init__(None, self.critics, noise, meta)

    def actor_forward(self, batch: TransitionBatch) -> ActorOutputs:
        """Each agent's next action [n, B] as an index: the best of the online network (double) or of the target's."""
        critics = self.critics
        networks = critics.online if self._config.double else critics.target
        return ActorOutputs(networks.agent_values(batch.next_obs).argmax(2).t(), None, None)

    def critic_step(self, batch: TransitionBatch, next_action: Tensor, next_log_prob: Tensor | None) -> None:
        """Target ``r + discount Q_tot'(s', a')``, squared error (eq. 6)."""
        self.critics.count_states(batch.obs)
        value = self.critics.target.team_value(batch.next_obs, next_action.t())
        target = losses.td_target(batch.reward, batch.terminated, batch.discount, value)
        self.critics.step(batch.obs, batch.action, target, batch.weight)

    def policy_arrays(self) -> dict[str, np.ndarray]:
        """Copies of the weights of the agents' network; the mixer only learns."""
        layers = self.critics.online.agents()
        arrays = {
            f"{name}{index}": tensor
            for index, pair in enumerate(layers[:-1])
            for name, tensor in zip("wb", pair, strict=True)
        }
        return host_copies(arrays | {"head_w": layers[-1][0], "head_b": layers[-1][1]})


class TeamNetworks:
    """The agents' shared perceptron and the mixer, as views of one flat vector.

    The agents' layers come first, weights [in, out] and biases [out]. Unless ``mixer = vdn``, the mixer's maps of the
    state follow in that form: to the first layer's weights [n E], its biases [E], the second layer's weights [E], and
    the two layers [E] and [1] of its bias.
    """

    def __init__(self, team: TeamSpec, config: QMIXConfig, device: torch.device, state_square: Tensor) -> None:
        """``state_square`` [] is the mean square of a state's values so far."""
        self.team, self._units, self._state_square = team, config.mixing_units, state_square
        self._activate: Callable[[Tensor], Tensor] = (
            partial(functional.gelu, approximate="tanh")
            if config.activation == "gelu"
            else getattr(torch, config.activation, None) or getattr(functional, config.activation)
        )
        self.state_dim = team.state_dim or team.size * team.obs_dim
        agents = (team.obs_dim + team.size, *config.hidden_sizes, max(team.actions))
        maps = list(pairwise(agents))
        self._depth = len(maps)
        if config.mixer == "qmix":
            units, state = config.mixing_units, self.state_dim
            maps += [(state, team.size * units), (state, units), (state, units), (state, units), (units, 1)]
        self._shapes = [shape for sizes in maps for shape in (sizes, sizes[1:])]
        self._sizes = [math.prod(shape) for shape in self._shapes]
        self.flat = torch.zeros(sum(self._sizes), device=device)
        self._one_hot = torch.eye(team.size, device=device)
        counts = torch.tensor(team.actions, device=device)
        self._forbidden = torch.arange(max(team.actions), device=device) >= counts[:, None]  # [n, K]

    def initialize(self, generator: torch.Generator) -> None:
        for weight, bias in self._layers(self.flat):
            uniform_(weight, len(weight), generator)
            uniform_(bias, len(weight), generator)

    def agents(self) -> list[tuple[Tensor, Tensor]]:
        """Weight and bias of each layer of the agents' network."""
        return self._layers(self.flat)[: self._depth]

    def _layers(self, flat: Tensor) -> list[tuple[Tensor, Tensor]]:
        # One split: the gradient of each separate view would be as long as the whole vector.
        views = [part.view(shape) for part, shape in zip(torch.split(flat, self._sizes), self._shapes, strict=True)]
        return list(zip(views[::2], views[1::2], strict=True))

    def agent_values(self, obs: Tensor, flat: Tensor | None = None) -> Tensor:
        """Q_i(o_i, .) [B, n, K] at obs [B, O]; minus infinity for actions that an agent does not have."""
        count = self.team.size
        x = obs[:, : count * self.team.obs_dim].reshape(-1, count, self.team.obs_dim)
        x = torch.cat((x, self._one_hot.expand(len(x), -1, -1)), 2)
        layers = self._layers(self.flat if flat is None else flat)[: self._depth]
        for weight, bias in layers[:-1]:
            x = self._activate(x @ weight + bias)
        return (x @ layers[-1][0] + layers[-1][1]).masked_fill(self._forbidden, -math.inf)

    def mixed(self, values: Tensor, obs: Tensor, flat: Tensor | None = None) -> Tensor:
        """Q_tot [B] from the agents' values [B, n] in the states of obs [B, O] (figure 2 of the paper)."""
        layers = self._layers(self.flat if flat is None else flat)[self._depth :]
        if not layers:
            return values.sum(1)
        state: Tensor = obs[:, -self.state_dim :]
        state = state * self._state_square.rsqrt()
        length: Tensor = torch.linalg.vector_norm(state, dim=1, keepdim=True)
        state = state * (_LONGEST * math.sqrt(self.state_dim) / length).clamp(max=1.0)
        first, first_bias, second, hidden = (state @ weight + bias for weight, bias in layers[:4])
        mixing = first.abs().view(-1, self.team.size, self._units)
        units = functional.elu(torch.einsum("bn,bne->be", values, mixing) + first_bias)
        bias = functional.relu(hidden) @ layers[4][0] + layers[4][1]
        return (units * second.abs()).sum(1) + bias[:, 0]

    def team_value(self, obs: Tensor, action: Tensor, flat: Tensor | None = None) -> Tensor:
        """Q_tot(s, a) [B] at obs [B, O] and the agents' actions [B, n]."""
        chosen = self.agent_values(obs, flat).gather(2, action.long().unsqueeze(2))[:, :, 0]
        return self.mixed(chosen, obs, flat)


class TeamValues(CriticNetworks[TeamNetworks]):
    """Q_tot, online and target."""

    def __init__(self, team: TeamSpec, config: QMIXConfig, generator: torch.Generator, device: torch.device) -> None:
        self._states = torch.tensor([1.0, 0.0], device=device)
        """Mean square of the values of states, and the number of batches counted."""
        make = partial(TeamNetworks, team, config, device, self._states[0])
        super().__init__(make, config.lr, generator, max_norm=config.max_grad_norm)
        self._state = slice(-self.online.state_dim, None)

    def count_states(self, obs: Tensor) -> None:
        """Adds the states of obs [B, O] to their mean square: over all batches, later over about the last thousand."""
        square, batches = self._states
        batches.add_(1.0)
        mean = obs[:, self._state].square().mean().clamp_(min=1e-12)
        square.lerp_(mean, batches.reciprocal().clamp_(min=1e-3))

    def tensors(self) -> dict[str, Tensor]:
        return super().tensors() | {"states": self._states}

    def step(self, obs: Tensor, action: Tensor, target: Tensor, weight: Tensor | None = None) -> None:
        """One gradient step on ``mean weight (Q_tot(s, a) - target)^2 / 2``; actions [B, n], target, weight (1) [B]."""
        with torch.inference_mode(False), torch.enable_grad():
            leaf = self.online.flat.detach().requires_grad_()
            value = self.online.team_value(obs.clone(), action.clone(), leaf)
            error = value.detach() - target.clone()
            factor = error if weight is None else error * weight.clone()
            (gradient,) = torch.autograd.grad(value, leaf, factor / len(error))
        self.td_error, self.td_target = error.unsqueeze(0), target
        self.gradient.flat.copy_(gradient)
        self.adam.step()


ALGORITHMS = (AlgorithmRow(name="qmix", config=QMIXConfig, team=QMIX, defaults={"learner.batch_size": 128}),)
