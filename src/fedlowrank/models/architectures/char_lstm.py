"""The character model of LEAF."""

from __future__ import annotations

from torch import Tensor, nn


class CharLSTM(nn.Module):
    """An LSTM that reads characters and scores the next one.

    Source: Caldas et al., "LEAF: A Benchmark for Federated Settings" (2018): an embedding of 8 numbers for each
    character, two LSTM layers of 256 units, a linear layer on the last output.

    Args:
        characters: size of the alphabet, which is also the number of classes.
        embedding: width of the embedding of each character.
        hidden: number of units of each LSTM layer.
        layers: number of LSTM layers.
    """

    head_name = "head"

    def __init__(self, characters: int, embedding: int = 8, hidden: int = 256, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(characters, embedding)
        self.lstm = nn.LSTM(embedding, hidden, layers, batch_first=True)
        self.head = nn.Linear(hidden, characters)

    def forward(self, x: Tensor) -> Tensor:
        """Compute scores ``[b, characters]`` of the numbers of characters ``[b, length]``, integers in any type."""
        outputs, _ = self.lstm(self.embed(x.long()))
        scores: Tensor = self.head(outputs[:, -1])
        return scores
