"""Tokens of samples in a file while they are made, and as padded memory-mapped examples afterwards."""

from __future__ import annotations

import contextlib
import tempfile
from array import array
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

from ....core.learning.losses import IGNORE_INDEX
from ..packing import Sample
from .mapped_examples import MappedExamples, TensorFile, explain_missing_file, split_slices


class TokenFile:
    """Tokens and labels of samples in a file without a name. Memory: 16 bytes a sample.

    Args:
        samples: the samples, read once; None for a sample that is left out.
        folder: where the file is made.

    Attributes:
        records: number of the record of each sample, int64 [n].
        width: number of tokens of the longest sample.

    Raises:
        DataError: if the file cannot be made or written.
    """

    def __init__(self, samples: Iterable[Sample | None], folder: Path) -> None:
        self._folder = folder
        lengths, records = array("q"), array("q")
        with explain_missing_file(folder):
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 - read by pad
        try:
            for sample in samples:
                if sample is not None:
                    with explain_missing_file(folder):
                        self._file.write(np.array([*sample.ids, *sample.labels], np.int32).tobytes())
                    lengths.append(len(sample.ids))
                    records.append(sample.record)
            with explain_missing_file(folder):
                self._file.flush()
        except BaseException:
            # on a full disk, close would raise again for what is still buffered
            with contextlib.suppress(OSError):
                self._file.close()
            raise
        self._lengths = np.array(lengths, np.int64)
        self.records = torch.tensor(records, dtype=torch.int64)
        self.width = int(self._lengths.max(initial=0))

    def pad(self, width: int, pad_token: int) -> MappedExamples:
        """The samples as examples of a causal model, padded on the right.

        Args:
            width: number of columns.
            pad_token: token of the padding.
        """
        self._file.seek(0)
        with self._file, contextlib.ExitStack() as stack:
            ids_file, mask_file, labels_file = (
                stack.enter_context(TensorFile(self._folder)) for _ in range(3)
            )
            for rows in split_slices(len(self._lengths), width):
                lengths = self._lengths[rows]
                # a sample is a row of tokens and a row of labels
                mask = np.arange(width) < np.repeat(lengths, 2)[:, None]
                values = np.empty(mask.shape, np.int64)
                values[::2], values[1::2] = pad_token, IGNORE_INDEX
                values[mask] = np.frombuffer(self._file.read(8 * int(lengths.sum())), np.int32)
                ids_file.write(values[::2])
                mask_file.write(mask[::2].astype(np.int64))
                labels_file.write(values[1::2])
            shape = len(self._lengths), width
            ids, attention_mask, labels = (file.map(shape) for file in (ids_file, mask_file, labels_file))
        return MappedExamples(
            {"input_ids": ids, "attention_mask": attention_mask}, labels, folder=self._folder
        )
