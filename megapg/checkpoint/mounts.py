"""Where a lock of the kernel's holds on one host alone, as far as the mount table tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

_TABLE = Path("/proc/self/mountinfo")

_LOCAL_OPTIONS = {
    "nfs": ("nolock", "local_lock=flock", "local_lock=all"),
    "nfs4": ("nolock", "local_lock=flock", "local_lock=all"),
    "lustre": ("localflock",),
    "cifs": ("nobrl",),
    "smb3": ("nobrl",),
}
"""Type of file system -> options under which ``flock`` does not reach the server."""

_LOCAL_TYPES = tuple(
    f"fuse.{name}"
    for name in ("sshfs", "s3fs", "gcsfuse", "goofys", "rclone", "mount-s3", "blobfuse2", "geesefs")
)
"""Those that pass no lock on, however they are mounted."""


def local_locks(path: Path, table: str | None = None) -> str:
    """Why locks on files in this directory are not seen by other hosts; empty where they are, or
    where nobody can tell. ``table``: the text of ``mountinfo``; the kernel's unless given.
    """
    if table is None:
        try:
            table = _TABLE.read_text(errors="replace")
        except OSError:
            return ""
    here = path.resolve()  # the table knows nothing of links
    found = [mount for mount in _mounts(table) if here.is_relative_to(mount[0])]
    # The innermost, and of several in one place the last one, which hides the others.
    directory, kind, options = max(reversed(found), key=lambda m: len(m[0]), default=("", "", ()))
    if kind in _LOCAL_TYPES:
        return f"{directory} is {kind}"
    for option in _LOCAL_OPTIONS.get(kind, ()):
        if option in options:
            return f"{directory} is {kind} mounted with {option}"
    return ""


def _mounts(table: str) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Of each line the directory, the type of file system, and all options."""
    for line in table.splitlines():
        # 36 35 98:0 /of/it /where rw,noatime master:1 - ext4 /dev/sda1 rw,errors=continue
        about, _, source = line.partition(" - ")
        fields, rest = about.split(" "), source.split(" ")
        if len(fields) >= 6 and len(rest) >= 3:
            yield _plain(fields[4]), rest[0], [*fields[5].split(","), *rest[2].split(",")]


def _plain(text: str) -> str:
    """Blanks and the like are written as three octal digits."""
    for number in (0o40, 0o11, 0o12, 0o134):
        text = text.replace(f"\\{number:03o}", chr(number))
    return text
