"""View of the run: a live table or plain lines, and a picture at the end."""

from pathlib import Path
from types import TracebackType
from typing import Self

from matplotlib import rc_context
from matplotlib.figure import Figure
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table


class View:
    """Progress of a run; a context manager that keeps the rewards for `draw_curve`.

    On a terminal the newest figures are updated in place. Otherwise a line is printed every `log_interval` episodes.
    """

    def __init__(self, title: str, threshold: float, log_interval: int) -> None:
        self.title, self.threshold, self.log_interval = title, threshold, log_interval
        self.rewards: list[float] = []
        self.running_rewards: list[float] = []
        self.console = Console(highlight=False)
        self.live = Live(console=self.console, refresh_per_second=8) if self.console.is_terminal else None

    def __enter__(self) -> Self:
        if self.live is not None:
            self.live.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if self.live is not None:
            self.live.stop()

    def update(self, reward: float, running_reward: float, calls_per_second: float) -> None:
        """Show one more episode."""
        self.rewards.append(reward)
        self.running_rewards.append(running_reward)
        episode = len(self.rewards)
        if self.live is not None:
            self.live.update(self._table(episode, reward, running_reward, calls_per_second))
        elif episode % self.log_interval == 0:
            self.print(
                f"Episode {episode}\tLast reward: {reward:.0f}\tRunning reward: {running_reward:.1f}"
                f"\tCalls per second: {calls_per_second:,.0f}"
            )

    def print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    def draw_curve(self, folder: Path) -> Path:
        """Write a PNG and an SVG of the rewards so far; return the path of the PNG.

        Creates the folder.
        """
        figure = Figure(figsize=(9, 3.8), layout="constrained")
        axes = figure.subplots()
        episodes = range(1, len(self.rewards) + 1)
        marker = "o" if len(self.rewards) < 20 else None  # a line of one point is invisible
        axes.plot(episodes, self.rewards, color="tab:blue", alpha=0.3, marker=marker, label="least successful observer")
        axes.plot(episodes, self.running_rewards, color="tab:blue", marker=marker, label="running reward")
        axes.axhline(self.threshold, color="tab:green", linestyle="--", label=f"solved: {self.threshold:.0f}")
        axes.set(title=self.title, xlabel="episode", ylabel="reward")
        axes.legend()
        folder.mkdir(parents=True, exist_ok=True)
        # Text as text, which is small; equal curves give equal files.
        with rc_context({"svg.fonttype": "none", "svg.hashsalt": "cartpole"}):
            figure.savefig(folder / "cartpole.svg", metadata={"Date": None})
        path = folder / "cartpole.png"
        figure.savefig(path, dpi=120)
        return path

    def _table(self, episode: int, reward: float, running_reward: float, calls_per_second: float) -> Table:
        table = Table(title=self.title)
        for heading in (
            "Episode",
            "Last reward",
            "Running reward",
            f"Goal {self.threshold:.0f}",
            "Calls per second",
        ):
            table.add_column(heading, justify="right")
        way = ProgressBar(total=self.threshold, completed=min(running_reward, self.threshold), width=24)
        table.add_row(str(episode), f"{reward:.0f}", f"{running_reward:.1f}", way, f"{calls_per_second:,.0f}")
        return table
