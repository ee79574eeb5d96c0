"""Any input a person has, brought to the pixels a network was trained on.

`expand` turns paths, folders, patterns, URLs, bytes, file objects, PIL images, arrays, tensors and lists of them into
sources, one for each image; `decode` reads a source into an RGB image; `prepare` resizes and crops it as torchvision
does; `normalize` is the reference of what the engines do next. Imports no engine.
"""

from .decoding import decode
from .errors import ImageError
from .sources import Source, expand
from .transforms import Transforms, normalize, prepare

__all__ = ["ImageError", "Source", "Transforms", "decode", "expand", "normalize", "prepare"]
