"""Drop-in: run programs written for ``torch.distributed.rpc`` on Telegrad.

`install` redirects torch's names to Telegrad's in this process: ``torch.distributed.rpc`` and ``.autograd``,
``torch.distributed.optim.DistributedOptimizer`` and ``torch.distributed.nn.RemoteModule``, however they are imported
afterwards. ``telegrad run --drop-in program.py`` does the same without a change to the program, also in every process
that the program starts.

The modules below this one replace torch's. Their public names are the very objects of `telegrad.rpc`; the private
names that programs use are added.
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
    """Redirect torch's RPC modules to Telegrad's, in this process.

    A second call changes nothing. A program that imported torch's modules earlier keeps its references to them, so call
    this first: before ``import torch.distributed.rpc``. Forked processes inherit the redirect. Spawned processes have
    to call this again, or be started with `child_environment`.

    Raises:
        RuntimeError: torch's own RPC is running in this process.

    Example::

        compat.install()
        import torch.distributed.rpc

        assert torch.distributed.rpc.rpc_sync is rpc.rpc_sync
    """
    global _active
    with _lock:
        if _active is not None:
            return
        importlib.import_module("torch")
        rpc = sys.modules.get("torch.distributed.rpc")
        if rpc is not None and getattr(rpc, "_is_current_rpc_agent_set", lambda: False)():
            raise RuntimeError(
                "torch.distributed.rpc is running in this process, so Telegrad cannot replace it."
                " Call telegrad.compat.install() before init_rpc, best before importing torch.distributed.rpc."
            )
        redirect = Redirect()
        redirect.start()
        importlib.import_module("telegrad.rpc.start").drop_in[0] = True
        _active = redirect


def uninstall() -> None:
    """Restore torch's modules. For tests; names imported meanwhile stay redirected.

    Example::

        compat.install()
        compat.uninstall()
        assert not compat.installed()
    """
    global _active
    with _lock:
        if _active is not None:
            _active.stop()
            importlib.import_module("telegrad.rpc.start").drop_in[0] = False
            _active = None


def installed() -> bool:
    """Return whether torch's names are redirected in this process.

    Example::

        assert not compat.installed()
    """
    return _active is not None


def child_environment(environment: dict[str, str] | None = None) -> dict[str, str]:
    """Return an environment that installs the drop-in in every Python process.

    The drop-in is installed as soon as a process imports torch. A folder with a ``sitecustomize`` module is put at the
    front of ``PYTHONPATH``. If it hides another ``sitecustomize``, that one still runs. A process that never imports
    torch has no overhead.

    Args:
        environment: the environment to extend; by default that of this process. It is not changed.

    Example::

        program = "import torch.distributed.rpc as rpc; print(rpc.__name__)"
        subprocess.run([sys.executable, "-c", program], env=compat.child_environment(), check=True)
    """
    result = dict(os.environ if environment is None else environment)
    given = result.get("PYTHONPATH")
    rest = [p for p in given.split(os.pathsep) if p != str(_BOOTSTRAP)] if given else []  # "" is the current folder
    result["PYTHONPATH"] = os.pathsep.join([str(_BOOTSTRAP), *rest])
    return result
