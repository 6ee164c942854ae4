"""Properties of the machine that affect the figures."""

import os
import platform
import shutil
import subprocess
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

PACKAGES = ("telegrad", "torch", "grpcio", "ray", "torchmonarch", "numpy")


def machine() -> dict[str, Any]:
    return {
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1),
        "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        "python": platform.python_version(),
        "packages": {name: found for name in PACKAGES if (found := _version(name))},
        "iperf3": _iperf3(),
        "load before": round(os.getloadavg()[0], 2),
    }


def in_words(about: Mapping[str, Any]) -> str:
    packages = ", ".join(f"{name} {found}" for name, found in about["packages"].items())
    return (
        f"{about['cpu']}, {about['cores']} cores, {about['memory GB']} GB, {about['system']}, Python {about['python']},"
        f" {packages}, {about['iperf3'] or 'no iperf3'}; load before {about['load before']}"
    )


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor()


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _iperf3() -> str | None:
    if shutil.which("iperf3") is None:
        return None
    said = subprocess.run(("iperf3", "--version"), capture_output=True, text=True, check=False).stdout
    return " ".join(said.split()[:2])
