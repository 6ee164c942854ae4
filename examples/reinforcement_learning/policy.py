"""The policy and the arithmetic of REINFORCE, without processes or calls."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn


class Policy(nn.Module):
    """Policy from states of cart and pole to probabilities.

    It maps `[n, 4]` to the probabilities of pushing left and right, `[n, 2]`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.affine1 = nn.Linear(4, 128)
        self.affine2 = nn.Linear(128, 2)

    def forward(self, states: Tensor) -> Tensor:
        return torch.softmax(self.affine2(torch.relu(self.affine1(states))), dim=1)


@dataclass
class Trajectory:
    """Episode of one observer, as recorded by the agent."""

    states: list[Tensor] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


def discounted_returns(rewards: list[float], gamma: float) -> list[float]:
    """Return each step's reward plus the later rewards, discounted by `gamma` a step."""
    returns, future = [], 0.0
    for reward in reversed(rewards):
        future = reward + gamma * future
        returns.append(future)
    return returns[::-1]


def reinforce_loss(policy: Policy, episodes: list[Trajectory], gamma: float, entropy: float) -> Tensor:
    """Return the REINFORCE loss over observers' episodes, minus an entropy bonus.

    The returns start at zero for every observer: chaining the rewards of different episodes would credit an action with
    events in another observer's environment. They are normalized together.

    The log-probabilities are computed for all steps at once, from the recorded states and actions. The policy has not
    changed since the actions were drawn, so the values are the same, at a small part of the cost of one autograd graph
    per step.
    """
    returns = torch.tensor([value for episode in episodes for value in discounted_returns(episode.rewards, gamma)])
    returns = (returns - returns.mean()) / (returns.std(correction=0) + torch.finfo(returns.dtype).eps)
    states = torch.stack([state for episode in episodes for state in episode.states])
    actions = torch.tensor([action for episode in episodes for action in episode.actions])

    log_probs = torch.log(policy(states))
    chosen = log_probs.gather(1, actions.unsqueeze(1)).squeeze(1)
    undecided = -(log_probs.exp() * log_probs).sum(dim=1)
    return -(chosen * returns).mean() - entropy * undecided.mean()
