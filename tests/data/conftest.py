"""Small generated texts and the configs that read them."""

from collections.abc import Callable
from pathlib import Path

import pytest

from lm.data.corpora.text import TextConfig


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connect to loopback servers without a proxy."""
    monkeypatch.setenv("no_proxy", "*")


@pytest.fixture
def text_folder(tmp_path: Path) -> Callable[..., TextConfig]:
    """Writes train.txt, valid.txt and test.txt and returns the config that reads them."""

    def write(
        *,
        name: str = "mine",
        lowercase: bool = False,
        min_count: int = 2,
        errors: str = "strict",
        **splits: str | bytes,
    ) -> TextConfig:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        texts = {"train": "a b a\nb c\n", "valid": "a c\n", "test": "b z\n"} | splits
        for split, text in texts.items():
            (folder / f"{split}.txt").write_bytes(text.encode() if isinstance(text, str) else text)
        return TextConfig(
            root=str(tmp_path / "root"),
            min_count=min_count,
            dir=str(folder),
            lowercase=lowercase,
            encoding_errors=errors,
        )

    return write
