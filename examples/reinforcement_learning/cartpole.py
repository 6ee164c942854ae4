"""Distributed reinforcement learning: an agent and its observers balance a pole.

Each is a process. The observers play CartPole and ask the agent for every action by a remote call. The agent learns
from all of them until the running reward passes the environment's own threshold. README.md explains the design.
"""

import argparse
import os
import socket
import sys
import time
from multiprocessing.queues import SimpleQueue
from pathlib import Path

import torch
import torch.multiprocessing as mp
from agent import Agent

from telegrad import rpc

WARM_UP = 3  # episodes per variant that are not measured


def run_worker(rank: int, args: argparse.Namespace, result: SimpleQueue[bool]) -> None:
    """Run one process: rank 0 is the agent, all others are observers."""
    torch.set_num_threads(1)  # the tensors are tiny, and there are more processes than cores
    if rank == 0:
        rpc.init_rpc("agent", rank=rank, world_size=args.observers + 1)
        result.put(learn(args))
    else:
        rpc.init_rpc(f"observer{rank}", rank=rank, world_size=args.observers + 1)
        # Observers only serve the agent's calls, which shutdown does until all have called it.
    rpc.shutdown()


def learn(args: argparse.Namespace) -> bool:
    """Run the agent; return whether it solved the environment in `args.max_episodes`."""
    from view import View  # late, so that only this process loads matplotlib and rich

    agent = Agent(args.observers, args.seed, args.gamma)
    variant = "batched" if args.batched else "plain"
    title = f"CartPole, {args.observers} observers, {variant} calls, seed {args.seed}"
    with View(title, agent.threshold, args.log_interval) as view:
        view.print(f"Running until the running reward passes {agent.threshold:.0f}. Ctrl+C to stop.")
        calls, start = 0, time.perf_counter()
        while agent.running_reward <= agent.threshold and len(view.rewards) < args.max_episodes:
            calls += (1 if args.batched else 2) * agent.run_episode(args.batched) + args.observers
            reward = agent.finish_episode()
            view.update(reward, agent.running_reward, calls / (time.perf_counter() - start))
        seconds = time.perf_counter() - start
    if args.batched and not args.smoke:
        view.print(compare(agent, args.compare_episodes))
    curve = view.draw_curve(args.out)
    solved = agent.running_reward > agent.threshold
    view.print(
        f"{'Solved' if solved else 'Not solved'}: running reward {agent.running_reward:.1f} after "
        f"{len(view.rewards)} episodes, {calls:,} remote calls in {seconds:.1f} s; curve in {curve}"
    )
    return solved


def compare(agent: Agent, episodes: int) -> str:
    """Play on without learning, in turn in the plain and the batched variant.

    The first episodes are not measured.
    """
    steps, seconds = {False: 0, True: 0}, {False: 0.0, True: 0.0}
    for episode in range(-WARM_UP, episodes):
        for batched in (False, True):
            start = time.perf_counter()
            played = agent.run_episode(batched)
            if episode >= 0:
                steps[batched] += played
                seconds[batched] += time.perf_counter() - start
    plain, batch = (steps[batched] / seconds[batched] for batched in (False, True))
    return f"Steps per second: plain {plain:,.0f}, batched {batch:,.0f}; speed-up {batch / plain:.2f}"


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="A CartPole agent learns from observers in other processes.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--observers", type=int, default=3, metavar="N", help="number of observers (default 3)")
    size.add_argument("--world-size", type=int, metavar="W", help="number of processes: the agent and W - 1 observers")
    parser.add_argument("--batched", action="store_true", help="one policy forward for all observers; measure its gain")
    parser.add_argument("--seed", type=int, default=1, help="seed of policy, actions and environments (default 1)")
    parser.add_argument("--gamma", type=float, default=0.99, help="how much future rewards count (default 0.99)")
    parser.add_argument("--log-interval", type=int, default=10, metavar="N", help="episodes between two log lines")
    parser.add_argument("--max-episodes", type=int, default=600, metavar="N", help="give up, with status 1, after N")
    parser.add_argument("--compare-episodes", type=int, default=10, metavar="N", help="episodes per variant measured")
    out = Path(__file__).parent / "out"
    parser.add_argument("--out", type=Path, default=out, metavar="FOLDER", help="folder of the reward curve (out)")
    parser.add_argument("--smoke", action="store_true", help="a few episodes to check that it runs; always status 0")
    args = parser.parse_args()
    if args.world_size is not None:
        args.observers = args.world_size - 1
    if args.observers < 1 or args.log_interval < 1 or args.max_episodes < 1 or args.compare_episodes < 1:
        parser.error("there must be at least one observer, and every number of episodes must be positive")
    if args.smoke:
        args.max_episodes, args.compare_episodes, args.log_interval = 3, 2, 1
    return args


def free_port() -> int:
    with socket.create_server(("localhost", 0)) as server:
        return int(server.getsockname()[1])


def main() -> int:
    args = parse_args()
    # The children inherit these. `init_rpc` meets at the first two, as torch's `init_process_group` does.
    os.environ.setdefault("MASTER_ADDR", "localhost")
    os.environ.setdefault("MASTER_PORT", str(free_port()))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    result: SimpleQueue[bool] = mp.get_context("spawn").SimpleQueue()
    try:
        mp.spawn(run_worker, args=(args, result), nprocs=args.observers + 1)
    except KeyboardInterrupt:
        return 130
    return 0 if result.get() or args.smoke else 1


if __name__ == "__main__":
    sys.exit(main())
