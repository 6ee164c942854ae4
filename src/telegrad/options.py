"""Options of Telegrad, as one table.

`Options` is the table: it has name, type, default, environment variable and meaning of each option.
The file is longer than others, because the table is in one place.
`option_rows` generates the documentation from it. An argument overrides the environment, which overrides the
default.

Programs written for ``torch.distributed.rpc`` pass objects of other classes derived from `RpcBackendOptions`;
`as_options` converts them to `Options`.
"""

import dataclasses
import difflib
import functools
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, Final

from telegrad.errors import is_drop_in
from telegrad.wire import ALWAYS_TAKEN

logger: logging.Logger = logging.getLogger("telegrad")

__all__ = [
    "DEFAULT_INIT_METHOD",
    "DEFAULT_NUM_WORKER_THREADS",
    "DEFAULT_RPC_TIMEOUT_SEC",
    "LEAST_SECRET_BYTES",
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
_LEAST_LIMIT: Final = ALWAYS_TAKEN

_MOST: Final = (1 << 31) - 1  # what 32 bits of a message can say, with room for more

_MOST_COUNT: Final = (1 << 63) - 1  # what the core's counters can hold
_MOST_THREADS: Final = 1 << 16  # more than a process can start with the limits of common systems
_LONGEST: Final = 1e9  # s; telegrad.timeouts.FOREVER

LEAST_SECRET_BYTES: Final = 16
"""Minimum length of a group's secret."""

MOST_LANES: Final = 16
"""Maximum number of TCP connections of one link."""

_RANGES: Final = {
    "max_call_depth": (1, _MOST),
    "max_in_flight": (1, _MOST),
    "max_waiting_messages": (1, _MOST),
    "max_objects": (1, _MOST),
    "max_peers": (1, _MOST),
    "max_unauthenticated": (1, _MOST),
    "tcp_lanes": (1, MOST_LANES),
}
_MORE_THAN_ZERO: Final = ("handshake_timeout", "member_lease")
_NEVER_EMPTY: Final = {
    **dict.fromkeys(("secret", "secret_file"), "would leave the group without a secret"),
    **dict.fromkeys(("tls_cert", "tls_key", "tls_ca"), "would leave the worker without certificates"),
    "advertise": "names no address",
}
_AS_IN_TORCH: Final = ("rpc_timeout", "init_method", "num_worker_threads")  # with torch's errors

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
    """Base class of all option classes, with the two options of every backend.

    Args:
        rpc_timeout: Default timeout of a call in seconds; 0 means no limit.
        init_method: Address of the rendezvous: ``env://``, ``tcp://host:port``, ``file://path`` or
            ``etcd://host:port/group``.

    Raises:
        TypeError: ``rpc_timeout`` is not a number, or ``init_method`` not a string.
        RuntimeError: ``rpc_timeout`` is negative.

    Example::

        options = rpc.RpcBackendOptions(rpc_timeout=30, init_method="tcp://127.0.0.1:29500")
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
    """Return a number of threads, checked like in torch."""
    if not hasattr(count, "__index__"):
        raise _incompatible("num_worker_threads", "an integer", count)
    if count <= 0:
        raise RuntimeError(f"num_worker_threads must be positive, got {count}")
    return int(count)


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise _incompatible(what, "a string", value)
    return value


def _check_value(row: dataclasses.Field[Any], value: Any) -> None:
    """Check the type of an option's value, and the range of a number."""
    if row.type is bool:
        if value is not True and value is not False:
            raise TypeError(
                f"option {row.name} has to be True or False, not {value!r}: pass a bool, or set {row.metadata['env']}"
                " to 1 or 0"
            )
    elif row.type in (int, float):
        _check_number(row, value)
    elif row.type in (str, str | None) and not isinstance(value, str) and (value is not None or row.type is str):
        wanted = "a string" if row.type is str else "a string or None"
        given = repr(value) if row.repr else f"an object of type {type(value).__name__}"
        raise TypeError(f"option {row.name} has to be {wanted}, not {given}")


def _names(value: Any, name: str) -> tuple[str, ...]:
    is_list = isinstance(value, Iterable) and not isinstance(value, (str, bytes))
    names = tuple(value) if is_list else ()
    if not is_list or not all(isinstance(each, str) for each in names):
        raise TypeError(f"option {name} has to be a tuple of names, such as ('tcp',), not {value!r}")
    return names


def _check_number(row: dataclasses.Field[Any], value: Any) -> None:
    name, is_whole = row.name, row.type is int
    least: float
    most: float
    kind = "a whole number" if is_whole and isinstance(value, float) else "a number"
    if name in _RANGES:
        least, most = _RANGES[name]
        text = f"option {name} has to be {kind} from {least} to {most}, not {value!r}"
    else:
        least, most = 0, _MOST if name == "spin_us" else _MOST_COUNT if is_whole else _LONGEST
        bound = "more than 0" if name in _MORE_THAN_ZERO else "0 or more"
        text = f"option {name} has to be {kind} of {row.metadata['unit']}, {bound}, not {value!r}"
    if isinstance(value, bool) or not isinstance(value, int if is_whole else (int, float)):
        raise TypeError(text)
    if not value >= least or (value == 0 and name in _MORE_THAN_ZERO):  # also if it is not a number (NaN)
        raise ValueError(text)
    if value > most:
        raise ValueError(f"{text}: at most {most:,}")


def _option(
    default: Any, meaning: str, *, env: str = "", unit: str = "", shown: bool = True, in_drop_in: Any = None
) -> Any:
    """Return one row of the table.

    ``shown`` is False for secrets; ``in_drop_in`` is the default under the drop-in, if that differs.
    """
    facts = {"default": default, "meaning": meaning, "env": env, "unit": unit}

    def given() -> Any:
        return _from_environment(default if in_drop_in is None or not is_drop_in() else in_drop_in, env)

    return field(default_factory=given, repr=shown, metadata=facts)


def _from_environment(default: Any, variable: str) -> Any:
    """Return an environment variable in the type of the default, or the default."""
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
        kind = "whole number" if isinstance(default, int) else "number"
        raise ValueError(f"environment variable {variable} should hold a {kind}, but is {text!r}") from None


@dataclass(kw_only=True)
class Options(RpcBackendOptions):
    """Telegrad's options.

    Pass one as ``rpc_backend_options=`` to ``init_rpc``, or to a ``Worker``.

    Raises:
        TypeError: An option does not exist, or a value has the wrong type.
        ValueError: A value or an environment variable is invalid; the text names it.

    Example::

        options = rpc.Options(rpc_timeout=30, num_worker_threads=8)
        rpc.init_rpc("worker0", rank=0, world_size=2, rpc_backend_options=options)
        rpc.shutdown()
    """

    rpc_timeout: float = _option(
        DEFAULT_RPC_TIMEOUT_SEC,
        "the default timeout of a call; 0 means no limit",
        env="TELEGRAD_RPC_TIMEOUT",
        unit="s",
    )
    init_method: str = _option(
        DEFAULT_INIT_METHOD,
        "where workers find each other: env://, tcp://host:port, file://path or etcd://host:port/group",
    )
    ranks_from_environment: bool = _option(
        True,
        "whether `init_rpc`, given neither rank nor world size, takes both from RANK and WORLD_SIZE if they are set"
        " (with env://; not in a drop-in); otherwise the worker joins a dynamic group",
        env="TELEGRAD_RANKS_FROM_ENVIRONMENT",
    )
    num_worker_threads: int = _option(
        DEFAULT_NUM_WORKER_THREADS,
        f"how many requests run at once, at most {_MOST_THREADS}; additional threads start while handlers wait for"
        " nested calls, so a nested call always gets a thread",
        env="TELEGRAD_NUM_WORKER_THREADS",
    )
    secret: str | None = _option(
        None,
        "the group's secret, which every member must know, 16 bytes or more; without one, any process that reaches the"
        " store can join",
        env="TELEGRAD_SECRET",
        shown=False,
    )
    secret_file: str | None = _option(
        None, "a file with the group's secret (surrounding white space is ignored)", env="TELEGRAD_SECRET_FILE"
    )
    encryption: str = _option(
        "auto",
        "auto encrypts TCP connections with TLS if the group was given a secret or certificates; off never does, for"
        " networks that are trusted; equal on all workers",
        env="TELEGRAD_ENCRYPTION",
    )
    tls_cert: str | None = _option(
        None,
        "a PEM file with the worker's certificate, which must name the worker, and those between it and `tls_ca`",
        env="TELEGRAD_TLS_CERT",
    )
    tls_key: str | None = _option(None, "a PEM file with the certificate's private key", env="TELEGRAD_TLS_KEY")
    tls_ca: str | None = _option(
        None, "a PEM file with the authority that has signed the certificates of all workers", env="TELEGRAD_TLS_CA"
    )
    expose: str = _option(
        "all",
        "which functions and methods other workers may call: all; listed allows those of `telegrad.rpc.expose` only",
        env="TELEGRAD_EXPOSE",
    )
    allow_pickle: bool = _option(
        True,
        "whether messages may contain pickles, which can run any code when they are loaded; without them only plain"
        " data, tensors, references and types of `telegrad.rpc.register_type` travel",
        env="TELEGRAD_ALLOW_PICKLE",
    )
    bind: str | None = _option(
        None,
        "the address to listen on, without a port; by default, or if it is empty, that of the interface named by"
        " TP_SOCKET_IFNAME, or else the address used to reach the store",
        env="TELEGRAD_BIND",
    )
    advertise: str | None = _option(
        None,
        "the address that other hosts connect to; by default, the address listened on, or the address used to reach the"
        " store if that is 0.0.0.0 or ::",
        env="TELEGRAD_ADVERTISE",
    )
    transports: tuple[str, ...] = _option(
        TRANSPORTS,
        "the transports that may be used, best first; each pair of workers uses the first that works",
        env="TELEGRAD_TRANSPORTS",
    )
    spin_us: int = _option(
        50,
        "how long a waiting thread spins before it sleeps, where spinning helps",
        env="TELEGRAD_SPIN_US",
        unit="us",
    )
    max_header_bytes: int = _option(
        256 * _MIB,
        f"the maximum size of the non-tensor part of a message to this worker, {_LEAST_LIMIT} or more; a larger message"
        " fails its call",
        env="TELEGRAD_MAX_HEADER_BYTES",
        unit="bytes",
    )
    max_message_bytes: int = _option(
        256 * _GIB,
        f"the maximum size of all tensors in one message to this worker, {_LEAST_LIMIT} or more; a larger message fails"
        " its call",
        env="TELEGRAD_MAX_MESSAGE_BYTES",
        unit="bytes",
    )
    request_window_bytes: int = _option(
        64 * _MIB,
        "how many bytes of requests to one worker may be outstanding before callers block, and how many bytes of"
        " replies a caller may leave unread before its further requests wait (replies themselves never do)",
        env="TELEGRAD_REQUEST_WINDOW_BYTES",
        unit="bytes",
    )
    pool_cache_bytes: int = _option(
        256 * _MIB,
        "how much freed memory of received tensors is kept for reuse",
        env="TELEGRAD_POOL_CACHE_BYTES",
        unit="bytes",
    )
    shared_memory_bytes: int = _option(
        _GIB,
        "how much memory may be shared with one other worker on the same host for tensors sent to it, and again as much"
        " with all of them for multicast; what does not fit is sent as bytes",
        env="TELEGRAD_SHARED_MEMORY_BYTES",
        unit="bytes",
    )
    arena_budget_bytes: int = _option(
        4 * _GIB,
        "how much memory this worker keeps for shared tensors (`shared_memory_bytes`, with all workers of the host) and"
        " for reuse (`pool_cache_bytes`) in all; what does not fit is sent as bytes, or freed",
        env="TELEGRAD_ARENA_BUDGET_BYTES",
        unit="bytes",
    )
    max_call_depth: int = _option(
        64,
        "how deep calls may be nested: a call that a handler makes is one deeper than the handler's own; a deeper call"
        " fails with Overloaded",
        env="TELEGRAD_MAX_CALL_DEPTH",
        unit="calls",
    )
    max_in_flight: int = _option(
        65536,
        "how many requests to one worker may have no reply before callers block (the less of both workers' options"
        " counts); a call that cannot wait, in a handler or on an event loop, fails with Overloaded",
        env="TELEGRAD_MAX_IN_FLIGHT",
        unit="requests",
    )
    max_in_flight_bytes: int = _option(
        16 * _GIB,
        "how many bytes the requests of more than 64 KiB to one worker may have that have no reply before callers block"
        " (the less of both workers' options counts; while half of it is free, a call may have any size); a call that"
        " cannot wait fails with Overloaded",
        env="TELEGRAD_MAX_IN_FLIGHT_BYTES",
        unit="bytes",
    )
    send_queue_bytes: int = _option(
        _GIB,
        "how many bytes may wait for one worker that reads too slowly, or has no connection yet; a further call, or"
        " large result, fails with Overloaded",
        env="TELEGRAD_SEND_QUEUE_BYTES",
        unit="bytes",
    )
    max_waiting_messages: int = _option(
        65536,
        "how many messages may wait for a connection to one worker before callers block, and how many requests may wait"
        " for references at their callee; what cannot wait fails with Overloaded",
        env="TELEGRAD_MAX_WAITING_MESSAGES",
        unit="messages",
    )
    max_objects: int = _option(
        32 * _MIB,
        "how many objects a message to this worker may become (numbers, strings and containers count 1, tensors 16),"
        f" {_LEAST_LIMIT} or more; a larger one fails its call with Overloaded",
        env="TELEGRAD_MAX_OBJECTS",
        unit="objects",
    )
    max_peers: int = _option(
        16384,
        "how many workers this worker knows at once, with itself; a further one is refused",
        env="TELEGRAD_MAX_PEERS",
        unit="workers",
    )
    max_unauthenticated: int = _option(
        64,
        "how many accepted connections may be in their handshake, but at most an eighth of the process's descriptors; a"
        " further one displaces the oldest, of the same source if that has a fourth of them",
        env="TELEGRAD_MAX_UNAUTHENTICATED",
        unit="connections",
    )
    retry_results_bytes: int = _option(
        64 * _MIB,
        "how many bytes of results of calls with a `telegrad.rpc.Retry` this worker keeps for further attempts, and at"
        " most 4096 results; the oldest are dropped first, and their functions do not run again",
        env="TELEGRAD_RETRY_RESULTS_BYTES",
        unit="bytes",
    )
    warn_references: int = _option(
        1_000_000,
        "at how many remote references a worker logs a warning, once; 0 means never",
        env="TELEGRAD_WARN_REFERENCES",
        unit="references",
    )
    warn_contexts: int = _option(
        10_000,
        "at how many autograd contexts a worker logs a warning, once; 0 means never",
        env="TELEGRAD_WARN_CONTEXTS",
        unit="contexts",
    )
    tcp_lanes: int = _option(
        4,
        f"the maximum number of TCP connections to one worker for large tensors, up to {MOST_LANES}; additional"
        " connections are opened only when much data is sent, and used only if they are faster",
        env="TELEGRAD_TCP_LANES",
        unit="connections",
    )
    connect_timeout: float = _option(
        30.0,
        "how long a call may wait for a connection to its worker; 0 means no limit",
        env="TELEGRAD_CONNECT_TIMEOUT",
        unit="s",
    )
    handshake_timeout: float = _option(
        10.0,
        "how long the peer of a new connection may take to prove that it is a member",
        env="TELEGRAD_HANDSHAKE_TIMEOUT",
        unit="s",
    )
    heartbeat: float = _option(
        5.0,
        "interval of the failure detector on TCP connections: a peer that is silent for half of it is asked for a sign"
        " of life, and is lost within three times this time; 0 means never",
        env="TELEGRAD_HEARTBEAT",
        unit="s",
    )
    resume: bool = _option(
        True,
        "whether a session outlives its TCP connection: messages that had not arrived are sent again over a new"
        " connection, and run once; without it, or with heartbeat 0, calls and references end with the connection",
        env="TELEGRAD_RESUME",
    )
    local_heartbeat: float = _option(
        30.0,
        "the same for connections within a host; the kernel reports the end of a process there at once, so this finds"
        " only stopped processes, and debuggers stop processes too",
        env="TELEGRAD_LOCAL_HEARTBEAT",
        unit="s",
    )
    member_lease: float = _option(
        10.0,
        "how long a worker may be silent at the group's store, which it contacts eight times within this time, until"
        " the group has lost it; the other workers apply the value of that worker",
        env="TELEGRAD_MEMBER_LEASE",
        unit="s",
    )
    shutdown_timeout: float = _option(
        0.0,
        "the default timeout of a graceful shutdown; 0 means no limit",
        env="TELEGRAD_SHUTDOWN_TIMEOUT",
        unit="s",
    )
    stuck_handler_timeout: float = _option(
        300.0,
        "how long a handler may run before the worker logs a warning with its function, caller and stack; 0 means no"
        " warnings",
        env="TELEGRAD_STUCK_HANDLER_TIMEOUT",
        unit="s",
    )
    dump_on_sigusr2: bool = _option(
        False,
        "whether the signal SIGUSR2 writes the stacks of all threads to stderr, and logs `telegrad.rpc.debug_info` of"
        " each worker of the process",
        env="TELEGRAD_DUMP_ON_SIGUSR2",
    )
    plain_backward: bool = _option(
        False,
        "whether calls outside of autograd contexts record tensors that require grad, so that ``loss.backward()``"
        " continues on the other workers and adds to their ``.grad``; see `telegrad.autograd.plain`",
        env="TELEGRAD_PLAIN_BACKWARD",
    )
    inherit_from_caller: bool = _option(
        True,
        "whether a function that this worker runs for a caller has the caller's deadline, which limits the calls that"
        " the function makes, and the ``no_grad``, inference mode and autocast of the caller; False by default"
        " under the drop-in, as in torch",
        env="TELEGRAD_INHERIT_FROM_CALLER",
        in_drop_in=False,
    )
    faults: str | None = _option(
        None, "rules of faults, for tests: a `telegrad.testing.faults.Plan`", env="TELEGRAD_FAULTS"
    )
    remote_error_level: str = _option(
        "INFO",
        "the level at which a worker logs, with the logger telegrad.remote, exceptions that its functions raise for"
        " callers; the callers get them in any case; OFF logs nothing",
        env="TELEGRAD_REMOTE_ERROR_LEVEL",
    )

    def __post_init__(self) -> None:
        self.validate()

    def validate(self) -> None:
        """Check all values.

        Called when an object is created, and again when a worker receives it, because options can be assigned.

        Raises:
            RuntimeError: ``rpc_timeout`` is negative, or ``num_worker_threads`` is not positive.
            TypeError: A value does not have the type of its option. A float may be an int, and an int is not a bool.
            ValueError: Another value is invalid; of numbers of seconds, only ``rpc_timeout`` may be infinite.
        """
        for name, wanted in (("rpc_timeout", "a number of seconds"), ("num_worker_threads", "an integer")):
            if isinstance(getattr(self, name), bool):
                raise _incompatible(name, wanted, getattr(self, name))
        self.rpc_timeout = _seconds(self.rpc_timeout)
        _text(self.init_method, "init_method")
        self.num_worker_threads = check_threads(self.num_worker_threads)
        if self.num_worker_threads > _MOST_THREADS:
            raise ValueError(f"option num_worker_threads is at most {_MOST_THREADS}, not {self.num_worker_threads}")
        for row in dataclasses.fields(self):
            if row.name not in _AS_IN_TORCH:
                _check_value(row, getattr(self, row.name))
        for name in ("max_header_bytes", "max_message_bytes", "max_objects"):
            if getattr(self, name) < _LEAST_LIMIT:
                raise ValueError(
                    f"option {name} has to be {_LEAST_LIMIT} or more, not {getattr(self, name)!r}: Telegrad's own"
                    " messages, in a large group, need as much"
                )
        self.transports = _names(self.transports, "transports")
        unknown = set(self.transports) - set(TRANSPORTS)
        if unknown or not self.transports:
            raise ValueError(
                f"option transports has to name some of {', '.join(TRANSPORTS)}, not {', '.join(self.transports)!r}"
            )
        if self.bind and (self.bind.count(":") == 1 or "]:" in self.bind):
            raise ValueError(
                f"option bind has to be an address without a port, not {self.bind!r}: the system selects it"
            )
        for name, effect in _NEVER_EMPTY.items():
            if getattr(self, name) == "":
                raise ValueError(
                    f"option {name} (TELEGRAD_{name.upper()}) is empty, which {effect}. Give one, or leave the option"
                    " out (unset the variable)."
                )
        if self.secret and len(self.secret.encode()) < LEAST_SECRET_BYTES:
            raise ValueError(
                f"option secret (TELEGRAD_SECRET) has {len(self.secret.encode())} bytes. Give at least"
                f" {LEAST_SECRET_BYTES}, for example what `openssl rand -hex 32` prints."
            )
        if self.encryption not in ("auto", "off"):
            raise ValueError(f"option encryption has to be auto or off, not {self.encryption!r}")
        if self.expose not in ("all", "listed"):
            raise ValueError(f"option expose has to be all or listed, not {self.expose!r}")
        if len({path is not None for path in (self.tls_cert, self.tls_key, self.tls_ca)}) > 1:
            raise ValueError("give all of the options tls_cert, tls_key and tls_ca, or none of them")
        if self.tls_cert and self.encryption == "off":
            raise ValueError("certificates (tls_cert) need encryption: leave out one of the two options")
        if self.remote_error_level not in _LEVELS:
            raise ValueError(
                f"option remote_error_level has to be one of {', '.join(_LEVELS)}, not {self.remote_error_level!r}"
            )
        if self.secret and self.secret_file:
            raise ValueError("give either secret or secret_file (TELEGRAD_SECRET, TELEGRAD_SECRET_FILE), not both")

    def remote_error_number(self) -> int:
        """Return ``remote_error_level`` as a level of ``logging``; 0 for OFF."""
        return _LEVELS[self.remote_error_level]


def option_rows() -> list[tuple[str, str, str, str]]:
    """Return the table for the documentation.

    Returns:
        A row per option: name, default with its unit, environment variable (empty if none), meaning.
    """
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
    """Return the table as Markdown."""
    lines = ["| option | default | environment | meaning |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {default} | {f'`{env}`' if env else '-'} | {meaning} |"
        for name, default, env, meaning in option_rows()
    ]
    return "\n".join(lines) + "\n"


@functools.cache
def _report_misspelt_variables() -> None:
    """Log a warning, once, for each variable with nearly the name of an option.

    Other names are left alone: Kubernetes makes ``TELEGRAD_PORT`` and the like from a service named telegrad.
    """
    prefix = "TELEGRAD_"
    known = [row.metadata["env"].removeprefix(prefix) for row in dataclasses.fields(Options) if row.metadata["env"]]
    for variable in sorted(name for name in os.environ if name.startswith(prefix)):
        name = variable.removeprefix(prefix)
        meant = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
        if meant and name not in known:
            logger.warning(
                "the environment variable %s is ignored: Telegrad has no such option. Is %s%s meant?",
                variable, prefix, meant[0],
            )  # fmt: skip


def as_options(given: RpcBackendOptions | None) -> Options:
    """Convert the options of a program; missing ones come from the environment.

    Args:
        given: Options of any backend, or None.

    Raises:
        TypeError: As for `Options`.
        ValueError: As for `Options`.
        RuntimeError: As for `Options.validate`.
    """
    _report_misspelt_variables()
    if isinstance(given, Options):
        given.validate()
        return given
    options = Options()
    if given is not None:
        options.rpc_timeout = _seconds(given.rpc_timeout)
        options.init_method = given.init_method
        options.num_worker_threads = check_threads(getattr(given, "num_worker_threads", options.num_worker_threads))
        options.validate()
    return options
