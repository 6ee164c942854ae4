"""Handwritten digits.

These are the 1,797 real digits of scikit-learn, which need no download, or MNIST.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Digits:
    """Images and labels, for training and for testing.

    Images are `[n, 1, size, size]` float32 with mean 0 and deviation 1, labels `[n]` int64.
    """

    images: Tensor
    labels: Tensor
    test_images: Tensor
    test_labels: Tensor

    @torch.no_grad()
    def accuracy(self, model: Callable[[Tensor], Tensor]) -> float:
        """Return the accuracy of `model`, local or remote, on the test images."""
        guesses = [model(images).argmax(dim=1) for images in self.test_images.split(200)]
        return (torch.cat(guesses) == self.test_labels).float().mean().item()

    @property
    def guess(self) -> float:
        """Return the accuracy of always guessing the most frequent class."""
        return (self.test_labels.bincount().max() / len(self.test_labels)).item()


def load_digits(size: int = 8, data: str | None = None, limit: int | None = None) -> Digits:
    """Return the first `limit` training images of `data`, and all test images.

    All training images are the default. "digits" are the 8x8 images of scikit-learn, scaled up to `size`, of which a
    fifth is held out. "mnist" is MNIST, 28x28, which torchvision downloads once. By default it is MNIST if torchvision
    is installed.
    """
    mnist = data == "mnist" if data else find_spec("torchvision") is not None
    digits = _mnist() if mnist else _scikit_learn(size)
    return Digits(digits.images[:limit], digits.labels[:limit], digits.test_images, digits.test_labels)


def _scikit_learn(size: int) -> Digits:
    from sklearn import datasets

    digits = datasets.load_digits()
    images = torch.from_numpy(digits.images).float().unsqueeze(1)
    images = F.interpolate(images, size=(size, size), mode="bilinear", align_corners=False)
    images = (images - images.mean()) / images.std()
    labels = torch.from_numpy(digits.target).long()
    shuffled = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))  # they are ordered 0, 1, 2, ...
    held_out, training = shuffled[: len(labels) // 5], shuffled[len(labels) // 5 :]
    return Digits(images[training], labels[training], images[held_out], labels[held_out])


def _mnist() -> Digits:
    from torchvision.datasets import MNIST

    folder = Path("~/.cache/telegrad-examples").expanduser()
    training, test = (MNIST(folder, train=train, download=True) for train in (True, False))
    images, test_images = (((each.data.unsqueeze(1) / 255) - 0.1307) / 0.3081 for each in (training, test))
    return Digits(images, training.targets, test_images, test.targets)
