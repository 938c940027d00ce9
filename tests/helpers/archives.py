"""Small generated archives in the layouts of the published corpora, and settings that read them."""

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

from lm.data.corpora.europarl import EuroparlConfig
from lm.data.corpora.one_billion_word import OneBillionWordConfig
from lm.data.corpora.text8 import Text8Config
from tests.helpers.http_server import closed_port

TOP = "1-billion-word-language-modeling-benchmark-r13output"
TEXT8 = "alpha beta gamma a beta " * 250
"""6000 bytes, of which the last 60 are validation and test."""
EUROPARL = {
    f"txt/bg/ep-{number:03d}.txt": f"<CHAPTER ID={number}>\nДа, Да {number:03d}\n\n<P>\nда\n" for number in range(250)
}


def billion() -> dict[str, str]:
    """Make files like One Billion Word's, including some that are not read."""
    train_folder, held_out_folder = (f"{TOP}/{kind}-monolingual.tokenized.shuffled" for kind in ("training", "heldout"))
    training = {
        f"{train_folder}/news.en-{number:05d}-of-00100": f"The N{number} , the\xa0End .\n\n" for number in range(1, 100)
    }
    held_out = {f"{held_out_folder}/news.en.heldout-{number:05d}-of-00050": f"The N{number}\n" for number in range(50)}
    outside = {
        f"{TOP}/README": "outside",
        f"{train_folder}/news.en-00000-of-00100": "outside\n",
        f"{train_folder}/news.en-00001-of-00100.bak": "outside\n",
    }
    return held_out | dict(reversed(training.items())) | outside


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def write_folder(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def write_tar(path: Path, files: dict[str, str], *, links: dict[str, str] | None = None, mode: str = "w:gz") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode) as tar:  # type: ignore[call-overload]
        for name, text in files.items():
            member = tarfile.TarInfo(name)
            member.size = len(text.encode())
            tar.addfile(member, io.BytesIO(text.encode()))
        for name, target in (links or {}).items():
            member = tarfile.TarInfo(name)
            member.type, member.linkname = tarfile.SYMTYPE, target
            tar.addfile(member)
    return path


def write_zip(path: Path, members: dict[str, str]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, text in members.items():
            archive.writestr(name, text)
    return path


def origin(local: Path, archive: Path | None) -> dict[str, str | None]:
    """Settings for a given archive, or for the local one; nothing answers at the URL."""
    if archive is not None:
        return {"archive": str(archive)}
    return {
        "url": f"http://127.0.0.1:{closed_port()}/{local.name}",
        "sha256": sha256(local) if local.exists() else None,
    }


def text8(root: Path, archive: Path | None = None) -> Text8Config:
    return Text8Config(root=str(root), **origin(root / "text8" / "text8.zip", archive))


def europarl(root: Path, archive: Path | None = None, *, min_count: int = 1) -> EuroparlConfig:
    config = EuroparlConfig(root=str(root), min_count=min_count, release="source")
    for key, value in origin(root / "europarl" / "europarl.tgz", archive).items():
        setattr(config, key, None if key == "sha256" else value)
    return config


def one_billion_word(root: Path, archive: Path | None = None) -> OneBillionWordConfig:
    local = root / "one_billion_word" / f"{TOP}.tar.gz"
    return OneBillionWordConfig(root=str(root), min_count=1, **origin(local, archive))
