"""How the stand-in Hub shows its repositories: what is in them, and their files, tables and weights on another host."""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from tests.hub_parts import Refused, Repo

ELSEWHERE = (".parquet", ".safetensors", ".bin", ".tar")  # files that lie on the other host
REVISION = "refs/[^/]+/[^/]+|[^/]+"
PAGE = 1000  # entries of a listing


class Files:
    """Of the handler: `server` is the Hub."""

    def _show(self, path: str, token: str | None, body: bytes) -> None:
        """Raises Refused where there is nothing."""
        if match := re.fullmatch(r"/cdn/(models|datasets)/(.+?)/-/(.+)", path):
            if token or parse_qs(urlsplit(self.path).query).get("signature") != ["yes"]:
                raise Refused(400, "OnlyOneAuthMechanismAllowed")
            self._send(self.server._repos[match[1], match[2]].files[match[3]], {"ETag": '"other"'})
        elif match := re.fullmatch(rf"/(?:(datasets)/)?(.+?)/resolve/({REVISION})/(.+)", path):
            self._resolve(match[1] or "models", *match.groups()[1:], token)
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+(?:/[^/]+)?)/auth-check", path):
            self.server.admit(self.server.find(match[1], match[2], None, token), token)
            self._say({})
        elif match := re.fullmatch(rf"/api/(models|datasets)/(.+?)/(tree|paths-info)/({REVISION})(.*)", path):
            repo = self.server.find(match[1], match[2], match[4], token)
            self._tree(repo, match[5].strip("/")) if match[3] == "tree" else self._paths(repo, body)
        elif match := re.fullmatch(r"/api/(models|datasets)/([^/]+(?:/[^/]+)?)(?:/(refs)|/revision/(.+))?", path):
            repo = self.server.find(match[1], match[2], match[4], token)
            self._say(_refs(repo) if match[3] else _about(match[2], repo))
        else:
            raise Refused(404, "NotFound")

    def _resolve(self, kind: str, name: str, revision: str, file: str, token: str | None) -> None:
        repo = self.server.find(kind, name, revision, token)
        self.server.admit(repo, token)
        headers = {"X-Repo-Commit": repo.commit}
        if file not in repo.files:
            return self._say({"error": "EntryNotFound"}, 404, {**headers, "X-Error-Code": "EntryNotFound"})
        etag = f'"{hashlib.sha1((repo.commit + file).encode()).hexdigest()}"'
        if not file.endswith(ELSEWHERE):
            return self._send(repo.files[file], {**headers, "ETag": etag})
        place = f"http://localhost:{self.server.server_address[1]}/cdn/{kind}/{name}/-/{quote(file)}?signature=yes"
        linked = {"X-Linked-Size": str(repo.size(file)), "X-Linked-Etag": etag, "Location": place}
        self._say({}, 302, {**headers, **linked})

    def _tree(self, repo: Repo, folder: str) -> None:
        query = parse_qs(urlsplit(self.path).query)
        is_deep = query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries = {}
        for name in sorted(repo.files):
            parts = name.split("/")
            for depth in range(1, len(parts) + 1):
                path = "/".join(parts[:depth])
                parent = "/".join(parts[: depth - 1])
                if parent == folder or (is_deep and (not folder or parent.startswith(folder + "/"))):
                    entries[path] = _entry(repo, path)
        if folder and not entries and folder not in repo.files:
            raise Refused(404, "EntryNotFound")
        first = int(query.get("cursor", ["0"])[0])
        more = f"{self.server.url}{urlsplit(self.path).path}?recursive={is_deep}&cursor={first + PAGE}"
        headers = {"Link": f'<{more}>; rel="next"'} if first + PAGE < len(entries) else {}
        self._say(list(entries.values())[first : first + PAGE], headers=headers)

    def _paths(self, repo: Repo, body: bytes) -> None:
        is_json = "json" in (self.headers.get("Content-Type") or "")
        paths = json.loads(body)["paths"] if is_json else parse_qs(body.decode()).get("paths", [])
        known = {"/".join(name.split("/")[:n]) for name in repo.files for n in range(1, name.count("/") + 2)}
        self._say([_entry(repo, path) for path in paths if path in known])


def _entry(repo: Repo, path: str) -> dict[str, Any]:
    oid = hashlib.sha1(path.encode()).hexdigest()
    if path not in repo.files:
        return {"type": "directory", "path": path, "oid": oid, "size": 0}
    return {"type": "file", "path": path, "oid": oid, "size": repo.size(path)}


def _refs(repo: Repo) -> dict[str, Any]:
    branches = [{"name": name, "ref": f"refs/heads/{name}", "targetCommit": repo.commit} for name in repo.revisions]
    return {"branches": branches, "converts": [], "tags": [], "pullRequests": []}


def _about(name: str, repo: Repo) -> dict[str, Any]:
    files = [{"rfilename": file, "size": repo.size(file)} for file in repo.files]
    return {"_id": repo.commit[:24], "id": name, "sha": repo.commit, "private": repo.private, "siblings": files} | {
        "gated": "manual" if repo.gated else False, "disabled": False, "downloads": 0, "likes": 0, "tags": [],
    }  # fmt: skip
