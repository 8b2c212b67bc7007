"""The instructions of `examples/tiny_language.py`, dealt to three organizations that have other kinds of tasks each.

    python examples/three_organizations.py FOLDER OUT

reads FOLDER/train.jsonl and writes OUT/0.jsonl, OUT/1.jsonl and OUT/2.jsonl.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

KINDS = [{"repeat", "swap"}, {"next", "swap"}, {"color", "repeat"}]


def main(source: Path, out: Path) -> None:
    """Deal; a kind that two have goes to them in turns."""
    rows = [json.loads(line) for line in (source / "train.jsonl").read_text().splitlines()]
    out.mkdir(parents=True, exist_ok=True)
    for organization, kinds in enumerate(KINDS):
        own = []
        for i, row in enumerate(rows):
            owners = [o for o, k in enumerate(KINDS) if row["category"] in k]
            if row["category"] in kinds and owners[i % len(owners)] == organization:
                own.append(row)
        path = out / f"{organization}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in own))
        print(f"{path}: {len(own)} examples of {', '.join(sorted(kinds))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Deal the instructions of tiny_language.py to three organizations."
    )
    parser.add_argument("folder", type=Path, help="with train.jsonl, as `make demo-language` leaves it")
    parser.add_argument("out", type=Path, help="folder for 0.jsonl, 1.jsonl and 2.jsonl")
    given = parser.parse_args()
    if not (given.folder / "train.jsonl").is_file():
        parser.error(f"{given.folder / 'train.jsonl'} does not exist. Make it by `make demo-language`.")
    main(given.folder, given.out)
