"""Data sets that ``fedlowrank data get`` downloads: one row of a table for each."""

from __future__ import annotations

import csv
import json
import lzma
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...core.errors import DataError, did_you_mean
from .remote_files import ProgressReport, RemoteFile, download_file

_MNIST = "https://ossci-datasets.s3.amazonaws.com/mnist/"
_FASHION = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
_TORONTO = "https://www.cs.toronto.edu/~kriz/"
_AG_NEWS = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/ag_news_csv/"
_GSM8K = (
    "https://raw.githubusercontent.com/openai/grade-school-math/3101c7d5072418e28b9008a6636bde82a006892c/"
)
_HUB = "https://huggingface.co/datasets/"
_IDX_NAMES = "train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"
_IDX_SETTINGS = 'source = "mnist"\npath = "{folder}"'
_AG_NEWS_CLASSES = ("World", "Sports", "Business", "Sci/Tech")


@dataclass(frozen=True)
class DataDownload:
    """A data set that can be downloaded.

    Attributes:
        title: description of the data set in one line.
        files: files to download.
        license: license of the data set, if its authors state one.
        settings: section ``[data]`` of an experiment that reads the data set; ``{folder}`` stands for the folder.
        size: size of all files together, for the list.
        prepare: function that unpacks or converts the files in the folder, or None.
    """

    title: str
    files: tuple[RemoteFile, ...]
    license: str
    settings: str
    size: str
    prepare: Callable[[Path], None] | None = None


def download_dataset(name: str, folder: Path, report: ProgressReport) -> str:
    """Download a data set; files that are already complete are only checked.

    Args:
        name: name of the data set in :data:`DOWNLOADS`.
        folder: folder for the files, which is created if it does not exist.
        report: receiver of progress reports.

    Returns:
        The section ``[data]`` of an experiment that reads the data set.

    Raises:
        DataError: if there is no such data set, a host cannot be reached, or a file is damaged.
    """
    if name not in DOWNLOADS:
        raise DataError(f"there is no data set {name!r} to download. {did_you_mean(name, DOWNLOADS)}")
    download = DOWNLOADS[name]
    for file in download.files:
        download_file(file, folder, report)
    if download.prepare is not None:
        download.prepare(folder)
    return "[data]\n" + download.settings.format(folder=folder.as_posix())


def _unpack(folder: Path) -> None:
    """Unpack the ``.tar.gz`` files of a folder."""
    for archive in sorted(folder.glob("*.tar.gz")):
        try:
            with tarfile.open(archive) as content:
                content.extractall(folder, filter="data")
        except (OSError, EOFError, tarfile.TarError) as error:
            raise DataError(f"cannot unpack {str(archive)!r}: {error}") from error


def _decompress(folder: Path) -> None:
    """Decompress the ``.lzma`` files of a folder."""
    for archive in sorted(folder.glob("*.lzma")):
        target = archive.with_suffix("")
        partial_file = target.with_name(target.name + ".part")
        try:
            with lzma.open(archive) as source, partial_file.open("wb") as sink:
                shutil.copyfileobj(source, sink)
            partial_file.replace(target)
        except (OSError, EOFError, lzma.LZMAError) as error:
            raise DataError(f"cannot decompress {str(archive)!r}: {error}") from error


def _convert_ag_news(folder: Path) -> None:
    """Write ``train.jsonl`` and ``test.jsonl`` from the CSV files: class 1 to 4, title, description."""
    for part in ("train", "test"):
        source, target = folder / f"{part}.csv", folder / f"{part}.jsonl"
        try:
            with source.open(encoding="utf-8", newline="") as rows, target.open("w", encoding="utf-8") as out:
                for label, title, description in csv.reader(rows):
                    row = {
                        "label": _AG_NEWS_CLASSES[int(label) - 1],
                        "title": title,
                        "description": description,
                    }
                    out.write(json.dumps(row, ensure_ascii=False) + "\n")
        except (OSError, ValueError, IndexError, csv.Error) as error:
            raise DataError(f"cannot convert {str(source)!r}: {error}") from error


def _list_idx_files(host: str, *checksums: tuple[str, int]) -> tuple[RemoteFile, ...]:
    """List the four files of MNIST's format, with the MD5 and the size in bytes of each in the order of ``_IDX_NAMES``."""
    return tuple(
        RemoteFile(f"{host}{name}-ubyte.gz", f"md5:{md5}", size)
        for name, (md5, size) in zip(_IDX_NAMES, checksums, strict=True)
    )


def _describe_cifar(class_count: int, md5: str, size: int) -> DataDownload:
    name = f"cifar-{class_count}-python.tar.gz"
    return DataDownload(
        f"color images of {class_count} classes, 50,000 + 10,000 images 32×32",
        (RemoteFile(_TORONTO + name, f"md5:{md5}", size),),
        "not stated",
        f'source = "cifar{class_count}"\npath = "{{folder}}"',
        f"{size // 1_000_000} MB",
        _unpack,
    )


# MD5 of MNIST, Fashion-MNIST and CIFAR: torchvision.datasets (CIFAR: also the authors' page); of AG News:
# torchtext.datasets; SHA-256 of GSM8K and Dolly: the data sets' pages on the Hugging Face hub. FEMNIST: name,
# revision and SHA-256 as checked by public code that trains on this file.
DOWNLOADS: dict[str, DataDownload] = {
    "mnist": DataDownload(
        "handwritten digits, 60,000 + 10,000 images 28×28",
        _list_idx_files(
            _MNIST,
            ("f68b3c2dcbeaaa9fbdd348bbdeb94873", 9_912_422),
            ("d53e105ee54ea40749a09fcbcd1e9432", 28_881),
            ("9fb629c4189551a2d022fa330f9573f3", 1_648_877),
            ("ec29112dd5afa0611ce80d1b7f02629c", 4_542),
        ),
        "not stated",
        _IDX_SETTINGS,
        "12 MB",
    ),
    "fashion_mnist": DataDownload(
        "articles of clothing, 60,000 + 10,000 images 28×28",
        _list_idx_files(
            _FASHION,
            ("8d4fb7e6c68d591d4c3dfef9ec88bf0d", 26_421_880),
            ("25c81989df183df01b3e8a0aad5dffbe", 29_515),
            ("bef4ecab320f06d8554ea6380940ec79", 4_422_102),
            ("bb300cfdad3c16e7a12a480ee83cd310", 5_148),
        ),
        "MIT",
        _IDX_SETTINGS,
        "31 MB",
    ),
    "cifar10": _describe_cifar(10, "c58f30108f718f92721af3b95e74349a", 170_498_071),
    "cifar100": _describe_cifar(100, "eb9058c3a382ffc7106e4002c42a8d85", 169_001_437),
    "femnist": DataDownload(
        "handwritten characters by writer, images 28×28, as Flower Labs host them (Parquet)",
        (
            RemoteFile(
                _HUB + "flwrlabs/femnist/resolve/df739a2b09df2b5cc1ec93107659b9a9a8566487/"
                "data/train-00000-of-00001.parquet",
                "sha256:cdb389c8d41d5facab79a4a8d452724c30d9c629a1c1e0b1e9ae9de2c633522b",
            ),
        ),
        "BSD-2-Clause",
        'source = "huggingface"\npath = "{folder}/train-00000-of-00001.parquet"\n'
        'label = "character"\nclient = "writer_id"\nchannels = 1',
        "about 0.2 GB",
    ),
    "shakespeare": DataDownload(
        "lines of 715 speaking roles, derived from LEAF, as TensorFlow Federated hosts them (SQLite)",
        (RemoteFile("https://storage.googleapis.com/tff-datasets-public/shakespeare.sqlite.lzma"),),
        "public domain (the text)",
        'source = "shakespeare"\npath = "{folder}/shakespeare.sqlite"\nnormalize = "none"',
        "1 MB",
        _decompress,
    ),
    "agnews": DataDownload(
        "news by 4 topics, 120,000 + 7,600 texts",
        (
            RemoteFile(_AG_NEWS + "train.csv", "md5:b1a00f826fdfbd249f79597b59e1dc12"),
            RemoteFile(_AG_NEWS + "test.csv", "md5:d52ea96a97a2d943681189a97654912d"),
        ),
        "non-commercial use",
        'source = "text_classes"\npath = "{folder}/train.jsonl"\ntest = "{folder}/test.jsonl"\n'
        'text = ["title", "description"]',
        "31 MB",
        _convert_ag_news,
    ),
    "gsm8k": DataDownload(
        "grade school mathematics, 7,473 + 1,319 questions with answers",
        (
            RemoteFile(
                _GSM8K + "grade_school_math/data/train.jsonl",
                "sha256:17f347dc51477c50d4efb83959dbb7c56297aba886e5544ee2aaed3024813465",
                4_166_206,
            ),
            RemoteFile(
                _GSM8K + "grade_school_math/data/test.jsonl",
                "sha256:3730d312f6e3440559ace48831e51066acaca737f6eabec99bccb9e4b3c39d14",
                749_738,
            ),
        ),
        "MIT",
        'source = "gsm8k"\npath = "{folder}"',
        "5 MB",
    ),
    "dolly": DataDownload(
        "15,011 instructions with responses in 8 categories",
        (
            RemoteFile(
                _HUB + "databricks/databricks-dolly-15k/resolve/d72c16e4644a463b9c678c71d9440befd4594556/"
                "databricks-dolly-15k.jsonl",
                "sha256:2df9083338b4abd6bceb5635764dab5d833b393b55759dffb0959b6fcbf794ec",
                13_085_339,
            ),
        ),
        "CC BY-SA 3.0",
        'source = "dolly"\npath = "{folder}/databricks-dolly-15k.jsonl"',
        "13 MB",
    ),
}
"""Data sets by name."""
