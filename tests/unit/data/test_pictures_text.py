from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedveil.data import text
from fedveil.data.pictures import load_image_folder
from fedveil.data.text import (
    load_cola,
    load_sentiment140,
    load_sst2,
    load_text,
    load_tiny_shakespeare,
    load_wikitext2,
)
from fedveil.errors import DataError
from tests.refusals import refuses

from .makers import write


def paint(path: Path, grey: int, size: tuple[int, int] = (6, 4)) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (grey, 0, 255)).save(path)
    return path


def test_plain_folders_are_classes_and_are_split_here(tmp_path: Path) -> None:
    for k in range(10):
        paint(tmp_path / f"cat/{k}.png", k)
        paint(tmp_path / f"ant/{k}.PNG", 100 + k)
    (tmp_path / "cat/notes.txt").write_text("not a picture")
    (tmp_path / ".hidden").mkdir()
    dataset = load_image_folder(path=tmp_path, normalise="none")
    assert dataset.classes == ("ant", "cat")
    assert (len(dataset.train), len(dataset.test)) == (16, 4)
    assert dataset.input_shape == (3, 4, 6)
    assert dataset.test.y.bincount().tolist() == [2, 2]
    red, green, blue = dataset.train.x[:, :, 0, 0].unbind(1)
    assert bool(((red >= 100) == (dataset.train.y == 0)).all())
    assert (set(green.tolist()), set(blue.tolist())) == ({0.0}, {255.0})


def test_the_layout_of_tiny_imagenet(tmp_path: Path) -> None:
    for name in ("n01", "n02"):
        for k in range(3):
            paint(tmp_path / f"train/{name}/images/{name}_{k}.JPEG", 50)
    notes = ""
    for k, name in enumerate(["n02", "n01", "n02"]):
        paint(tmp_path / f"val/images/val_{k}.JPEG", 60)
        notes += f"val_{k}.JPEG\t{name}\t0\t0\t3\t3\n"
    (tmp_path / "val/val_annotations.txt").write_text(notes)
    dataset = load_image_folder(path=tmp_path)
    assert dataset.train.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert dataset.test.y.tolist() == [1, 0, 1]
    assert (dataset.mean, dataset.std) == ((0.5,) * 3, (0.5,) * 3)
    assert len(load_image_folder(path=tmp_path, max_per_class=1).train) == 2
    (tmp_path / "val/val_annotations.txt").write_text("val_0.JPEG\tn09\t0\n")
    with refuses("line", DataError, value=1):
        load_image_folder(path=tmp_path)
    (tmp_path / "val/val_annotations.txt").write_text("../../x.JPEG\tn01\t0\n")
    with refuses("line", DataError, value=1):
        load_image_folder(path=tmp_path)


def test_train_and_test_folders(tmp_path: Path) -> None:
    paint(tmp_path / "train/a/1.png", 1)
    paint(tmp_path / "train/b/1.png", 2)
    paint(tmp_path / "test/b/1.png", 3)
    dataset = load_image_folder(path=tmp_path, channels=1)
    assert dataset.test.y.tolist() == [1]
    assert dataset.input_shape == (1, 4, 6)
    paint(tmp_path / "test/c/1.png", 3)
    with refuses("classes", DataError, value="c"):
        load_image_folder(path=tmp_path)


def test_pictures_of_mixed_sizes_name_the_odd_one(tmp_path: Path) -> None:
    paint(tmp_path / "a/1.png", 1)
    odd = paint(tmp_path / "a/2.png", 1, size=(5, 5))
    with refuses("size", DataError) as caught:
        load_image_folder(path=tmp_path)
    assert str(odd) in str(caught.value)


def test_damaged_missing_and_empty_folders_are_refused(tmp_path: Path) -> None:
    with refuses("path", DataError, value="nowhere"):
        load_image_folder(path="nowhere", data_dir=tmp_path)
    with refuses("classes", DataError):
        load_image_folder(path=tmp_path)
    (tmp_path / "a").mkdir()
    with refuses("pictures", DataError):
        load_image_folder(path=tmp_path)
    picture = paint(tmp_path / "a/1.png", 1)
    picture.write_bytes(picture.read_bytes()[:40])
    with refuses("picture", DataError):
        load_image_folder(path=tmp_path)
    with refuses("channels"):
        load_image_folder(path=tmp_path, channels=2)


def test_an_enormous_picture_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paint(tmp_path / "a/1.png", 1, size=(100, 100))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 9_000)  # Pillow warns from here on
    with refuses("picture", DataError):
        load_image_folder(path=tmp_path)


@pytest.fixture
def texts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(text, "KNOWN_SHA256", {})
    write(tmp_path / "cola/in_domain_train.tsv", b"s\t1\t\tGood.\ns\t0\t*\tBad the.\n")
    write(tmp_path / "cola/in_domain_dev.tsv", b"s\t1\t\tIn.\n")
    write(tmp_path / "cola/out_of_domain_dev.tsv", b"s\t0\t*\tOut.\n")
    write(tmp_path / "sst2/train.tsv", b"fine film\t1\nbad film\t0\n")
    write(tmp_path / "sst2/dev.tsv", b"dev\t1\n")
    write(tmp_path / "sst2/test.tsv", b"test\t0\n")
    write(tmp_path / "sentiment140/positive.txt", "".join(f"p{k}\u2028x\n" for k in range(10)).encode())
    write(tmp_path / "sentiment140/negative.txt", "".join(f"n{k}\x85y\n" for k in range(20)).encode())
    write(tmp_path / "wikitext-2/valid.txt", b" \n = A = \n \n words . \n")
    write(tmp_path / "wikitext-2/test.txt", b" more words \n")
    write(tmp_path / "tiny-shakespeare/input.txt", b"A:\nOne.\n\nB:\nTwo.\n\nC:\nThree.\n")
    return tmp_path


def test_sentences_with_labels(texts: Path) -> None:
    cola = load_cola(data_dir=texts)
    assert cola.train.texts == ("Good.", "Bad the.")
    assert cola.train.labels is not None
    assert cola.train.labels.tolist() == [1, 0]
    assert cola.classes[1] == "acceptable"
    assert load_cola(data_dir=texts, test="both").test.texts == ("In.", "Out.")
    sst2 = load_sst2(data_dir=texts)
    assert (sst2.train.texts[0], sst2.test.texts) == ("fine film", ("test",))
    assert load_sst2(data_dir=texts, test="dev").test.texts == ("dev",)


def test_tweets_are_split_on_newlines_only_and_stratified(texts: Path) -> None:
    tweets = load_sentiment140(data_dir=texts)
    assert tweets.train.labels is not None
    assert tweets.train.labels.bincount().tolist() == [16, 8]
    assert all(
        tweet.endswith("\u2028x" if label else "\x85y")
        for tweet, label in zip(tweets.train.texts, tweets.train.labels.tolist(), strict=True)
    )
    assert tweets.train.texts == load_sentiment140(data_dir=texts).train.texts


def test_no_error_quotes_a_tweet(texts: Path) -> None:
    path = texts / "sentiment140/positive.txt"
    path.write_bytes(b"fine\n@somebody private words \xff\n")
    with refuses("line", DataError, value=2) as caught:
        load_sentiment140(data_dir=texts)
    shown = f"{caught.value} {caught.value.__cause__} {caught.value.__suppress_context__}"
    assert "somebody" not in shown
    assert shown.endswith("True")


def test_running_texts(texts: Path) -> None:
    wiki = load_wikitext2(data_dir=texts)
    assert wiki.train.texts == (" = A = ", " words . ")
    assert "valid.txt" in wiki.summary
    write(texts / "wikitext-2/train.txt", b" trained \n")
    assert load_wikitext2(data_dir=texts).train.texts == (" trained ",)
    plays = load_tiny_shakespeare(data_dir=texts, test_fraction=0.34)
    assert "\n\n".join(plays.train.texts + plays.test.texts) == "A:\nOne.\n\nB:\nTwo.\n\nC:\nThree.\n"
    assert len(plays.test) == 1
    own = load_text(path=write(texts / "own.txt", "é\n\nzwei\ndrei\n".encode()), test_fraction=0.3)
    assert (own.train.texts, own.test.texts, own.classes) == (("é", "zwei"), ("drei",), ())


@pytest.mark.parametrize("line", [b"one cell\n", b"text\t2\n", b"a\t1\tb\n"])
def test_wrong_rows_name_the_line_and_not_the_text(texts: Path, line: bytes) -> None:
    write(texts / "sst2/train.tsv", b"fine\t1\n" + line)
    with pytest.raises(DataError) as caught:
        load_sst2(data_dir=texts)
    assert caught.value.field in ("line", "label")
    assert caught.value.value == 2


def test_a_known_text_with_other_content_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "tiny-shakespeare/input.txt", b"To be\n\nor not")
    with refuses("sha256", DataError):
        load_tiny_shakespeare(data_dir=tmp_path)


def test_an_empty_text_is_refused(tmp_path: Path) -> None:
    with refuses("lines", DataError, value=0):
        load_text(path=write(tmp_path / "blank.txt", b"\n \n"))


def test_read_pictures_keeps_order(tmp_path: Path) -> None:
    from fedveil.data.pictures import read_pictures

    paths = [paint(tmp_path / f"{k}.png", k * 20) for k in (3, 1, 2)]
    assert np.array_equal(read_pictures(paths)[:, 0, 0, 0], [60, 20, 40])
