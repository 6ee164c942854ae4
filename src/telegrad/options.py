"""Every option of Telegrad, each in one row of one table.

:class:`Options` is the table: name, type, default, environment variable and meaning of an option
stand together, and the documentation is made from them (:func:`option_rows`). A value is taken
from where it is given first: the argument, the environment, the default.

Programs written for ``torch.distributed.rpc`` pass objects of other classes derived from
:class:`RpcBackendOptions`; :func:`as_options` makes an :class:`Options` of any of them.
"""

import dataclasses
import logging
import os
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "TRANSPORTS",
    "Options",
    "RpcBackendOptions",
    "as_options",
    "option_rows",
    "options_markdown",
]

DEFAULT_RPC_TIMEOUT_SEC: Final = 60.0
DEFAULT_INIT_METHOD: Final = "env://"
DEFAULT_NUM_WORKER_THREADS: Final = 16

_KIB: Final = 1 << 10
_MIB: Final = 1 << 20
_GIB: Final = 1 << 30
_LEAST_LIMIT: Final = 64 << 10  # csrc/core/limits.h: kAlwaysTaken

MOST_LANES: Final = 16
"""Connections of one link over TCP, at most."""

TRANSPORTS: Final = ("shm", "unix", "tcp")
"""Every transport there is, best first."""


_LEVELS: Final = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
    "OFF": logging.NOTSET,
}


class RpcBackendOptions:
    """The two options that every backend has; the base class of all option classes.

    Args:
        rpc_timeout: seconds that a call may take where none are given with it; 0 for no limit.
        init_method: where the workers meet: ``env://``, ``tcp://host:port`` or ``file://path``.

    Raises:
        TypeError: ``rpc_timeout`` is not a number, or ``init_method`` not a string.
        RuntimeError: ``rpc_timeout`` is negative.
    """

    rpc_timeout: float
    init_method: str

    def __init__(self, rpc_timeout: float = DEFAULT_RPC_TIMEOUT_SEC, init_method: str = DEFAULT_INIT_METHOD) -> None:
        self.rpc_timeout = _seconds(rpc_timeout)
        self.init_method = _text(init_method, "init_method")

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in vars(self).items())})"


def _incompatible(what: str, wanted: str, value: object) -> TypeError:
    return TypeError(f"__init__(): incompatible constructor arguments. {what} has to be {wanted}, not {value!r}")


def _seconds(value: Any) -> float:
    if isinstance(value, (str, bytes, timedelta)) or not hasattr(value, "__float__"):
        raise _incompatible("rpc_timeout", "a number of seconds", value)
    if not value >= 0:
        raise RuntimeError("RPC Timeout must be non-negative")
    return float(value)


def check_threads(count: Any) -> int:
    """A number of threads, checked as torch checks it."""
    if not hasattr(count, "__index__"):
        raise _incompatible("num_worker_threads", "an integer", count)
    if count <= 0:
        raise RuntimeError(f"num_worker_threads must be positive, got {count}")
    return int(count)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _incompatible(what, "a string", value)
    return value


def _option(default: Any, meaning: str, *, env: str = "", unit: str = "", shown: bool = True) -> Any:
    """One row of the table; ``shown`` is false for what must not be printed."""
    facts = {"default": default, "meaning": meaning, "env": env, "unit": unit}
    return field(default_factory=lambda: _from_environment(default, env), repr=shown, metadata=facts)


def _from_environment(default: Any, variable: str) -> Any:
    """The value of an environment variable, in the type of the default; the default if it is not set."""
    text = os.environ.get(variable) if variable else None
    if text is None:
        return default
    if isinstance(default, tuple):
        return tuple(filter(None, text.replace(" ", "").split(",")))
    if isinstance(default, bool):
        if text not in ("0", "1"):
            raise ValueError(f"environment variable {variable} should be 0 or 1, but is {text!r}")
        return text == "1"
    if not isinstance(default, (int, float)):
        return text
    try:
        return type(default)(text)
    except ValueError:
        raise ValueError(f"environment variable {variable} should hold a number, but is {text!r}") from None


@dataclass(kw_only=True)
class Options(RpcBackendOptions):
    """Telegrad's options. Pass one as ``rpc_backend_options=`` to ``init_rpc``, or to a ``Worker``.

    Raises:
        TypeError: an option that does not exist, or a value of the wrong kind.
        ValueError: a value (or an environment variable) that makes no sense; the text names it.
    """

    rpc_timeout: float = _option(
        DEFAULT_RPC_TIMEOUT_SEC,
        "how long a call may take where nothing is given with it; 0 is no limit",
        env="TELEGRAD_RPC_TIMEOUT",
        unit="s",
    )
    init_method: str = _option(DEFAULT_INIT_METHOD, "where the workers meet: env://, tcp://host:port or file://path")
    ranks_from_environment: bool = _option(
        True,
        "whether `init_rpc`, given neither rank nor world size, takes both from RANK and WORLD_SIZE where a launcher"
        " has set them (with env://; not in a drop-in); else the group is one whose members come and go",
        env="TELEGRAD_RANKS_FROM_ENVIRONMENT",
    )
    num_worker_threads: int = _option(
        DEFAULT_NUM_WORKER_THREADS,
        "how many requests run at once; more threads start while handlers wait for nested"
        " calls, so that these always find one",
        env="TELEGRAD_NUM_WORKER_THREADS",
    )
    secret: str | None = _option(
        None,
        "the group's secret, which every member has to know; without one, whoever reaches the store is a member",
        env="TELEGRAD_SECRET",
        shown=False,
    )
    secret_file: str | None = _option(
        None, "a file with the group's secret (its surrounding white space is ignored)", env="TELEGRAD_SECRET_FILE"
    )
    bind: str | None = _option(
        None, "the address to listen on; without one, that by which the store is reached", env="TELEGRAD_BIND"
    )
    advertise: str | None = _option(
        None,
        "the address that other hosts are told to connect to; without one, the address listened on, or where that is"
        " 0.0.0.0 or ::, that by which the store is reached",
        env="TELEGRAD_ADVERTISE",
    )
    transports: tuple[str, ...] = _option(
        TRANSPORTS,
        "which transports may be used, best first; a pair of workers takes the first that works",
        env="TELEGRAD_TRANSPORTS",
    )
    spin_us: int = _option(
        50,
        "how long a waiting thread looks for its message before it sleeps, where that pays",
        env="TELEGRAD_SPIN_US",
        unit="us",
    )
    max_header_bytes: int = _option(
        256 * _MIB,
        "largest part of a message to this worker that is not tensors; more is an error of the call",
        env="TELEGRAD_MAX_HEADER_BYTES",
        unit="bytes",
    )
    max_message_bytes: int = _option(
        256 * _GIB,
        "all tensors of one message to this worker together; more is an error of the call",
        env="TELEGRAD_MAX_MESSAGE_BYTES",
        unit="bytes",
    )
    request_window_bytes: int = _option(
        64 * _MIB,
        "how many bytes of requests may be under way to one worker before callers wait (replies never do)",
        env="TELEGRAD_REQUEST_WINDOW_BYTES",
        unit="bytes",
    )
    pool_cache_bytes: int = _option(
        256 * _MIB,
        "how much memory for received tensors is kept warm for the next ones",
        env="TELEGRAD_POOL_CACHE_BYTES",
        unit="bytes",
    )
    shared_memory_bytes: int = _option(
        _GIB,
        "how much memory may be shared with one other worker on the same host for tensors on their way to it, and as"
        " much with all of them for what goes to several at once; what does not fit is sent as bytes",
        env="TELEGRAD_SHARED_MEMORY_BYTES",
        unit="bytes",
    )
    tcp_lanes: int = _option(
        4,
        "how many TCP connections to one worker may be used at once for large tensors; more than one are opened only"
        " where much is sent, and used only where they are faster",
        env="TELEGRAD_TCP_LANES",
        unit="connections",
    )
    connect_timeout: float = _option(
        30.0,
        "how long a call may wait for a connection to its worker; 0 is no limit",
        env="TELEGRAD_CONNECT_TIMEOUT",
        unit="s",
    )
    handshake_timeout: float = _option(
        10.0,
        "how long the other side of a fresh connection may take to prove that it is a member",
        env="TELEGRAD_HANDSHAKE_TIMEOUT",
        unit="s",
    )
    shutdown_timeout: float = _option(
        0.0,
        "how long a graceful shutdown waits for the other workers where nothing is given with it; 0 is no limit",
        env="TELEGRAD_SHUTDOWN_TIMEOUT",
        unit="s",
    )
    remote_error_level: str = _option(
        "INFO",
        "level at which a worker logs, by the logger telegrad.remote, what its functions raise for callers, who get it"
        " in any case; OFF logs nothing",
        env="TELEGRAD_REMOTE_ERROR_LEVEL",
    )

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check all values.

        Called when an object is made and again when a worker takes it, since they can be set.

        Raises:
            RuntimeError: ``rpc_timeout`` is negative, or ``num_worker_threads`` not positive.
            TypeError, ValueError: another value makes no sense.
        """
        self.rpc_timeout = _seconds(self.rpc_timeout)
        _text(self.init_method, "init_method")
        self.num_worker_threads = check_threads(self.num_worker_threads)
        for row in dataclasses.fields(self):
            value, unit = getattr(self, row.name), row.metadata["unit"]
            if unit and (not isinstance(value, (int, float)) or value < 0):
                raise ValueError(f"option {row.name} has to be a number of {unit}, 0 or more, not {value!r}")
        for name in ("max_header_bytes", "max_message_bytes"):
            if getattr(self, name) < _LEAST_LIMIT:
                raise ValueError(
                    f"option {name} has to be {_LEAST_LIMIT} or more, not {getattr(self, name)!r}: messages up to there"
                    " are between the workers themselves"
                )
        if self.tcp_lanes not in range(1, MOST_LANES + 1):
            raise ValueError(f"option tcp_lanes has to be a number from 1 to {MOST_LANES}, not {self.tcp_lanes!r}")
        self.transports = tuple(self.transports)
        unknown = set(self.transports) - set(TRANSPORTS)
        if unknown or not self.transports:
            raise ValueError(
                f"option transports has to name some of {', '.join(TRANSPORTS)}, not {', '.join(self.transports)!r}"
            )
        for name in ("secret", "secret_file"):
            if getattr(self, name) == "":
                raise ValueError(
                    f"option {name} (TELEGRAD_{name.upper()}) is empty, which would leave the group without a secret."
                    " Give one, or leave the option out."
                )
        if self.remote_error_level not in _LEVELS:
            raise ValueError(
                f"option remote_error_level has to be one of {', '.join(_LEVELS)}, not {self.remote_error_level!r}"
            )
        if self.secret and self.secret_file:
            raise ValueError("give either secret or secret_file (TELEGRAD_SECRET, TELEGRAD_SECRET_FILE), not both")

    def remote_error_number(self) -> int:
        """``remote_error_level`` as ``logging`` counts levels; 0 for OFF."""
        return _LEVELS[self.remote_error_level]

    def group_secret(self) -> bytes | None:
        """The secret itself, wherever it comes from; None if there is none.

        Raises:
            ValueError: the file is empty.
            OSError: the file cannot be read.
        """
        if self.secret:
            return self.secret.encode()
        if not self.secret_file:
            return None
        with open(self.secret_file, "rb") as f:
            secret = f.read().strip()
        if not secret:
            raise ValueError(f"the file {self.secret_file}, which should hold the group's secret, is empty")
        return secret


def option_rows() -> list[tuple[str, str, str, str]]:
    """The table for documentation: name, default with its unit, environment variable (or nothing), meaning."""
    rows = []
    for row in dataclasses.fields(Options):
        default, unit, env = (row.metadata[fact] for fact in ("default", "unit", "env"))
        if isinstance(default, tuple):
            shown = ",".join(default)
        elif unit == "bytes" and isinstance(default, int):
            shown = _bytes(default)
        else:
            shown = "-" if default is None else f"{default} {unit}".strip()
        rows.append((row.name, shown, env, row.metadata["meaning"]))
    return rows


def _bytes(count: int) -> str:
    for size, name in ((_GIB, "GiB"), (_MIB, "MiB"), (_KIB, "KiB")):
        if count >= size and count % size == 0:
            return f"{count // size} {name}"
    return f"{count} bytes"


def options_markdown() -> str:
    """The table as Markdown."""
    lines = ["| option | default | environment | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {default} | {f'`{env}`' if env else '-'} | {meaning} |"
        for name, default, env, meaning in option_rows()
    ]
    return "\n".join(lines) + "\n"


def as_options(given: RpcBackendOptions | None) -> Options:
    """Telegrad's options from whatever a program passed; what it did not say comes from the environment.

    Raises:
        what :class:`Options` raises.
    """
    if isinstance(given, Options):
        given.validate()
        return given
    options = Options()
    if given is not None:
        options.rpc_timeout = given.rpc_timeout
        options.init_method = given.init_method
        options.num_worker_threads = getattr(given, "num_worker_threads", options.num_worker_threads)
        options.validate()
    return options
