"""File systems on which a lock of the kernel holds on one host only, by the mount table."""

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
"""File systems that pass no lock on, however they are mounted."""


def local_locks(path: Path, table: str | None = None) -> str:
    """Return why other hosts do not see locks on files in this directory.

    Empty if they see them, or if the mount table does not tell. ``table`` is the text of
    ``mountinfo``. Default: the kernel's.
    """
    if table is None:
        try:
            table = _TABLE.read_text(errors="replace")
        except OSError:
            return ""
    here = path.resolve()  # the table has no links
    found = [mount for mount in _mounts(table) if here.is_relative_to(mount[0])]
    # The innermost mount. Of several at one place, the last one hides the others.
    directory, kind, options = max(reversed(found), key=lambda m: len(m[0]), default=("", "", ()))
    if kind in _LOCAL_TYPES:
        return f"{directory} is {kind}"
    for option in _LOCAL_OPTIONS.get(kind, ()):
        if option in options:
            return f"{directory} is {kind} mounted with {option}"
    return ""


def _mounts(table: str) -> Iterator[tuple[str, str, Sequence[str]]]:
    """Yield directory, file system type and all options of each line."""
    for line in table.splitlines():
        # 36 35 98:0 /of/it /where rw,noatime master:1 - ext4 /dev/sda1 rw,errors=continue
        about, _, source = line.partition(" - ")
        fields, rest = about.split(" "), source.split(" ")
        if len(fields) >= 6 and len(rest) >= 3:
            yield _plain(fields[4]), rest[0], [*fields[5].split(","), *rest[2].split(",")]


def _plain(text: str) -> str:
    """Replace the octal escapes of the mount table (space, tab, newline, backslash)."""
    for number in (0o40, 0o11, 0o12, 0o134):
        text = text.replace(f"\\{number:03o}", chr(number))
    return text
