"""Opens data sets with the library ``datasets``: from the hub, saved to disk, or from files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ...core.errors import DataError
from ..download.data_files import expand_path, explain_missing

_BUILDERS = {".parquet": "parquet", ".csv": "csv", ".tsv": "csv", ".json": "json", ".jsonl": "json"}

# the library passes on the errors of a dozen readers; network errors are all subclasses of OSError
_READ_ERRORS = (OSError, ValueError, TypeError, KeyError, RuntimeError)


def open_dataset(path: str, name: str | None, cache: str | None, extra: str) -> tuple[Any, Any]:
    """Open a data set.

    Args:
        path: folder written by ``save_to_disk``; folder of files, sorted into splits as by ``datasets.load_dataset``;
            one file; or, if no such path exists, a name on the hub. ``~`` and environment variables are replaced.
        name: configuration of the data set, or None.
        cache: folder of the library's cache, or None for the default folder.
        extra: optional dependency of this package that installs the library, for the message.

    Returns:
        The module ``datasets``, and a ``DatasetDict``, or a ``Dataset`` for one file or a data set saved without
        splits.
    """
    try:
        import datasets as library
    except ImportError as error:
        raise DataError(f"{path!r} needs the library datasets: pip install 'fedlowrank[{extra}]'") from error
    expanded_path = expand_path(path)
    local_path = Path(expanded_path)
    # a misspelt path must not be searched on the hub
    if not local_path.exists() and (local_path.is_absolute() or path.startswith((".", "~", "$"))):
        raise DataError(explain_missing(local_path))
    try:
        if local_path.is_file():
            # the library itself decompresses .gz
            suffix = Path(local_path.name.removesuffix(".gz")).suffix
            if suffix not in _BUILDERS:
                raise DataError(
                    f"{expanded_path!r} ends in none of {', '.join(_BUILDERS)}, with .gz or without."
                )
            options = {"delimiter": "\t"} if suffix == ".tsv" else {}
            builder, files = _BUILDERS[suffix], {"train": expanded_path}
            return library, library.load_dataset(
                builder, data_files=files, split="train", cache_dir=cache, **options
            )
        if (local_path / "dataset_dict.json").is_file() or (local_path / "state.json").is_file():
            return library, library.load_from_disk(expanded_path)
        return library, library.load_dataset(expanded_path, name, cache_dir=cache)
    except (*_READ_ERRORS, library.exceptions.DatasetsError) as error:
        # the error of generating a data set says only that it failed; its cause says where and why
        cause = error.__cause__ or error
        raise DataError(f"datasets cannot read {expanded_path!r}: {type(cause).__name__}: {cause}") from error
