"""What the stand-in Hub does with uploads by the real client: create_repo, and create_commit with small files in the
commit and large ones by LFS to another place (no Xet)."""

from __future__ import annotations

import base64
import hashlib
import json
import re

import yaml

from tests.hub_parts import Refused

REGULAR_UP_TO = 4096  # bytes; the Hub decides by name and size, and takes weights and pictures by LFS


class Uploads:
    """Of the handler: `server` is the Hub."""

    def _take_upload(self, path: str, token: str | None, body: bytes) -> bool:
        """:returns: whether it was one."""
        hub = self.server
        if path == "/api/validate-yaml":
            self._validate(json.loads(body)["content"])
        elif self.command == "PUT" and (match := re.fullmatch(r"/lfs/([0-9a-f]{64})", path)):
            good = hashlib.sha256(body).hexdigest() == match[1]
            hub.lfs[match[1]] = body
            self._say({}, 200 if good and not token else 400)  # another host's place: no token belongs there
        elif path == "/api/repos/create":
            self._create(json.loads(body), token)
        elif match := re.fullmatch(r"/(.+?)\.git/info/lfs/objects/batch", path):
            self._require_writer(token)
            self._say({"transfer": "basic", "objects": [self._lfs_action(one) for one in json.loads(body)["objects"]]})
        elif match := re.fullmatch(r"/api/(models|datasets)/(.+?)/preupload/(.+)", path):
            self._require_writer(token)
            files = [
                {"path": one["path"], "uploadMode": _mode(one["size"]), "shouldIgnore": False}
                for one in json.loads(body)["files"]
            ]
            self._say({"files": files})
        elif match := re.fullmatch(r"/api/(models|datasets)/(.+?)/commit/(.+)", path):
            self._require_writer(token)
            self._commit(match[1], match[2], body, token)
        else:
            return False
        return True

    def _require_writer(self, token: str | None) -> None:
        if token not in self.server.writers:
            raise Refused(403 if token in self.server.tokens else 401, "Forbidden")

    def _validate(self, content: str) -> None:
        front = re.match(r"---\n(.*?)\n---\n", content, re.DOTALL)
        metadata = yaml.safe_load(front[1]) if front else None
        warnings = [] if metadata else [{"message": "empty or missing yaml metadata in repo card"}]
        self._say({"errors": [], "warnings": warnings})

    def _create(self, asked: dict, token: str | None) -> None:
        self._require_writer(token)
        owner = asked.get("organization") or self.server.tokens[token]
        name, kind = f"{owner}/{asked['name']}", f"{asked.get('type') or 'model'}s"
        status = 409 if (kind, name) in self.server._repos else 200
        if status == 200:
            self.server.add(kind, name, {})
        self._say({"url": f"{self.server.url}/{name}", "name": name, "id": name}, status)

    def _lfs_action(self, asked: dict) -> dict:
        found = {"oid": asked["oid"], "size": asked["size"]}
        if asked["oid"] in self.server.lfs:
            return found
        place = f"http://localhost:{self.server.server_address[1]}/lfs/{asked['oid']}"
        return {**found, "actions": {"upload": {"href": place}}}

    def _commit(self, kind: str, name: str, body: bytes, token: str | None) -> None:
        hub = self.server
        before = hub.find(kind, name, None, token)
        files = dict(before.files)
        summary = ""
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                summary = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = hub.lfs[value["oid"]]
            elif line["key"] == "deletedFile":
                files.pop(value["path"], None)
        commit = hub.add(kind, name, files, gated=before.gated, private=before.private)
        hub.commits.append((name, summary, files))
        self._say({"commitUrl": f"{hub.url}/{name}/commit/{commit}", "commitOid": commit})


def _mode(size: int) -> str:
    return "regular" if size <= REGULAR_UP_TO else "lfs"
