"""The drop-in: programs written for ``torch.distributed.rpc`` run on Telegrad as they are.

:func:`install` points torch's names at Telegrad's in this process: ``torch.distributed.rpc`` and
``.autograd``, ``torch.distributed.optim.DistributedOptimizer`` and ``torch.distributed.nn.RemoteModule``,
however they are imported afterwards. ``telegrad run --drop-in program.py`` does the same from
outside, in every process that the program starts as well.

The modules below this one are what torch's names point at: the public names are those of
:mod:`telegrad.rpc`, the very same objects; the private ones that programs use are added.
"""

import importlib
import os
import sys
import threading
from pathlib import Path

from telegrad.compat.redirect import Redirect

__all__ = ["child_environment", "install", "installed", "uninstall"]

_BOOTSTRAP = Path(__file__).with_name("bootstrap")
_lock = threading.RLock()
_active: Redirect | None = None


def install() -> None:
    """Points torch's RPC modules at Telegrad's, in this process. Calling it again changes nothing.

    A program that has imported torch's modules before keeps what it has, so call it first: before
    ``import torch.distributed.rpc``. Processes that are forked have it too; processes that are
    spawned have to call it themselves, or be started with :func:`child_environment`.

    Raises:
        RuntimeError: torch's own RPC is running in this process.
    """
    global _active
    with _lock:
        if _active is not None:
            return
        importlib.import_module("torch")
        rpc = sys.modules.get("torch.distributed.rpc")
        if rpc is not None and getattr(rpc, "_is_current_rpc_agent_set", lambda: False)():
            raise RuntimeError(
                "torch.distributed.rpc is running in this process, so Telegrad cannot take its place."
                " Call telegrad.compat.install() before init_rpc, best before importing torch.distributed.rpc."
            )
        redirect = Redirect()
        redirect.start()
        importlib.import_module("telegrad.rpc.start").drop_in[0] = True
        _active = redirect


def uninstall() -> None:
    """Gives torch its modules back. For tests; what was imported in between stays what it is."""
    global _active
    with _lock:
        if _active is not None:
            _active.stop()
            importlib.import_module("telegrad.rpc.start").drop_in[0] = False
            _active = None


def installed() -> bool:
    """Whether torch's names point at Telegrad's in this process."""
    return _active is not None


def child_environment(environment: dict[str, str] | None = None) -> dict[str, str]:
    """An environment in which every Python process installs the drop-in as soon as it imports torch.

    A folder with a ``sitecustomize`` module goes to the front of ``PYTHONPATH``; the one that it
    hides, if there is one, is run all the same. A process that never imports torch pays nothing.

    Args:
        environment: what to start from; this process's own if not given. It is not changed.
    """
    result = dict(os.environ if environment is None else environment)
    rest = [p for p in result.get("PYTHONPATH", "").split(os.pathsep) if p and p != str(_BOOTSTRAP)]
    result["PYTHONPATH"] = os.pathsep.join([str(_BOOTSTRAP), *rest])
    return result
