"""Texts of remote devices."""

import pytest
import torch

from telegrad.nn.placement import placement_of

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    ("text", "on", "device"),
    [
        ("trainer0/cpu", "trainer0", "cpu"),
        ("trainer0", "trainer0", "cpu"),
        ("ps0/cuda:1", "ps0", "cuda:1"),
        ("rank:3/cuda:0", 3, "cuda:0"),
        ("rank:0", 0, "cpu"),
        ("cpu", None, "cpu"),
        ("cuda:1", None, "cuda:1"),
        ("meta", None, "meta"),
        ("meta/cpu", "meta", "cpu"),
    ],
)
def test_forms(text: str, on: str | int | None, device: str) -> None:
    assert placement_of(text) == (on, torch.device(device))


def test_a_device_object() -> None:
    assert placement_of(torch.device("cpu")) == (None, CPU)


@pytest.mark.parametrize("text", ["", "/", "/cuda:0", "w/cuda:0/cuda:1", "rank:x/cpu", "rank:-1", "rack:1", "a:b:c"])
def test_invalid_placements(text: str) -> None:
    with pytest.raises(ValueError, match=r"Could not parse remote_device: .* The valid format is '<workername>/"):
        placement_of(text)


def test_invalid_devices() -> None:
    with pytest.raises(RuntimeError, match="Invalid device string: 'cpu2'"):
        placement_of("w1/cpu2")
    with pytest.raises(RuntimeError, match="Device string must not be empty"):
        placement_of("w1/")
    with pytest.raises(TypeError, match="Invalid type for remote_device"):
        placement_of(1)  # type: ignore[arg-type]
