"""The link to the repository on each page of the site; MkDocs calls `on_config` before it builds."""

from __future__ import annotations

import logging
import re
import subprocess
import tomllib
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig

ROOT = Path(__file__).parents[2]


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Enter the address of the repository in the settings of the site."""
    urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["urls"]
    config.repo_url = urls.get("Repository") or web_address(remote_of_clone())
    config.repo_name = config.site_name
    if config.repo_url is None:
        logging.getLogger("mkdocs.hooks").info(
            "No page links to the repository: neither `Repository` in [project.urls] of pyproject.toml nor git's remote "
            "`origin` is an address in the web."
        )
    return config


def remote_of_clone() -> str:
    """What git fetches this clone from; empty where there is none, or no git."""
    if not (ROOT / ".git").exists():
        # files without a history may lie within another repository
        return ""
    try:
        found = subprocess.run(
            ["git", "config", "--get", "remote.origin.url"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
    except FileNotFoundError:
        return ""
    return found.stdout.strip()


def web_address(remote: str) -> str | None:
    """The page of a repository by what git fetches it from; without a name or password. None for a local folder."""
    short = re.fullmatch(r"[\w.-]+@([\w.-]+):(?!/)(.+)", remote)  # git@host:owner/name.git
    parts = urlsplit(f"ssh://{short[1]}/{short[2]}" if short else remote)
    if parts.scheme not in ("http", "https", "ssh", "git") or not parts.hostname:
        return None
    port = f":{parts.port}" if parts.port and parts.scheme.startswith("http") else ""
    scheme = "http" if parts.scheme == "http" else "https"
    return f"{scheme}://{parts.hostname}{port}{parts.path.rstrip('/').removesuffix('.git')}"
