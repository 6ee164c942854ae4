"""Record of what handlers do in the tests of cancellation."""

import threading

from telegrad.testing import Local, eventually


class Log:
    """Record of what handlers have done, in this process."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.begun = threading.Semaphore(0)
        self.local = Local(self)

    def begin(self, line: str = "begun") -> None:
        self.lines.append(line)
        self.begun.release()

    def wait_for_begin(self) -> None:
        assert self.begun.acquire(timeout=10)

    def expect(self, *lines: str) -> None:
        eventually(lambda: self.lines == [*lines], what=f"{lines}, but not {self.lines}")
