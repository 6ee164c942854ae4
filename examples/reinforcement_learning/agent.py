"""The agent, which owns the policy.

Observers call it for every action. After each episode it learns from all of them.
"""

import random
import threading

import gymnasium
import torch
from observer import ENVIRONMENT, Observer
from policy import Policy, Trajectory, reinforce_loss
from torch import Tensor
from torch.futures import Future

from telegrad import rpc

ENTROPY = 0.02
WARM_UP = 15  # episodes until the learning rate is reached
SMOOTHING = 0.05  # weight of the newest episode in the running reward
LEFT, RIGHT = 0, 1


class Agent:
    """Agent that learns from the workers `observer1`, `observer2`, ..."""

    def __init__(self, observers: int, seed: int, gamma: float) -> None:
        torch.manual_seed(seed)
        self.policy = Policy()
        # More observers make the gradient less noisy, which allows longer steps.
        self.learning_rate = min(0.006 * observers, 0.018)
        self.optimizer = torch.optim.Adam(self.policy.parameters())
        self.gamma = gamma
        self.threshold = float(gymnasium.spec(ENVIRONMENT).reward_threshold or 0.0)
        self.running_reward = 0.0
        self.finished = 0  # episodes

        self.observers: dict[int, rpc.RRef[Observer]] = {}
        self.chance: dict[int, random.Random] = {}
        self.episodes: dict[int, Trajectory] = {}
        for rank in range(1, observers + 1):
            worker = rpc.get_worker_info(f"observer{rank}")
            self.observers[worker.id] = rpc.remote(worker, Observer, args=(seed,))
            # Each observer has its own random generator, so a run does not depend on the order of calls.
            self.chance[worker.id] = random.Random(1000 * seed + worker.id)

        # For the batched variant: the observers in an episode, and those that wait for an action.
        self.lock = threading.Lock()
        self.playing: set[int] = set()
        self.waiting: dict[int, tuple[Tensor, Future[int]]] = {}

    # The observers call these three methods. They run on threads of the agent's worker, several at a time.

    @torch.no_grad()
    def select_action(self, observer: int, state: Tensor) -> int:
        """Draw an action for one state, `[4]`."""
        return self._draw(observer, state, self.policy(state.unsqueeze(0))[0].tolist())

    @rpc.functions.async_execution
    def select_action_in_batch(self, observer: int, state: Tensor) -> Future[int]:
        """Draw actions for all observers in one forward pass of the policy.

        The result is a future: no thread waits for the other observers. The last call of a batch completes all futures.
        """
        action: Future[int] = Future()
        with self.lock:
            self.waiting[observer] = state, action
        self._serve_batch_if_complete()
        return action

    def report_reward(self, observer: int, reward: float) -> None:
        self.episodes[observer].rewards.append(reward)

    # The agent's own loop calls these two methods.

    def run_episode(self, batched: bool = False) -> int:
        """Let every observer play one episode at the same time; return the total of steps."""
        self.episodes = {observer: Trajectory() for observer in self.observers}
        self.playing = set(self.observers)
        me = rpc.RRef(self)
        running = []
        for observer, rref in self.observers.items():
            episode = rref.rpc_async().run_episode(me, batched)
            running.append(episode.then(lambda done, observer=observer: self._leave_batch(observer, done)))
        torch.futures.wait_all(running)
        return sum(len(episode.rewards) for episode in self.episodes.values())

    def finish_episode(self) -> float:
        """Learn from the episodes just played; return the lowest reward of an observer."""
        reward = min(sum(episode.rewards) for episode in self.episodes.values())
        self.running_reward += SMOOTHING * (reward - self.running_reward)
        # Small steps at first, when chance could lead the policy into a local optimum, and near the goal, to keep a
        # good policy.
        self.finished += 1
        rate = min(1, self.finished / WARM_UP) * max(0.05, 1 - self.running_reward / self.threshold)
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate * rate
        self.optimizer.zero_grad()
        reinforce_loss(self.policy, list(self.episodes.values()), self.gamma, ENTROPY).backward()
        self.optimizer.step()
        return reward

    def _draw(self, observer: int, state: Tensor, probabilities: list[float]) -> int:
        action = self.chance[observer].choices((LEFT, RIGHT), probabilities)[0]
        self.episodes[observer].states.append(state)
        self.episodes[observer].actions.append(action)
        return action

    def _leave_batch(self, observer: int, episode: Future[list[float]]) -> None:
        """Remove an observer from the batch at the end of its episode.

        The others no longer wait for its state.
        """
        with self.lock:
            self.playing.discard(observer)
        self._serve_batch_if_complete()
        self.episodes[observer].rewards += episode.value()  # raises errors of the episode

    @torch.no_grad()
    def _serve_batch_if_complete(self) -> None:
        with self.lock:
            if not self.waiting or self.waiting.keys() != self.playing:
                return
            batch, self.waiting = self.waiting, {}
        probabilities = self.policy(torch.stack([state for state, _ in batch.values()])).tolist()
        for (observer, (state, action)), row in zip(batch.items(), probabilities, strict=True):
            action.set_result(self._draw(observer, state, row))
