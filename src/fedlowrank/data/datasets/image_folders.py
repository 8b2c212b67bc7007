"""Finds the image files of a data set: in a folder for each class, or for each client and class.

A part of the data set has the layout ``CLASS/file`` or ``CLIENT/CLASS/file``; below the folder of a class, files may
be in further folders. The locations of the images decide which layout it is:

- Images are directly in every folder of the first level: ``CLASS/file``.
- No folder holds images directly, and all have one and the same subfolder, e.g. ``images``: ``CLASS/file``.
- No folder holds images directly, and several have a subfolder of the same name: ``CLIENT/CLASS/file``.
- Anything else is an error, whose message asks for the layout.

The test part has the training part's clients if its folders have their names; otherwise its folders are classes.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ...core.errors import DataError
from ...core.io.text import format_count, list_first

FolderLayout = Literal["auto", "class", "client_class"]
"""Layout ``CLASS/file`` or ``CLIENT/CLASS/file``, or ``auto`` to detect it from the locations of the images."""

IMAGE_ENDINGS = frozenset([".bmp", ".gif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"])
"""Endings of the image files that are read."""

_TRAIN_NAMES = ("train", "training")
_TEST_NAMES = ("test", "testing", "val", "valid", "validation")
_SHOWN = 5


@dataclass(frozen=True)
class ImageFile:
    """An image file, and its class and client according to its folders.

    Attributes:
        path: path of the file.
        label: class of the image.
        client: client of the image, or None in the layout ``CLASS/file``.
    """

    path: Path
    label: str
    client: str | None


@dataclass(frozen=True)
class FoundImages:
    """The image files of a data set.

    Attributes:
        train: image files of the training part.
        test: image files of the test part, or None if there is none.
        classes: names of the classes of the training part, in alphabetical order.
        clients: names of the clients, with numbers in them sorted by value; empty without clients.
        notes: notes on the files that were found.
    """

    train: Sequence[ImageFile]
    test: Sequence[ImageFile] | None
    classes: tuple[str, ...]
    clients: tuple[str, ...]
    notes: tuple[str, ...]


def find_images(root: Path, layout: FolderLayout) -> FoundImages:
    """Find the image files below a folder.

    Parts are folders named ``train`` and ``test``, of the whole data set or of every client.

    Raises:
        DataError: if the folders do not determine the layout, a folder of a client or class is empty, or the test
            part has a class that the training part lacks.
    """
    train_folder, test_folder, unused_folders = _find_part_folders(root, _list_folders(root))
    if train_folder is not None:
        train, detected_layout = _read_part(train_folder, layout)
        test = None
        if test_folder is not None:
            # the test part may be divided by client, or be common to all
            has_clients = {f.name for f in _list_folders(test_folder)} <= {f.client for f in train}
            test_layout: FolderLayout = "client_class" if has_clients else "class"
            test, _ = _read_part(test_folder, test_layout if layout == "auto" else layout)
    elif layout != "class" and _has_parts_of_clients(root):
        train, test, unused_folders = _read_clients_with_parts(root)
        detected_layout = "client_class"
    else:
        train, detected_layout = _read_part(root, layout)
        test = None
    classes = tuple(sorted({file.label for file in train}))
    if test is not None and (unknown := sorted({file.label for file in test} - {*classes})):
        folder = root if test_folder is None else test_folder
        raise DataError(f"{str(folder)!r} has classes that the training part lacks: {str(unknown)[1:-1]}.")
    names = {file.client for file in (*train, *(test or ())) if file.client is not None}
    clients = tuple(sorted(names, key=_split_numbers))
    notes = _describe(root, detected_layout, clients, classes, train, test)
    if unused_folders:
        notes += (
            f"folders that are not used, for others are the training and test part: {list_first(unused_folders, _SHOWN)}",
        )
    return FoundImages(train, test, classes, clients, notes)


def _read_part(folder: Path, layout: FolderLayout) -> tuple[list[ImageFile], FolderLayout]:
    detected_layout = _infer_layout(folder) if layout == "auto" else layout
    folders = _list_folders(folder)
    if detected_layout == "class":
        return [
            ImageFile(path, f.name, None) for f in folders for path in _find_class_images(f)
        ], detected_layout
    return [
        file for client_folder in folders for file in _find_client_images(client_folder, client_folder.name)
    ], detected_layout


def _infer_layout(folder: Path) -> FolderLayout:
    folders = _list_folders(folder)
    flat_folders = [f.name for f in folders if any(_is_image(file) for file in f.iterdir())]
    subdirs = {f.name: [sub.name for sub in _list_folders(f, required=False)] for f in folders}
    if len(flat_folders) == len(folders) or not any(subdirs.values()):
        return "class"
    location = f"in {str(folder)!r} "
    advice = "Set data.layout = 'class' for CLASS/file or 'client_class' for CLIENT/CLASS/file."
    if flat_folders:
        deep_folders = sorted(set(subdirs) - set(flat_folders))
        raise DataError(
            f"{location}images lie directly in some folders ({list_first(flat_folders, _SHOWN)}) and deeper in others "
            f"({list_first(deep_folders, _SHOWN)}), so it is not clear what is a class. {advice}"
        )
    counts = Counter(name for names in subdirs.values() for name in names)
    if len(folders) > 1 and len(counts) == 1 and all(subdirs.values()):
        return "class"
    if any(count > 1 for count in counts.values()):
        return "client_class"
    raise DataError(
        f"{location}images lie two folders deep, and no two of the folders {list_first(subdirs, _SHOWN)} have a subfolder "
        f"of the same name, so it is not clear whether these are clients or classes. {advice}"
    )


def _has_parts_of_clients(root: Path) -> bool:
    """Whether all folders are clients with a training part of their own."""
    has_train = {
        f.name: _find_part_folders(f, _list_folders(f, required=False))[0] is not None
        for f in _list_folders(root)
    }
    if any(has_train.values()) and not all(has_train.values()):
        names_without_train = [name for name, is_present in has_train.items() if not is_present]
        raise DataError(
            f"in {str(root)!r} some folders have a folder 'train', but not {list_first(names_without_train, _SHOWN)}."
        )
    return all(has_train.values())


def _read_clients_with_parts(root: Path) -> tuple[list[ImageFile], list[ImageFile] | None, list[str]]:
    train: list[ImageFile] = []
    test: list[ImageFile] = []
    unused_folders: list[str] = []
    for client_folder in _list_folders(root):
        train_folder, test_folder, unused_names = _find_part_folders(
            client_folder, _list_folders(client_folder)
        )
        unused_folders += [f"{client_folder.name}/{name}" for name in unused_names]
        if train_folder is not None:
            train += _find_client_images(train_folder, client_folder.name)
        if test_folder is not None:
            test += _find_client_images(test_folder, client_folder.name)
    return train, test or None, unused_folders


def _find_part_folders(folder: Path, folders: Iterable[Path]) -> tuple[Path | None, Path | None, list[str]]:
    """Find the folders of the training and test part, and the names of the others, which are not used."""
    by_name = {f.name.lower(): f for f in folders}
    train = next((by_name[name] for name in _TRAIN_NAMES if name in by_name), None)
    if (
        train is not None
        and any(map(_is_image, train.iterdir()))
        and not _list_folders(train, required=False)
    ):
        # the class of trains
        train = None
    test_folders = [by_name[name] for name in _TEST_NAMES if name in by_name]
    if train is None:
        if len(test_folders) > 1 and len(test_folders) == len(by_name):
            raise DataError(
                f"{str(folder)!r} holds {list_first([f.name for f in test_folders], _SHOWN)}, but no folder 'train'."
            )
        return None, None, []
    test = test_folders[0] if test_folders else None
    others = [f for f in by_name.values() if f not in (train, test)]
    inner_names = {f.name for f in _list_folders(train, required=False)}
    similar = [f.name for f in others if inner_names & {sub.name for sub in _list_folders(f, required=False)}]
    if test is None and similar:
        raise DataError(
            f"{str(folder)!r} holds {train.name!r} and no test part, and {list_first(similar, _SHOWN)} with folders of the same "
            f"names, so it is not clear whether {train.name!r} is the training part or a class. Rename the folder of the class, "
            "or move the other folders elsewhere."
        )
    return train, test, [f.name for f in others]


def _find_client_images(folder: Path, client: str) -> list[ImageFile]:
    """Find the images of a client in the folders of its classes, some of which may be empty."""
    images = [
        ImageFile(path, f.name, client)
        for f in _list_folders(folder, required=False)
        for path in _find_class_images(f, required=False)
    ]
    if not images:
        raise DataError(
            f"the folder {str(folder)!r} of client {client!r} holds no image in a folder of a class."
        )
    return images


def _find_class_images(folder: Path, *, required: bool = True) -> list[Path]:
    files = sorted(
        f for f in folder.rglob("*") if _is_image(f) and not _is_hidden(f.relative_to(folder).parts)
    )
    if not files and required:
        endings = Counter(f.suffix.lower() for f in folder.rglob("*") if f.is_file())
        hint = f" (there are files that end in {list_first(sorted(endings), _SHOWN)})" if endings else ""
        raise DataError(
            f"the folder {str(folder)!r} of a class holds no image{hint}; images end in "
            f"{', '.join(sorted(IMAGE_ENDINGS))}."
        )
    return files


def _list_folders(folder: Path, *, required: bool = True) -> list[Path]:
    folders = sorted(f for f in folder.iterdir() if f.is_dir() and not _is_hidden([f.name]))
    if not folders and required:
        raise DataError(f"{str(folder)!r} holds no folder for any class.")
    return folders


def _is_image(file: Path) -> bool:
    return file.suffix.lower() in IMAGE_ENDINGS and not file.name.startswith(".") and file.is_file()


def _is_hidden(names: Sequence[str]) -> bool:
    # macOS adds a folder of that name to archives
    return any(name.startswith(".") or name == "__MACOSX" for name in names)


def _describe(
    root: Path,
    folder_layout: FolderLayout,
    clients: Sequence[str],
    classes: Sequence[str],
    train: Sequence[ImageFile],
    test: Sequence[ImageFile] | None,
) -> tuple[str, ...]:
    """Describe the files that were found, and image files that belong to no class."""
    pattern = "CLASS/file" if folder_layout == "class" else "CLIENT/CLASS/file"
    listed_clients = (
        f"{format_count(len(clients), 'client')} ({list_first(clients, _SHOWN)}), " if clients else ""
    )
    listed_classes = f"{format_count(len(classes), 'class', 'classes')} ({list_first(classes, _SHOWN)}), "
    test_text = "no test part" if test is None else f"{len(test)} for testing"
    notes = [
        f"images laid out as {pattern}: {listed_clients}{listed_classes}"
        f"{len(train)} images for training, {test_text}, first {str(train[0].path.relative_to(root))!r}"
        + (
            ". Partition 'natural' makes them the clients; any other one divides the images anew"
            if clients
            else ""
        )
    ]
    image_paths = {file.path for file in (*train, *(test or ()))}
    folders = {path.parent for path in image_paths}
    ancestors = folders.union(*(folder.parents for folder in folders))
    inner_folders = [folder for folder in ancestors if folder == root or root in folder.parents]
    unused_images = sorted(
        f for folder in inner_folders for f in folder.iterdir() if _is_image(f) and f not in image_paths
    )
    if unused_images:
        first_path = str(unused_images[0].relative_to(root))
        notes.append(
            f"image files that lie in no folder of a class are not used: {len(unused_images)}, first {first_path!r}"
        )
    return tuple(notes)


def _split_numbers(name: str) -> list[tuple[int, str]]:
    """Sort key that puts ``client10`` after ``client9``."""
    return [(int(s), "") if s.isdigit() else (-1, s) for s in re.split(r"(\d+)", name)]
