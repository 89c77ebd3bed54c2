"""scripts/download_coco.sh against a server on this machine."""

import hashlib
import shutil
import subprocess
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ARCHIVES = {
    "annotations/annotations_trainval2017.zip": ["annotations/instances_train2017.json"],
    "zips/val2017.zip": ["val2017/000000000139.jpg"],
    "zips/train2017.zip": ["train2017/000000000009.jpg", "train2017/000000000025.jpg"],
}


class Server(ThreadingHTTPServer):
    """Serves bytes by path, with ranges; breaks off after `limit` bytes of a body."""

    def __init__(self, files: dict[str, bytes]) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files = files
        self.limit: int | None = None
        self.sent: list[tuple[str, int, int]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        body = self.server.files[self.path.lstrip("/")]
        wanted = self.headers.get("Range")
        first = int(wanted.removeprefix("bytes=").rstrip("-")) if wanted else 0
        if first >= len(body):
            self.send_response(416)
            self.send_header("Content-Length", "0")
            self.end_headers()
            return
        self.send_response(206 if wanted else 200)
        if wanted:
            self.send_header("Content-Range", f"bytes {first}-{len(body) - 1}/{len(body)}")
        self.send_header("Content-Length", str(len(body) - first))
        self.end_headers()
        end = len(body) if self.server.limit is None else min(len(body), first + self.server.limit)
        self.wfile.write(body[first:end])
        self.server.sent.append((self.path, first, end))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    files = {}
    for path, names in ARCHIVES.items():
        archive = tmp_path / "archive.zip"
        with zipfile.ZipFile(archive, "w") as opened:
            for name in names:
                opened.writestr(name, name * 2000)
        files[path] = archive.read_bytes()
    running = Server(files)
    thread = threading.Thread(target=running.serve_forever, args=(0.05,))
    thread.start()
    yield running
    running.shutdown()
    thread.join()
    running.server_close()


@pytest.fixture
def script(tmp_path: Path, repository: Path, server: Server) -> Path:
    """The script with the checksums of the server's files."""
    folder = tmp_path / "scripts"
    folder.mkdir()
    shutil.copy(repository / "scripts/download_coco.sh", folder)
    lines = [f"{hashlib.md5(body).hexdigest()}  {path}\n" for path, body in server.files.items()]
    (folder / "coco2017.md5").write_text("".join(lines))
    return folder / "download_coco.sh"


def run(script: Path, server: Server, root: Path) -> subprocess.CompletedProcess[str]:
    command = ["bash", str(script), str(root), server.url]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def names_in(root: Path) -> set[str]:
    return {path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file()}


COMPLETE = {name for names in ARCHIVES.values() for name in names}


def test_a_download_that_was_interrupted_goes_on_where_it_stopped(script: Path, server: Server, tmp_path: Path):
    root = tmp_path / "coco"
    server.limit = 50_000
    finished = run(script, server, root)
    assert finished.returncode == 1
    assert "was interrupted" in finished.stderr
    server.limit = None
    finished = run(script, server, root)
    assert finished.returncode == 0, finished.stderr
    assert names_in(root) == COMPLETE
    starts = [first for path, first, _ in server.sent if "annotations" in path]
    assert starts == [0, 50_000]
    num_requests = len(server.sent)
    finished = run(script, server, root)
    assert finished.returncode == 0
    assert finished.stdout.count("complete") == 3
    assert len(server.sent) == num_requests


def test_a_whole_archive_is_unpacked_without_being_fetched_again(script: Path, server: Server, tmp_path: Path):
    root = tmp_path / "coco"
    root.mkdir()
    (root / "val2017.zip").write_bytes(server.files["zips/val2017.zip"])
    # an unpacking that was killed
    (root / ".unpacking/val2017").mkdir(parents=True)
    assert run(script, server, root).returncode == 0
    assert names_in(root) == COMPLETE
    assert not [path for path, _, _ in server.sent if "val2017" in path.rsplit("/", 1)[-1][:4]]


@pytest.mark.parametrize("surplus", [b"", b"more than the server has"])
def test_wrong_bytes_are_deleted_and_named(script: Path, server: Server, tmp_path: Path, surplus: bytes):
    root = tmp_path / "coco"
    body = server.files["annotations/annotations_trainval2017.zip"]
    root.mkdir()
    wrong = b"x" * (len(body) if surplus else 1000) + surplus
    (root / "annotations_trainval2017.zip").write_bytes(wrong)
    finished = run(script, server, root)
    assert finished.returncode == 1
    assert "does not have the MD5" in finished.stderr
    assert not names_in(root)
    assert run(script, server, root).returncode == 0


def test_the_checksums_are_those_of_coco(repository: Path):
    lines = dict(line.split()[::-1] for line in (repository / "scripts/coco2017.md5").read_text().splitlines())
    assert list(lines) == list(ARCHIVES)
    assert all(len(checksum) == 32 for checksum in lines.values())
