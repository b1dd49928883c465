"""Pictures as JPEG and clips as MP4 (H.264, any browser plays it); files appear whole or not at all."""

from __future__ import annotations

import contextlib
import os
from fractions import Fraction
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import av
import numpy as np
from PIL import Image


def write_jpeg(path: Path, frame: np.ndarray, quality: int = 80) -> None:
    """Replaces a picture atomically.

    Args:
        path: where; its directory must exist.
        frame: uint8 [H, W, 3].
        quality: 1 to 95.
    """
    temporary = _temporary(path)
    try:
        Image.fromarray(frame).save(temporary, format="JPEG", quality=quality)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class ClipWriter:
    """Encodes frames as they come, so memory does not grow with the length of the clip.

    As a context manager it finishes the file at the end, or removes it when the block raised.
    """

    def __init__(self, path: Path, frames_per_s: float) -> None:
        self.path = path
        self.frames_per_s = frames_per_s
        self.frames = 0
        self._temporary = _temporary(path)
        self._shape: tuple[int, ...] = ()
        self._stream: Any = None
        self._container: Any = av.open(str(self._temporary), mode="w", format="mp4", options={"movflags": "faststart"})

    def add(self, frame: np.ndarray) -> None:
        """Adds one frame, uint8 [H, W, 3]; an odd last row or column is cut (yuv420p needs even sizes).

        Raises:
            ValueError: another size than the first frame, or less than two pixels high or wide.
        """
        if self._stream is None:
            self._begin(frame)
        if frame.shape != self._shape:
            raise ValueError(f"frame of shape {frame.shape} in a clip of {self._shape}")
        height, width = self._stream.height, self._stream.width
        picture = av.VideoFrame.from_ndarray(np.ascontiguousarray(frame[:height, :width]), format="rgb24")
        picture.pts = self.frames
        self._container.mux(self._stream.encode(picture))
        self.frames += 1

    def _begin(self, frame: np.ndarray) -> None:
        height, width = frame.shape[0] // 2 * 2, frame.shape[1] // 2 * 2
        if not height or not width:
            raise ValueError(f"frame of shape {frame.shape} is too small for a clip")
        self._shape = frame.shape
        rate = Fraction(self.frames_per_s).limit_denominator(1000)
        self._stream = self._container.add_stream("h264", rate=rate, options={"preset": "veryfast", "crf": "23"})
        self._stream.width, self._stream.height, self._stream.pix_fmt = width, height, "yuv420p"
        self._stream.codec_context.thread_count = 1  # it runs beside training

    def finish(self) -> Path:
        """Writes what is left and gives the file its name.

        Raises:
            ValueError: there is no frame.
        """
        if self._stream is None:
            self.discard()
            raise ValueError(f"no frame for {self.path}")
        self._container.mux(self._stream.encode())
        self._container.close()
        self._container = None
        os.replace(self._temporary, self.path)
        return self.path

    def discard(self) -> None:
        """Gives the clip up and removes what was written."""
        if self._container is not None:
            with contextlib.suppress(Exception):
                self._container.close()
            self._container = None
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.finish()
        else:
            self.discard()


def clip_stride(render_fps: float, frames_per_s: float = 20.0) -> int:
    """Env steps between two frames so that a clip of about ``frames_per_s`` shows real time."""
    return max(1, round(render_fps / frames_per_s))


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")
