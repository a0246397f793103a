"""Refuses HDF5 files whose data lie in other files, which could be any file of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from memconsole_trainer.data.sources.documents import DataError


def refuse_other_files(path: Path, file: Any) -> None:
    """Raise `DataError` if anything in the open `file` (an `h5py.File`) is an external link, is
    stored outside the file, or is a virtual dataset made of other files."""
    import h5py

    def visit(name: str, item: Any) -> None:
        if isinstance(item, h5py.Group):
            for inner in item:
                link = item.get(inner, getlink=True)
                if isinstance(link, h5py.ExternalLink):
                    place = f"{name}/{inner}".lstrip("/")
                    raise _refused(path, place, "a link to", link.filename)
        elif isinstance(item, h5py.Dataset):
            for other, *_ in item.external or ():
                raise _refused(path, name, "stored in", other)
            for part in item.virtual_sources() if item.is_virtual else ():
                if part.file_name != ".":
                    raise _refused(path, name, "made of", part.file_name)

    visit("", file)
    file.visititems(visit)


def _refused(path: Path, name: str, how: str, other: str) -> DataError:
    return DataError(
        f"{path}: {name} is {how} another file ({other}); "
        "only data stored in the file itself are read: copy them into it"
    )
