"""An observer, which owns an environment and asks the agent for every action."""

from __future__ import annotations

from typing import TYPE_CHECKING

import gymnasium
import torch

from telegrad import rpc

if TYPE_CHECKING:
    from agent import Agent

ENVIRONMENT = "CartPole-v1"


class Observer:
    """Player of an environment, in an observer's process.

    The agent creates it with `rpc.remote` and holds a reference to it.
    """

    def __init__(self, seed: int) -> None:
        self.id = rpc.get_worker_info().id
        self.env = gymnasium.make(ENVIRONMENT)
        self.env.reset(seed=1000 * seed + self.id)

    def run_episode(self, agent_rref: rpc.RRef[Agent], batched: bool) -> list[float]:
        """Play one episode. Calls in the loop run on the agent of `agent_rref`.

        Returns the rewards not yet reported: all of them in the batched variant, none in the plain one.
        """
        agent = agent_rref.rpc_sync()
        select_action = agent.select_action_in_batch if batched else agent.select_action
        rewards: list[float] = []
        report = rewards.append if batched else lambda reward: agent.report_reward(self.id, reward)
        state, _ = self.env.reset()
        done = False
        while not done:
            action = select_action(self.id, torch.from_numpy(state))
            state, reward, terminated, truncated, _ = self.env.step(action)
            report(float(reward))
            done = terminated or truncated
        return rewards
