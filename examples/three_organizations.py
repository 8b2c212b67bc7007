"""Divide the instructions of `examples/tiny_language.py` among three organizations with different kinds of tasks.

    python examples/three_organizations.py FOLDER OUT

reads FOLDER/train.jsonl and writes OUT/0.jsonl, OUT/1.jsonl and OUT/2.jsonl.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

TASK_KINDS = [{"repeat", "swap"}, {"next", "swap"}, {"color", "repeat"}]


def main(source: Path, out: Path) -> None:
    """Divide the instructions; two organizations with a common kind of task share its rows in turns."""
    rows = [json.loads(line) for line in (source / "train.jsonl").read_text().splitlines()]
    out.mkdir(parents=True, exist_ok=True)
    for organization, kinds in enumerate(TASK_KINDS):
        organization_rows = []
        for i, row in enumerate(rows):
            owners = [o for o, k in enumerate(TASK_KINDS) if row["category"] in k]
            if row["category"] in kinds and owners[i % len(owners)] == organization:
                organization_rows.append(row)
        path = out / f"{organization}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in organization_rows))
        print(f"{path}: {len(organization_rows)} examples of {', '.join(sorted(kinds))}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description="Deal the instructions of tiny_language.py to three organizations."
    )
    parser.add_argument("folder", type=Path, help="with train.jsonl, as `make demo-language` leaves it")
    parser.add_argument("out", type=Path, help="folder for 0.jsonl, 1.jsonl and 2.jsonl")
    arguments = parser.parse_args()
    if not (arguments.folder / "train.jsonl").is_file():
        parser.error(f"{arguments.folder / 'train.jsonl'} does not exist. Make it by `make demo-language`.")
    main(arguments.folder, arguments.out)
