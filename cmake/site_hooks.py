"""Hooks of the site (.mkdocs.yml): README.md is its first page, and links to files outside docs/
lead to the repository."""

from __future__ import annotations

import os
import posixpath
import re

from mkdocs.structure.files import File

_LINK = re.compile(r"\]\((?!https?:|#|mailto:)([^)\s#]+)(#[^)\s]*)?\)")


def on_files(files, config):
    root = posixpath.dirname(config["config_file_path"])
    files.append(File("README.md", root, config["site_dir"], config["use_directory_urls"]))
    return files


def on_page_markdown(markdown, page, config, files):
    source = page.file.src_path
    in_repository = source if source == "README.md" else posixpath.join("docs", source)
    folder = posixpath.dirname(in_repository)
    site = files.src_paths

    def link(match):
        target = posixpath.normpath(posixpath.join(folder, match[1]))
        in_docs = target[len("docs/") :] if target.startswith("docs/") else None
        if target == "README.md" or in_docs in site:
            here = "" if source == "README.md" else posixpath.dirname(source)
            to = posixpath.relpath(in_docs or "README.md", here or ".")
            return f"]({to}{match[2] or ''})"
        root = posixpath.dirname(config["config_file_path"])
        if not os.path.exists(posixpath.join(root, target)):
            return match[0]  # mkdocs reports it
        return f"]({config['repo_url']}/blob/main/{target}{match[2] or ''})"

    return _LINK.sub(link, markdown)
