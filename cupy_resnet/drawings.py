"""Ten drawings, one of each of CIFAR-10's classes, made of simple shapes: images that need no file and no licence."""

from collections.abc import Callable

from PIL import Image, ImageDraw, ImageFilter

SIZE = 256
"""Height and width in pixels."""

Color = tuple[int, int, int]
Draw = ImageDraw.ImageDraw

_BLACK, _TYRE, _WINDOW = (15, 15, 15), (25, 25, 28), (60, 75, 92)


def draw(name: str) -> Image.Image:
    """Returns a drawing, RGB, `SIZE` × `SIZE`, with edges as soft as a lens makes them.

    Args:
        name: one of `NAMES`.
    """
    return _DRAWINGS[name]().filter(ImageFilter.GaussianBlur(1))


def _scene(top: Color, bottom: Color, ground: tuple[int, Color, Color] | None = None) -> tuple[Image.Image, Draw]:
    """Returns a background that shades from top to bottom, with a ground from a height on, and a pen for it."""
    image = _shade(top, bottom, SIZE)
    if ground is not None:
        y, near, far = ground
        image.paste(_shade(near, far, SIZE - y), (0, y))
    return image, ImageDraw.Draw(image)


def _shade(top: Color, bottom: Color, height: int) -> Image.Image:
    image = Image.new("RGB", (1, 2))
    image.putpixel((0, 0), top)
    image.putpixel((0, 1), bottom)
    return image.resize((SIZE, height), Image.Resampling.BILINEAR)


def _disc(pen: Draw, x: float, y: float, radius_x: float, radius_y: float, color: Color) -> None:
    pen.ellipse((x - radius_x, y - radius_y, x + radius_x, y + radius_y), fill=color)


def _wheel(pen: Draw, x: int, y: int, radius: int, hub: Color) -> None:
    _disc(pen, x, y, radius, radius, _TYRE)
    _disc(pen, x, y, radius // 2, radius // 2, hub)


def _airplane() -> Image.Image:
    image, pen = _scene((70, 130, 200), (170, 205, 235))
    pen.polygon([(120, 128), (60, 215), (88, 215), (165, 135)], fill=(170, 175, 185))
    pen.polygon([(130, 120), (95, 55), (115, 55), (168, 118)], fill=(195, 200, 208))
    pen.ellipse((25, 105, 232, 145), fill=(235, 238, 242))
    pen.polygon([(30, 122), (12, 62), (38, 62), (72, 112)], fill=(200, 60, 55))
    pen.polygon([(40, 128), (14, 152), (36, 152), (70, 132)], fill=(180, 185, 195))
    for x in range(90, 195, 14):
        pen.rectangle((x, 117, x + 6, 123), fill=_WINDOW)
    pen.polygon([(205, 113), (222, 119), (205, 122)], fill=_WINDOW)
    return image


def _automobile() -> Image.Image:
    image, pen = _scene((175, 200, 220), (205, 215, 215), (170, (110, 110, 110), (80, 80, 82)))
    pen.rectangle((0, 140, SIZE, 170), fill=(105, 125, 85))
    pen.polygon([(70, 130), (98, 88), (170, 88), (204, 130)], fill=(165, 25, 30))
    pen.polygon([(84, 128), (104, 97), (130, 97), (130, 128)], fill=_WINDOW)
    pen.polygon([(138, 128), (138, 97), (166, 97), (188, 128)], fill=_WINDOW)
    pen.rounded_rectangle((22, 126, 238, 184), 18, fill=(190, 30, 35))
    pen.rectangle((22, 165, 238, 180), fill=(130, 20, 25))
    for x in (72, 190):
        _wheel(pen, x, 185, 29, (170, 172, 178))
    pen.ellipse((222, 138, 240, 152), fill=(250, 240, 190))
    pen.rectangle((20, 140, 28, 154), fill=(230, 90, 60))
    return image


def _bird() -> Image.Image:
    image, pen = _scene((200, 215, 225), (170, 190, 170))
    pen.rectangle((0, 205, SIZE, 219), fill=(95, 70, 45))
    pen.polygon([(40, 190), (100, 130), (110, 160)], fill=(70, 75, 90))
    pen.ellipse((80, 95, 190, 195), fill=(120, 130, 150))
    pen.ellipse((105, 125, 190, 198), fill=(215, 120, 60))
    pen.ellipse((140, 60, 205, 125), fill=(110, 120, 140))
    pen.polygon([(200, 84), (232, 94), (200, 102)], fill=(220, 170, 60))
    pen.ellipse((176, 80, 188, 92), fill=_BLACK)
    pen.polygon([(85, 130), (150, 135), (100, 180), (60, 178)], fill=(80, 88, 105))
    for x in (130, 150):
        pen.line((x, 192, x, 208), fill=(80, 55, 35), width=5)
    return image


def _cat() -> Image.Image:
    image, pen = _scene((190, 180, 165), (150, 135, 120))
    fur, stripe, inner_ear = (120, 105, 90), (70, 60, 50), (205, 150, 140)
    pen.ellipse((60, 150, 196, 290), fill=fur)
    pen.polygon([(62, 110), (68, 22), (120, 70)], fill=fur)
    pen.polygon([(194, 110), (188, 22), (136, 70)], fill=fur)
    pen.polygon([(74, 90), (77, 46), (104, 72)], fill=inner_ear)
    pen.polygon([(182, 90), (179, 46), (152, 72)], fill=inner_ear)
    pen.ellipse((54, 55, 202, 190), fill=fur)
    pen.ellipse((92, 128, 164, 184), fill=(225, 215, 205))
    for x in (112, 128, 144):
        pen.line((x, 60, x, 88), fill=stripe, width=6)
    for y in (120, 138):
        pen.line((56, y, 84, y + 4), fill=stripe, width=5)
        pen.line((200, y, 172, y + 4), fill=stripe, width=5)
    for x in (98, 158):
        _disc(pen, x, 112, 17, 14, (150, 175, 70))
        _disc(pen, x, 112, 5, 14, _BLACK)
    pen.polygon([(118, 136), (138, 136), (128, 148)], fill=(200, 120, 115))
    pen.line((128, 148, 128, 158), fill=stripe, width=3)
    pen.arc((108, 148, 128, 168), 10, 150, fill=stripe, width=3)
    pen.arc((128, 148, 148, 168), 30, 170, fill=stripe, width=3)
    return image


def _deer() -> Image.Image:
    image, pen = _scene((120, 140, 90), (95, 115, 65))
    coat, leg, antler = (150, 105, 65), (125, 85, 50), (90, 65, 40)
    pen.ellipse((50, 115, 165, 170), fill=coat)
    for x in (66, 84, 138, 154):
        pen.polygon([(x - 6, 150), (x + 6, 150), (x + 3, 236), (x - 3, 236)], fill=leg)
    pen.polygon([(135, 140), (165, 130), (196, 78), (178, 70)], fill=coat)
    pen.polygon([(176, 68), (200, 66), (228, 92), (220, 102), (186, 92)], fill=coat)
    pen.polygon([(180, 72), (160, 60), (176, 64)], fill=coat)
    pen.ellipse((218, 90, 230, 102), fill=_BLACK)
    pen.ellipse((198, 74, 205, 81), fill=_BLACK)
    pen.line([(184, 68), (170, 30), (150, 14)], fill=antler, width=6)
    pen.line([(172, 36), (178, 12)], fill=antler, width=6)
    pen.line([(192, 66), (204, 30), (226, 12)], fill=antler, width=6)
    pen.line([(202, 36), (194, 10)], fill=antler, width=6)
    pen.ellipse((44, 120, 62, 145), fill=(235, 230, 220))
    return image


def _dog() -> Image.Image:
    image, pen = _scene((165, 185, 150), (120, 145, 95))
    fur, ear = (175, 130, 80), (110, 70, 40)
    pen.ellipse((70, 170, 186, 300), fill=fur)
    pen.ellipse((70, 50, 186, 190), fill=fur)
    pen.ellipse((40, 60, 90, 160), fill=ear)
    pen.ellipse((166, 60, 216, 160), fill=ear)
    pen.ellipse((92, 118, 164, 190), fill=(225, 200, 165))
    pen.ellipse((112, 120, 144, 144), fill=_BLACK)
    for x in (104, 152):
        _disc(pen, x, 102, 9, 10, _BLACK)
    pen.line((128, 144, 128, 164), fill=_BLACK, width=4)
    pen.pieslice((112, 156, 144, 190), 0, 180, fill=(210, 90, 95))
    return image


def _frog() -> Image.Image:
    image, pen = _scene((120, 105, 70), (85, 75, 50))
    back, head, spot = (95, 150, 60), (105, 162, 66), (60, 105, 40)
    pen.ellipse((10, 185, 110, 235), fill=(70, 115, 45))
    pen.ellipse((146, 185, 246, 235), fill=(70, 115, 45))
    pen.ellipse((48, 90, 208, 225), fill=back)
    pen.ellipse((85, 150, 171, 222), fill=(185, 200, 130))
    pen.ellipse((62, 62, 194, 160), fill=head)
    for x in (88, 168):
        _disc(pen, x, 70, 26, 26, head)
        _disc(pen, x, 70, 17, 17, (220, 190, 60))
        _disc(pen, x, 70, 8, 12, _BLACK)
    pen.arc((85, 90, 171, 145), 20, 160, fill=spot, width=5)
    for x, y in ((70, 130), (180, 120), (128, 100)):
        _disc(pen, x, y, 7, 6, spot)
    return image


def _horse() -> Image.Image:
    image, pen = _scene((150, 190, 225), (200, 220, 230), (160, (110, 150, 70), (80, 120, 50)))
    coat, leg, mane = (110, 65, 35), (90, 52, 28), (35, 22, 15)
    pen.ellipse((55, 95, 185, 155), fill=coat)
    for x in (70, 90, 152, 172):
        pen.polygon([(x - 9, 135), (x + 9, 135), (x + 5, 222), (x - 5, 222)], fill=leg)
        pen.rectangle((x - 6, 214, x + 6, 224), fill=mane)
    pen.polygon([(150, 120), (188, 110), (222, 50), (200, 40)], fill=coat)
    pen.polygon([(200, 41), (222, 48), (250, 88), (238, 98), (208, 74)], fill=coat)
    pen.polygon([(203, 44), (210, 24), (216, 46)], fill=coat)
    pen.polygon([(150, 105), (176, 90), (206, 38), (196, 38), (168, 70)], fill=mane)
    pen.polygon([(60, 105), (40, 120), (30, 185), (44, 180), (58, 130)], fill=mane)
    pen.ellipse((222, 58, 229, 65), fill=_BLACK)
    return image


def _ship() -> Image.Image:
    image, pen = _scene((150, 190, 225), (215, 228, 238), (165, (60, 100, 140), (25, 60, 100)))
    pen.polygon([(20, 150), (236, 150), (205, 192), (50, 192)], fill=(40, 45, 60))
    pen.rectangle((46, 182, 208, 192), fill=(140, 40, 35))
    pen.rectangle((75, 110, 185, 150), fill=(240, 240, 240))
    pen.rectangle((95, 82, 160, 110), fill=(230, 230, 230))
    for x in range(84, 180, 18):
        pen.rectangle((x, 122, x + 8, 132), fill=_WINDOW)
    pen.rectangle((115, 48, 140, 82), fill=(190, 60, 50))
    pen.rectangle((115, 48, 140, 58), fill=_BLACK)
    pen.line((200, 60, 200, 150), fill=(70, 70, 70), width=4)
    return image


def _truck() -> Image.Image:
    image, pen = _scene((165, 195, 225), (215, 220, 222), (190, (115, 113, 110), (85, 84, 84)))
    pen.rectangle((14, 62, 168, 182), fill=(235, 235, 232))
    pen.rectangle((14, 172, 245, 190), fill=(50, 50, 55))
    pen.polygon([(172, 98), (218, 98), (244, 140), (244, 184), (172, 184)], fill=(35, 80, 165))
    pen.polygon([(184, 106), (213, 106), (230, 138), (184, 138)], fill=_WINDOW)
    pen.rectangle((236, 160, 246, 172), fill=(250, 240, 190))
    for x in (48, 100, 208):
        _wheel(pen, x, 192, 24, (150, 152, 158))
    return image


_DRAWINGS: dict[str, Callable[[], Image.Image]] = {
    "airplane": _airplane,
    "automobile": _automobile,
    "bird": _bird,
    "cat": _cat,
    "deer": _deer,
    "dog": _dog,
    "frog": _frog,
    "horse": _horse,
    "ship": _ship,
    "truck": _truck,
}

NAMES = tuple(_DRAWINGS)
"""CIFAR-10's classes, in the order of their index."""
