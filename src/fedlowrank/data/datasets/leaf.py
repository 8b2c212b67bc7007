"""The JSON files of LEAF: images by writer, and the reading of ``users``, ``num_samples``, ``user_data``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.arguments.bounds import check_minimum
from ...core.arguments.field_checks import CheckedFields
from ...core.errors import DataError
from ...core.io.text import decode_text
from ..dataset import Dataset, Examples
from ..download.data_files import check_folder, expand_path

CHARACTERS = tuple("0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz")
"""Classes of FEMNIST, in LEAF's order."""

UserData = dict[str, dict[str, list[Any]]]
"""Lists ``x`` and ``y`` of each user."""


@dataclass(frozen=True)
class Femnist(CheckedFields):
    """FEMNIST in LEAF's JSON files: handwritten characters of 62 classes; every writer is a natural client.

    Use it with partition ``natural``. Other LEAF data sets whose inputs are lists of 784 numbers can be read, too, if
    their labels are 0 to 61. White is 1, black is 0. Source: Caldas et al., "LEAF: A Benchmark for Federated
    Settings" (2018).

    Attributes:
        path: folder with the folders ``train`` and ``test`` of LEAF (``data/femnist/data``), a folder of ``.json``
            files, or one such file. Without ``train`` and ``test`` there is no test part.
        writers: number of writers to read, the first ones, or None for all.
    """

    path: str
    writers: int | None = None

    def __post_init__(self) -> None:
        if self.writers is not None:
            check_minimum("writers", self.writers, 1)

    def load(self) -> Dataset:
        """Load the images as [n, 1, 28, 28] in [0, 1].

        Raises:
            DataError: if a file does not have LEAF's form; the message names the file and the user.
        """
        parts = read_leaf(self.path)
        names = list(parts[0])[: self.writers]
        examples, natural_clients = [], []
        for part in parts:
            users = [(k, part[name]) for k, name in enumerate(names) if name in part]
            if not users:
                raise DataError(f"{self.path!r}: none of the {len(names)} writers has test examples.")
            clients = [torch.full((len(user["y"]),), k, dtype=torch.int64) for k, user in users]
            images = [_convert_images(user, names[k], self.path) for k, user in users]
            labels = [_convert_labels(user, names[k], self.path) for k, user in users]
            examples.append(Examples(torch.cat(images), torch.cat(labels)))
            natural_clients.append(torch.cat(clients))
        train, *test = zip(examples, natural_clients, strict=True)
        test_part, test_clients = test[0] if test else (None, None)
        return Dataset("femnist", train[0], test_part, CHARACTERS, train[1], test_clients)


def read_leaf(path: str) -> list[UserData]:
    """Read the JSON files of LEAF.

    Args:
        path: folder with ``train`` and ``test``, a folder of ``.json`` files, or one such file.

    Returns:
        The users of the training part, and of the test part if there is one, in the order of the files.
    """
    expanded_path = Path(expand_path(path))
    if expanded_path.is_file():
        return [_read_file(expanded_path)]
    root = check_folder(path)
    has_parts = (root / "train").is_dir() and (root / "test").is_dir()
    return [_read_folder(folder) for folder in ((root / "train", root / "test") if has_parts else (root,))]


def _read_folder(folder: Path) -> UserData:
    files = sorted(folder.glob("*.json"))
    if not files:
        raise DataError(
            f"{str(folder)!r} holds no .json file of LEAF, nor folders 'train' and 'test' with such."
        )
    users: UserData = {}
    for file in files:
        for name, data in _read_file(file).items():
            if name in users:
                raise DataError(f"{str(file)!r}: the user {name!r} is in another file, too.")
            users[name] = data
    return users


def _read_file(file: Path) -> UserData:
    source = repr(str(file))
    try:
        content = json.loads(decode_text(file.read_bytes()))
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {source} as JSON: {error}") from error
    if not isinstance(content, dict) or not {"users", "num_samples", "user_data"} <= content.keys():
        raise DataError(f"{source} is not of LEAF's form: it needs 'users', 'num_samples' and 'user_data'.")
    users: UserData = {}
    for name, count in zip(content["users"], content["num_samples"], strict=False):
        data = content["user_data"].get(name)
        if not isinstance(data, dict) or not {"x", "y"} <= data.keys():
            raise DataError(f"{source}: the user {name!r} has no lists 'x' and 'y' in 'user_data'.")
        if not len(data["x"]) == len(data["y"]) == count:
            raise DataError(
                f"{source}: the user {name!r} has {len(data['x'])} inputs and {len(data['y'])} labels, but "
                f"num_samples is {count}."
            )
        users[name] = data
    if len(users) != len(content["users"]):
        raise DataError(
            f"{source}: 'users' and 'num_samples' must be as long as each other, without repetition."
        )
    return users


def _convert_images(user: dict[str, list[Any]], name: str, path: str) -> torch.Tensor:
    try:
        x = np.array(user["x"], dtype=np.float32).reshape(len(user["y"]), 1, 28, 28)
    except (TypeError, ValueError) as error:
        raise DataError(f"{path!r}: the inputs of {name!r} must be lists of 784 numbers: {error}") from error
    return torch.from_numpy(x)


def _convert_labels(user: dict[str, list[Any]], name: str, path: str) -> torch.Tensor:
    if not all(isinstance(label, int) and not isinstance(label, bool) for label in user["y"]):
        raise DataError(f"{path!r}: the labels of {name!r} must be whole numbers from 0 to 61.")
    return torch.tensor(user["y"], dtype=torch.int64)
