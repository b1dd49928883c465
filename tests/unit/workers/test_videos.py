import av
import numpy as np
import pytest
from PIL import Image

from spreeze.files import replace_bytes
from spreeze.workers.episodes.episode_redraw import jpeg
from spreeze.workers.visualizer import ClipWriter, clip_stride


def frames(count, height=48, width=64):
    for i in range(count):
        frame = np.zeros((height, width, 3), np.uint8)
        frame[:, : 1 + i * width // count] = (200, 40, 40)
        yield frame


def test_a_picture_replaces_the_old_one_whole_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "live.jpg"
    for value in (0, 200):
        replace_bytes(path, jpeg(np.full((30, 40, 3), value, np.uint8), side=None))
    with Image.open(path) as image:
        assert image.format == "JPEG"
        assert image.size == (40, 30)
        assert abs(int(np.asarray(image).mean()) - 200) < 5
    assert [p.name for p in tmp_path.iterdir()] == ["live.jpg"]


def test_a_clip_holds_every_frame_at_its_rate_in_a_form_that_browsers_play(tmp_path):
    path = tmp_path / "clip.mp4"
    with ClipWriter(path, 20.0) as clip:
        for frame in frames(30):
            clip.add(frame)
        assert not path.exists()
    with av.open(str(path)) as container:
        stream = container.streams.video[0]
        decoded = [frame.to_ndarray(format="rgb24") for frame in container.decode(stream)]
        assert stream.codec_context.name == "h264"
        assert stream.codec_context.pix_fmt == "yuv420p"
        assert stream.average_rate == 20
    assert len(decoded) == 30
    np.testing.assert_allclose(decoded[-1].mean(axis=(0, 1)), [200, 40, 40], atol=15)
    assert path.read_bytes().index(b"moov") < path.read_bytes().index(b"mdat")
    assert [p.name for p in tmp_path.iterdir()] == ["clip.mp4"]


@pytest.mark.parametrize(("sizes", "expected"), [
    ([(49, 65)] * 3, (50, 66)), ([(1, 1)], (2, 2)), ([(48, 64), (49, 64), (47, 65), (48, 62)], (48, 64)),
    ([(48, 64), (96, 128), (64, 48), (9, 9)], (48, 64)),
])  # fmt: skip
def test_odd_sizes_and_sizes_that_change_lose_no_frame(tmp_path, sizes, expected):
    with ClipWriter(tmp_path / "clip.mp4", 10.0) as clip:
        for height, width in sizes:
            clip.add(np.full((height, width, 3), (200, 40, 40), np.uint8))
    with av.open(str(tmp_path / "clip.mp4")) as container:
        found = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert [frame.shape for frame in found] == [(*expected, 3)] * len(sizes)
    assert all(abs(int(frame[len(frame) // 2, frame.shape[1] // 2, 0]) - 200) < 20 for frame in found)


def test_a_clip_given_up_leaves_no_file(tmp_path):
    def fail():
        with ClipWriter(tmp_path / "clip.mp4", 10.0) as clip:
            clip.add(next(frames(1)))
            raise KeyError("stop")

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_clip_without_a_frame_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="no frame"):
        ClipWriter(tmp_path / "a.mp4", 10.0).finish()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("fps", "stride"), [(60, 3), (30, 2), (50, 2), (20, 1), (5, 1)])
def test_the_stride_keeps_a_clip_in_real_time(fps, stride):
    assert clip_stride(fps) == stride
