"""A local Hugging Face Hub in a folder, served over HTTP, to try and to test sharing without an account.

    python examples/local_hub.py hub-folder --port 8642

In another terminal, direct clients of the Hub to it:

    export HF_ENDPOINT=http://127.0.0.1:8642 HF_TOKEN=hf_local
    retex push retex-quickstart me/retex-quickstart --private
    retex predict me/retex-quickstart --text "book a table for two"

It serves the requests of huggingface_hub's client to create model repositories, to commit, to branch, to open pull
requests and to download. Repositories keep their whole history in the folder. Public repositories can be read without a
token; writing, and reading private ones, requires a token that the Hub knows. Files are sent inside commits, as small
files are on the real Hub, so a push needs memory for its files.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import re
import shutil
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

import yaml

MAIN, PULL_REQUEST = "main", "refs/pr/"
USER, TOKEN = "me", "hf_local"
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
FRONT_MATTER = re.compile(r"\A---\n(.*?)\n---\s*(?:\n|\Z)", re.DOTALL)


class Refusal(Exception):
    """An error response; the client tells cases apart by `code`, as the Hub names them."""

    def __init__(self, status: HTTPStatus, message: str, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Repository:
    """A repository on disk: `repo.json` holds branches and commits, `blobs/` the contents by their hash."""

    folder: Path
    private: bool = False
    refs: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def create(cls, folder: Path, private: bool) -> Repository:
        (folder / "blobs").mkdir(parents=True)
        repository = cls(folder, private)
        repository.commit({".gitattributes": b""}, "initial commit", MAIN)
        return repository

    @classmethod
    def open(cls, folder: Path) -> Repository:
        return cls(folder, **json.loads((folder / "repo.json").read_text(encoding="utf-8")))

    def resolve(self, revision: str) -> str:
        """Return the commit of a branch, a pull request or a commit hash."""
        commit = self.refs.get(revision, revision)
        if commit not in self.commits:
            raise Refusal(HTTPStatus.NOT_FOUND, f"Invalid rev id: {revision}", "RevisionNotFound")
        return commit

    def files(self, revision: str) -> dict[str, str]:
        """Return `{path: blob}` at a revision."""
        return self.commits[self.resolve(revision)]["files"]

    def blob(self, oid: str) -> Path:
        return self.folder / "blobs" / oid

    def commit(self, changes: Mapping[str, bytes | None], message: str, ref: str, parent: str | None = None) -> str:
        """Commit contents (None deletes) on top of `parent` (default: the head of `ref`), and move `ref` there."""
        parent = parent or self.refs.get(ref)
        files = dict(self.commits[parent]["files"]) if parent else {}
        for path, content in changes.items():
            if content is not None:
                files[path] = self._store(content)
            elif files.pop(path, None) is None:
                raise Refusal(HTTPStatus.NOT_FOUND, f"A file with this name doesn't exist: {path}", "EntryNotFound")
        made = {"parent": parent, "message": message, "files": dict(sorted(files.items()))}
        oid = hashlib.sha1(json.dumps(made).encode()).hexdigest()
        self.commits[oid] = made
        self.refs[ref] = oid
        self.save()
        return oid

    def save(self) -> None:
        values = {"private": self.private, "refs": self.refs, "commits": self.commits}
        scratch = self.folder / "repo.json.tmp"
        scratch.write_text(json.dumps(values, indent=1), encoding="utf-8")
        scratch.replace(self.folder / "repo.json")

    def _store(self, content: bytes) -> str:
        oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()  # git's own hash of a blob
        if not self.blob(oid).exists():
            self.blob(oid).write_bytes(content)
        return oid


class LocalHub:
    """The Hub in a folder. As a context manager, it serves from a thread of its own.

    Args:
        folder: Folder of the repositories; existing ones are served.
        port: Port to listen on; 0 takes a free one, see `endpoint`.
        tokens: `{token: "write" or "read"}`; all belong to the user `me`, who may write to every namespace.
        log: Called with a line per request.
    """

    def __init__(
        self,
        folder: str | Path,
        port: int = 0,
        tokens: Mapping[str, str] | None = None,
        log: Callable[[str], None] | None = None,
    ) -> None:
        self.folder, self.log = Path(folder), log
        self.tokens = dict(tokens or {TOKEN: "write"})
        self.lock = threading.Lock()
        self.requests: list[tuple[str, str]] = []
        self.server = ThreadingHTTPServer(("127.0.0.1", port), type("Handler", (Handler,), {"hub": self}))

    @property
    def endpoint(self) -> str:
        """Return the value for `HF_ENDPOINT`."""
        return f"http://127.0.0.1:{self.server.server_port}"

    def __enter__(self) -> LocalHub:
        threading.Thread(target=self.serve, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.server.shutdown()
        self.server.server_close()

    def serve(self) -> None:
        self.server.serve_forever(poll_interval=0.02)

    def repository(self, repo_id: str) -> Repository:
        folder = self.folder / repo_id
        if not REPO_ID.fullmatch(repo_id) or not (folder / "repo.json").is_file():
            raise KeyError(f"There is no repository {repo_id!r}.")
        return Repository.open(folder)

    def create(self, repo_id: str, private: bool = False) -> Repository:
        if not REPO_ID.fullmatch(repo_id):
            raise Refusal(HTTPStatus.BAD_REQUEST, f"Invalid repository id: {repo_id}")
        return Repository.create(self.folder / repo_id, private)

    def put(self, repo_id: str, content: Mapping[str, bytes | None] | Path, message: str = "put") -> str:
        """Commit files (or those of a folder) without the client; create the repository if it does not exist."""
        if isinstance(content, Path):
            found = sorted(file for file in content.rglob("*") if file.is_file())
            content = {file.relative_to(content).as_posix(): file.read_bytes() for file in found}
        with self.lock:
            known = (self.folder / repo_id / "repo.json").is_file()
            repository = self.repository(repo_id) if known else self.create(repo_id)
            return repository.commit(content, message, MAIN)

    def files(self, repo_id: str, revision: str = MAIN) -> dict[str, bytes]:
        """Return the contents of a repository's files at a revision."""
        repository = self.repository(repo_id)
        return {path: repository.blob(oid).read_bytes() for path, oid in repository.files(revision).items()}

    def messages(self, repo_id: str, revision: str = MAIN) -> list[str]:
        """Return the messages of the commits that lead to a revision, oldest first."""
        repository, messages = self.repository(repo_id), []
        commit: str | None = repository.resolve(revision)
        while commit is not None:
            messages.append(repository.commits[commit]["message"])
            commit = repository.commits[commit]["parent"]
        return messages[::-1]


class Handler(BaseHTTPRequestHandler):
    """One request of the client. `hub` is set by the server's own subclass."""

    hub: LocalHub
    protocol_version = "HTTP/1.1"
    # Headers and body are sent separately; Nagle's algorithm would delay the second by 40 ms.
    disable_nagle_algorithm = True

    def do_GET(self) -> None:
        self._answer()

    def do_HEAD(self) -> None:
        self._answer()

    def do_POST(self) -> None:
        self._answer()

    def _answer(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        parts = urlsplit(self.path)
        self.query = parse_qs(parts.query)
        try:
            self._check_token()
            for method, pattern, handle in ROUTES:
                match = pattern.fullmatch(parts.path)
                if match and self.command in method:
                    return handle(self, *map(unquote, match.groups("")))
            raise Refusal(HTTPStatus.NOT_FOUND, f"There is no {self.command} {parts.path} here.")
        except Refusal as refusal:
            headers = {"X-Error-Message": str(refusal)}
            if refusal.code is not None:
                headers["X-Error-Code"] = refusal.code
            self._send_json({"error": str(refusal)}, refusal.status, headers)

    # ---- caller ------------------------------------------------------------------------------------------------------

    def _check_token(self) -> None:
        given = self.headers.get("Authorization")
        self.role = None if given is None else self.hub.tokens.get(given.removeprefix("Bearer "))
        if given is not None and self.role is None:
            raise Refusal(HTTPStatus.UNAUTHORIZED, "Invalid credentials in Authorization header")

    def _require_write(self) -> None:
        if self.role is None:
            raise Refusal(HTTPStatus.UNAUTHORIZED, "Invalid username or password.")
        if self.role != "write":
            raise Refusal(HTTPStatus.FORBIDDEN, "you must use a write token")

    def _repository(self, repo_id: str) -> Repository:
        """Return a repository that the caller may read; report others as missing."""
        try:
            repository = self.hub.repository(repo_id)
        except KeyError:
            repository = None
        if repository is None or (repository.private and self.role is None):
            status = HTTPStatus.UNAUTHORIZED if self.role is None else HTTPStatus.NOT_FOUND
            raise Refusal(status, "Repository not found", "RepoNotFound")
        return repository

    # ---- requests ----------------------------------------------------------------------------------------------------

    def whoami(self) -> None:
        if self.role is None:
            raise Refusal(HTTPStatus.UNAUTHORIZED, "Invalid username or password.")
        token = {"type": "access_token", "accessToken": {"displayName": "local", "role": self.role}}
        self._send_json({"type": "user", "name": USER, "fullname": USER, "orgs": [], "auth": token})

    def validate_yaml(self) -> None:
        """Check that the metadata of a card is a mapping; the real Hub checks more."""
        found = FRONT_MATTER.match(json.loads(self.body)["content"])
        try:
            valid = found is None or isinstance(yaml.safe_load(found[1]), dict)
        except yaml.YAMLError:
            valid = False
        if valid:
            return self._send_json({"errors": [], "warnings": []})
        return self._send_json({"errors": [{"message": "not a mapping"}], "warnings": []}, HTTPStatus.BAD_REQUEST)

    def create_repository(self) -> None:
        self._require_write()
        values = json.loads(self.body)
        repo_id = f"{values.get('organization') or USER}/{values['name']}"
        if values.get("type", "model") != "model":
            raise Refusal(HTTPStatus.BAD_REQUEST, "This Hub holds models only.")
        with self.hub.lock:
            exists = (self.hub.folder / repo_id / "repo.json").is_file()
            if not exists:
                self.hub.create(repo_id, values.get("visibility") == "private")
        answer = {"url": f"{self.hub.endpoint}/{repo_id}", "name": repo_id, "id": repo_id}
        if exists:
            answer["error"] = "You already created this model repo"
        self._send_json(answer, HTTPStatus.CONFLICT if exists else HTTPStatus.OK)

    def info(self, repo_id: str, revision: str) -> None:
        repository = self._repository(repo_id)
        commit = repository.resolve(revision or MAIN)
        siblings = [{"rfilename": path} for path in repository.files(commit)]
        values = {"_id": repo_id, "id": repo_id, "modelId": repo_id, "sha": commit, "private": repository.private}
        self._send_json({**values, "tags": [], "siblings": siblings, "downloads": 0, "likes": 0})

    def tree(self, repo_id: str, revision: str, under: str) -> None:
        repository = self._repository(repo_id)
        start = f"{under}/" if under else ""
        recursive = self.query.get("recursive", ["false"])[0].lower() in ("true", "1")
        entries: dict[str, dict[str, Any]] = {}
        for path, oid in repository.files(revision).items():
            if not path.startswith(start):
                continue
            parts = path.removeprefix(start).split("/")
            for depth in range(1, len(parts) if recursive else min(len(parts), 2)):
                name = start + "/".join(parts[:depth])
                entries[name] = {"type": "directory", "path": name, "size": 0, "oid": "0" * 40}
            if recursive or len(parts) == 1:
                entries[path] = _describe(repository, path, oid)
        self._send_json(list(entries.values()))

    def paths_info(self, repo_id: str, revision: str) -> None:
        repository = self._repository(repo_id)
        files = repository.files(revision)
        wanted = json.loads(self.body)["paths"]
        self._send_json([_describe(repository, path, files[path]) for path in wanted if path in files])

    def refs(self, repo_id: str) -> None:
        values: dict[str, list[dict[str, str]]] = {"branches": [], "converts": [], "tags": [], "pullRequests": []}
        for name, commit in self._repository(repo_id).refs.items():
            is_request = name.startswith(PULL_REQUEST)
            ref = name if is_request else f"refs/heads/{name}"
            shown = name.removeprefix(PULL_REQUEST)
            values["pullRequests" if is_request else "branches"].append(
                {"name": shown, "ref": ref, "targetCommit": commit}
            )
        if "include_prs" not in self.query:
            del values["pullRequests"]
        self._send_json(values)

    def create_branch(self, repo_id: str, branch: str) -> None:
        self._require_write()
        start = (json.loads(self.body) if self.body else {}).get("startingPoint", MAIN)
        with self.hub.lock:
            repository = self._repository(repo_id)
            if branch in repository.refs:
                raise Refusal(HTTPStatus.CONFLICT, f"Reference already exists: refs/heads/{branch}")
            repository.refs[branch] = repository.resolve(start)
            repository.save()
        self._send_json({})

    def preupload(self, repo_id: str, revision: str) -> None:
        self._require_write()
        known = self._repository(repo_id).files(revision)
        paths = [file["path"] for file in json.loads(self.body)["files"]]
        mode = {"uploadMode": "regular", "shouldIgnore": False}
        self._send_json({"files": [{"path": path, "oid": known.get(path), **mode} for path in paths]})

    def commit(self, repo_id: str, revision: str) -> None:
        self._require_write()
        changes: dict[str, bytes | None] = {}
        folders: list[str] = []
        header: dict[str, Any] = {}
        for line in self.body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                header = value
            elif entry["key"] == "file":
                changes[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "deletedFile":
                changes[value["path"]] = None
            elif entry["key"] == "deletedFolder":
                folders.append(value["path"].rstrip("/") + "/")
            else:
                raise Refusal(HTTPStatus.BAD_REQUEST, f"This Hub does not know {entry['key']!r} in a commit.")
        with self.hub.lock:
            repository = self._repository(repo_id)
            start = repository.resolve(revision)
            if header.get("parentCommit") not in (None, start):
                raise Refusal(HTTPStatus.PRECONDITION_FAILED, "The branch has moved since its parent commit was read.")
            for path in repository.files(start):
                if path.startswith(tuple(folders)):
                    changes.setdefault(path, None)
            number = None
            if "create_pr" in self.query:
                number = 1 + sum(name.startswith(PULL_REQUEST) for name in repository.refs)
            elif revision not in repository.refs:
                raise Refusal(HTTPStatus.NOT_FOUND, f"{revision} is not a branch", "RevisionNotFound")
            ref = revision if number is None else f"{PULL_REQUEST}{number}"
            oid = repository.commit(changes, header.get("summary", ""), ref, start)
        url = f"{self.hub.endpoint}/{repo_id}"
        answer = {"success": True, "commitOid": oid, "commitUrl": f"{url}/commit/{oid}", "hookOutput": ""}
        if number is not None:
            answer["pullRequestUrl"] = f"{url}/discussions/{number}"
        self._send_json(answer)

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        repository = self._repository(repo_id)
        commit = repository.resolve(revision)
        oid = repository.files(commit).get(path)
        if oid is None:
            raise Refusal(HTTPStatus.NOT_FOUND, "Entry not found", "EntryNotFound")
        blob = repository.blob(oid)
        size = blob.stat().st_size
        headers = {"ETag": f'"{oid}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        start, end = 0, size
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked and size:
            start, end = int(asked[1]), min(int(asked[2]) + 1, size) if asked[2] else size
            if start >= end:
                headers["Content-Range"] = f"bytes */{size}"
                return self._send(HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE, b"", headers)
            headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"
        status = HTTPStatus.PARTIAL_CONTENT if "Content-Range" in headers else HTTPStatus.OK
        self._send_head(status, end - start, {"Content-Type": "application/octet-stream", **headers})
        if self.command != "HEAD":
            with blob.open("rb") as file:
                file.seek(start)
                if end == size:
                    shutil.copyfileobj(file, self.wfile)
                else:
                    self.wfile.write(file.read(end - start))
        return None

    # ---- responses ---------------------------------------------------------------------------------------------------

    def _send_json(
        self, value: Any, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None
    ) -> None:
        self._send(status, json.dumps(value).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: HTTPStatus, content: bytes, headers: Mapping[str, str]) -> None:
        self._send_head(status, len(content), headers)
        if self.command != "HEAD":
            self.wfile.write(content)

    def _send_head(self, status: HTTPStatus, length: int, headers: Mapping[str, str]) -> None:
        self.hub.requests.append((self.command, unquote(self.path)))
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        if self.hub.log is not None:
            self.hub.log(format % args)


def _describe(repository: Repository, path: str, oid: str) -> dict[str, Any]:
    return {"type": "file", "path": path, "size": repository.blob(oid).stat().st_size, "oid": oid}


# Revisions with a slash in their name are URL-quoted, so one segment of the path is one revision.
_MODEL, _PART = r"/api/models/([^/]+/[^/]+)", r"([^/]+)"
ROUTES: list[tuple[tuple[str, ...], re.Pattern[str], Callable[..., None]]] = [
    (methods, re.compile(pattern), handle)
    for methods, pattern, handle in [
        (("GET",), "/api/whoami-v2", Handler.whoami),
        (("POST",), "/api/validate-yaml", Handler.validate_yaml),
        (("POST",), "/api/repos/create", Handler.create_repository),
        (("GET",), rf"{_MODEL}(?:/revision/{_PART})?", Handler.info),
        (("GET",), rf"{_MODEL}/tree/{_PART}/?(.*)", Handler.tree),
        (("GET",), rf"{_MODEL}/refs", Handler.refs),
        (("POST",), rf"{_MODEL}/paths-info/{_PART}", Handler.paths_info),
        (("POST",), rf"{_MODEL}/branch/{_PART}", Handler.create_branch),
        (("POST",), rf"{_MODEL}/preupload/{_PART}", Handler.preupload),
        (("POST",), rf"{_MODEL}/commit/{_PART}", Handler.commit),
        (("GET", "HEAD"), rf"/([^/]+/[^/]+)/resolve/{_PART}/(.+)", Handler.resolve),
    ]
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="where repositories are kept")
    parser.add_argument("--port", type=int, default=8642)
    parser.add_argument("--token", default=TOKEN, help=f"the token that may write (default: {TOKEN})")
    options = parser.parse_args()
    hub = LocalHub(options.folder, options.port, {options.token: "write"}, log=lambda line: print(line, flush=True))
    print(f"Serving {options.folder}. Use it with HF_ENDPOINT={hub.endpoint} HF_TOKEN={options.token}", flush=True)
    try:
        hub.serve()
    except KeyboardInterrupt:
        print("Stopped.")


if __name__ == "__main__":
    main()
