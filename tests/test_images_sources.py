"""`expand`: one source per image, in order, lazily, whatever a person passes."""

import inspect
import io
import os
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from cupy_resnet.images import ImageError, Source, decode, expand

COLORS = {"a": (255, 0, 0), "b": (0, 255, 0), "c": (0, 0, 255), "d": (9, 9, 9)}


def png(color: tuple[int, int, int] = (1, 2, 3)) -> bytes:
    file = io.BytesIO()
    Image.new("RGB", (4, 3), color).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder as people have them, with things in it that are no images."""
    folder = tmp_path / "photos"
    for name in (
        *("b.png", "a.PNG", "sub/c.png", "sub/deep/d.jpeg", "zoo.png", "notes.txt", "Thumbs.db", "movie.mp4"),
        *("._a.png", ".hidden.png", ".cache/e.png", "__MACOSX/f.png", "empty/g.txt"),
    ):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(png(COLORS.get(Path(name).stem, (7, 7, 7))))
    return folder


def names(inputs, **options) -> list[str | None]:
    sources = list(expand(inputs, **options))
    assert [source.index for source in sources] == list(range(len(sources)))
    return [source.path for source in sources]


def refusal(inputs, **options) -> str:
    (source,) = expand(inputs, **options)
    with pytest.raises(ImageError) as caught:
        decode(source)
    assert str(caught.value).startswith(f"{source.name}: ")
    return str(caught.value)


def color(source: Source) -> tuple[int, ...]:
    return decode(source).getpixel((0, 0))


# --- files and folders ------------------------------------------------------------------------------------------------


def test_a_file_by_str_path_and_other_path_like(photos: Path) -> None:
    class PathLike:
        def __fspath__(self) -> str:
            return str(photos / "b.png")

    for inputs in (str(photos / "b.png"), photos / "b.png", PathLike()):
        (source,) = expand(inputs)
        assert source.path == str(photos / "b.png")
        assert color(source) == COLORS["b"]


def test_home_is_expanded_and_the_name_stays_as_given(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(photos))
    (source,) = expand("~/b.png")
    assert source.path == "~/b.png"
    assert color(source) == COLORS["b"]
    assert names("~/*.png") == [str(photos / "b.png"), str(photos / "zoo.png")]
    assert "~nobody_of_this_name" in refusal("~nobody_of_this_name/a.png")


def test_a_folder_gives_its_images_sorted_and_nothing_hidden(photos: Path) -> None:
    expected = [str(photos / name) for name in ("a.PNG", "b.png", "sub/c.png", "sub/deep/d.jpeg", "zoo.png")]
    assert names(photos) == expected
    assert names(str(photos) + "/") == expected
    assert names(photos, recursive=False) == [name for name in expected if "sub" not in name]


def test_a_relative_folder_keeps_relative_names(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(photos)
    assert names("sub") == ["sub/c.png", "sub/deep/d.jpeg"]
    assert names(".") == ["a.PNG", "b.png", "sub/c.png", "sub/deep/d.jpeg", "zoo.png"]


def test_the_order_is_that_of_sorted_paths(tmp_path: Path) -> None:
    for name in ("a/1.png", "a-b/2.png", "a.png", "B/3.png", "a b/4.png", "a/b/5.png", "10.png", "9.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    assert names(tmp_path) == [str(path) for path in sorted(tmp_path.rglob("*.png"))]


def test_a_folder_is_listed_not_loaded(photos: Path) -> None:
    (photos / "b.png").write_bytes(b"not an image")
    sources = list(expand(photos))
    assert color(sources[0]) == COLORS["a"]
    with pytest.raises(ImageError, match="no image format"):
        decode(sources[1])
    assert color(sources[2]) == COLORS["c"]


def test_links_are_followed_but_not_in_circles(photos: Path, tmp_path: Path) -> None:
    (photos / "sub" / "circle").symlink_to(photos, target_is_directory=True)
    (photos / "sub" / "self").symlink_to(".", target_is_directory=True)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "x.png").write_bytes(png())
    (photos / "linked").symlink_to(outside, target_is_directory=True)
    (photos / "dead.png").symlink_to("nowhere.png")
    found = names(photos)
    assert str(photos / "linked" / "x.png") in found
    assert str(photos / "dead.png") in found
    assert len(found) == 7


def test_a_dead_link_says_where_it_points(tmp_path: Path) -> None:
    (tmp_path / "dead.png").symlink_to("nowhere.png")
    assert "the link points to nowhere.png, which does not exist" in refusal(tmp_path / "dead.png")
    assert "the file cannot be read: No such file" in refusal(tmp_path)


def test_a_folder_without_images_says_what_it_has(photos: Path, tmp_path: Path) -> None:
    message = refusal(photos / "empty")
    assert message == f"{photos / 'empty'}: the folder has no image files in it or its subfolders; it holds 1 × .txt"
    (tmp_path / "void").mkdir()
    assert refusal(tmp_path / "void").endswith("has no image files in it or its subfolders")
    (tmp_path / "outer" / "inner").mkdir(parents=True)
    (tmp_path / "outer" / "inner" / "x.png").write_bytes(png())
    assert "in it (subfolders were not searched)" in refusal(tmp_path / "outer", recursive=False)


def test_a_folder_that_cannot_be_listed(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.scandir

    def scandir(path):
        if Path(path).name == "sub":
            raise PermissionError(13, "Permission denied", str(path))
        return real(path)

    monkeypatch.setattr(os, "scandir", scandir)
    sources = list(expand(photos))
    assert [source.path for source in sources] == [str(photos / n) for n in ("a.PNG", "b.png", "sub", "zoo.png")]
    with pytest.raises(ImageError, match="sub: the folder cannot be listed: Permission denied"):
        decode(sources[2])
    assert "the folder cannot be listed: Permission denied" in refusal(photos / "sub")


def test_folders_deeper_than_pythons_recursion(tmp_path: Path) -> None:
    deep = tmp_path.joinpath(*["d"] * 300)
    deep.mkdir(parents=True)
    (deep / "x.png").write_bytes(png())
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(len(inspect.stack()) + 150)
    try:
        found = names(tmp_path)
    finally:
        sys.setrecursionlimit(limit)
    assert found == [str(deep / "x.png")]


# --- patterns ---------------------------------------------------------------------------------------------------------


def test_patterns(photos: Path) -> None:
    def relative(pattern: str, **options) -> list[str]:
        return [os.path.relpath(name, photos) for name in names(str(photos / pattern), **options)]

    assert relative("*.png") == ["b.png", "zoo.png"]
    assert relative("[ab].*") == ["a.PNG", "b.png"]
    assert relative("?.png") == ["b.png"]
    assert relative("*.txt") == ["notes.txt"]  # asked for by name
    assert relative("**/*.png") == ["b.png", "sub/c.png", "zoo.png"]
    assert relative("**") == ["a.PNG", "b.png", "sub/c.png", "sub/deep/d.jpeg", "zoo.png"]
    assert relative("s*") == ["sub/c.png", "sub/deep/d.jpeg"]
    assert relative("s*", recursive=False) == ["sub/c.png"]
    assert relative("*o*") == ["zoo.png"]


def test_a_pattern_is_a_path_or_a_file_name_first(photos: Path) -> None:
    (photos / "photo[1].png").write_bytes(png((5, 6, 7)))
    (photos / "photo1.png").write_bytes(png())
    (source,) = expand(photos / "photo[1].png")
    assert color(source) == (5, 6, 7)
    assert names(photos / "phot*1.png") == [str(photos / "photo1.png")]


def test_a_pattern_that_matches_nothing(photos: Path) -> None:
    pattern = str(photos / "*.webp")
    assert refusal(pattern) == f"{pattern}: no such file, and as a pattern it matches no image file"
    assert "matches no image file" in refusal(str(photos / "Th*"))


# --- names that are wrong ---------------------------------------------------------------------------------------------


def test_a_missing_file_comes_with_close_matches(photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (photos / "great_white_shark.jpeg").write_bytes(png())
    message = refusal(photos / "great_white_shark.jpg")
    assert message.endswith(f"no such file; did you mean {str(photos / 'great_white_shark.jpeg')!r}?")
    assert f"did you mean {str(photos / 'b.png')!r}" in refusal(photos / "B.PNG")
    assert "did you mean" not in refusal(photos / "unlike_all_of_them.bmp")
    monkeypatch.chdir(photos)
    message = refusal("great_white_shar.jpeg")
    assert f"no such file (looked in {photos}); did you mean 'great_white_shark.jpeg'?" in message
    assert f"there is no folder 'nowhere' either (looked in {photos})" in refusal("nowhere/a.png")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "the path is empty"),
        ("a\0b.png", "there is a null byte in the path"),
        ("x" * 5000, "this is not a usable path|no such file"),
        ("ftp://host/a.png", "ftp: URLs are not read, only http: and https:"),
        ("s3://bucket/a.png", "s3: URLs are not read, only http: and https:"),
        ("data:image/png;base64,AAAA", "data: URLs are not read"),
        ("file:///photos/a%20b.png", "file: URLs are not read; pass the path '/photos/a b.png'"),
        ("http://", "the URL names no host"),
        ("https:///a.png", "the URL names no host"),
        (Path("https://host/a.png"), "the URL names no host; a URL is passed as str"),
        ("http://host:port/a.png", "this is not a URL: Port could not be cast"),
        ("https://me:secret@host/a.png", "URLs with a user name or password"),
    ],
)
def test_names_that_cannot_be_used(name, reason: str) -> None:
    (source,) = expand(name)
    with pytest.raises(ImageError) as caught:
        decode(source)
    assert any(part in caught.value.reason for part in reason.split("|"))
    assert not str(caught.value).startswith(":")


# --- memory and objects -----------------------------------------------------------------------------------------------


def test_bytes_and_file_objects(photos: Path) -> None:
    content = png((5, 6, 7))
    with (photos / "b.png").open("rb") as file:
        inputs = [content, bytearray(content), memoryview(content), io.BytesIO(content), file]
        sources = list(expand(inputs))
        assert not file.closed
    assert [source.path for source in sources] == [None] * 4 + [str(photos / "b.png")]
    assert [color(source) for source in sources] == [(5, 6, 7)] * 4 + [COLORS["b"]]


def test_file_objects_that_give_nothing(photos: Path) -> None:
    with (photos / "b.png").open("rb") as file:
        file.read()
        assert "nothing left to read; seek(0)" in refusal(file)
    assert "the file object cannot be read: " in refusal(file)
    assert "opened for text; open it with mode 'rb'" in refusal(io.StringIO("text"))


def test_a_file_object_from_a_generator_that_closes_it(photos: Path) -> None:
    def opened() -> Iterator[io.BufferedReader]:
        for name in ("a.PNG", "b.png"):
            with (photos / name).open("rb") as file:
                yield file

    assert [color(source) for source in list(expand(opened()))] == [COLORS["a"], COLORS["b"]]


def test_pil_images_from_lists_and_from_generators_that_close_them(photos: Path) -> None:
    def opened() -> Iterator[Image.Image]:
        for name in ("a.PNG", "b.png"):
            with Image.open(photos / name) as image:
                yield image

    sources = list(expand(opened()))
    assert [source.path for source in sources] == [str(photos / "a.PNG"), str(photos / "b.png")]
    assert [color(source) for source in sources] == [COLORS["a"], COLORS["b"]]
    sources = list(expand([Image.open(photos / "a.PNG"), Image.new("RGB", (2, 2))]))
    assert [source.path for source in sources] == [str(photos / "a.PNG"), None]
    assert color(sources[0]) == COLORS["a"]


def test_every_input_keeps_its_place(photos: Path) -> None:
    inputs = [
        photos / "b.png",
        "missing.png",
        [np.zeros((2, 5, 6, 3), np.uint8), None],
        (Image.new("RGB", (3, 3), (8, 8, 8)), {"image": 1}),
        b"",
        photos / "empty",
        iter([photos / "a.PNG"]),
    ]
    sources = list(expand(inputs))
    assert [source.index for source in sources] == list(range(9 + 1))
    outcome = []
    for source in sources:
        try:
            outcome.append(color(source))
        except ImageError as error:
            outcome.append(error.reason.split(";")[0].split(" (")[0])
    assert outcome == [
        COLORS["b"],
        "no such file",
        (0, 0, 0),
        (0, 0, 0),
        "an object of type NoneType is not an image",
        (8, 8, 8),
        "an object of type dict is not an image",
        "there are no bytes to decode",
        "the folder has no image files in it or its subfolders",
        COLORS["a"],
    ]


@pytest.mark.parametrize("value", [None, 3, 2.5, object(), {"a": 1}, {"a.png"}])
def test_what_is_no_image_is_named_by_its_type(value) -> None:
    message = refusal(value)
    assert f"image 0: an object of type {type(value).__name__} is not an image" in message
    assert message.endswith("or a list or generator of those")
    assert ("cv2.imread" in message) == (value is None)


def test_lists_of_numbers_and_lists_in_themselves() -> None:
    assert "pass numpy.array(list, dtype=numpy.uint8)" in refusal([1, 2, 3])
    for nested, images in (
        ([[0, 1], [2, 3]], 1),
        (np.zeros((5, 4, 3)).tolist(), 1),
        (np.zeros((2, 5, 4, 3)).tolist(), 2),
    ):
        sources = list(expand(nested))
        assert len(sources) == images, "one per image, not per row"
        assert all("a list of numbers" in str(source.payload) for source in sources)
    circle: list = []
    circle.append(circle)
    assert "nested more than 8 deep" in refusal(circle)


def test_other_iterables_and_columns_of_paths(photos: Path) -> None:
    paths = [str(photos / "a.PNG"), str(photos / "b.png")]
    for inputs in (
        tuple(paths),
        deque(paths),
        dict.fromkeys(paths).keys(),
        map(Path, paths),
        np.array(paths),
        np.array(paths, object),
        [[paths[0]], [[paths[1]]]],
    ):
        assert names(inputs) == paths
    for inputs in ([], (), iter(()), np.array([], str)):
        assert names(inputs) == []
