import av
import numpy as np
import pytest
from PIL import Image

from spreeze.workers.visualizer import ClipWriter, clip_stride, write_jpeg


def frames(count, height=48, width=64):
    for i in range(count):
        frame = np.zeros((height, width, 3), np.uint8)
        frame[:, : 1 + i * width // count] = (200, 40, 40)
        yield frame


def test_a_picture_replaces_the_old_one_whole_and_leaves_nothing_else(tmp_path):
    path = tmp_path / "live.jpg"
    for value in (0, 200):
        write_jpeg(path, np.full((30, 40, 3), value, np.uint8))
    with Image.open(path) as image:
        assert image.format == "JPEG"
        assert image.size == (40, 30)
        assert abs(int(np.asarray(image).mean()) - 200) < 5
    assert [p.name for p in tmp_path.iterdir()] == ["live.jpg"]


def test_a_picture_that_cannot_be_written_leaves_the_old_one(tmp_path):
    path = tmp_path / "live.jpg"
    write_jpeg(path, np.zeros((8, 8, 3), np.uint8))
    before = path.read_bytes()
    with pytest.raises((TypeError, ValueError, OSError)):
        write_jpeg(path, np.zeros((8, 8, 7), np.uint8))
    assert path.read_bytes() == before
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


def test_odd_sizes_are_cut_to_even_ones(tmp_path):
    with ClipWriter(tmp_path / "clip.mp4", 10.0) as clip:
        for frame in frames(3, 49, 65):
            clip.add(frame)
    with av.open(str(tmp_path / "clip.mp4")) as container:
        stream = container.streams.video[0]
        assert (stream.width, stream.height) == (64, 48)


def test_a_clip_given_up_leaves_no_file(tmp_path):
    def fail():
        with ClipWriter(tmp_path / "clip.mp4", 10.0) as clip:
            clip.add(next(frames(1)))
            raise KeyError("stop")

    with pytest.raises(KeyError):
        fail()
    assert list(tmp_path.iterdir()) == []


def test_a_clip_without_a_frame_and_a_frame_of_another_size_are_errors(tmp_path):
    with pytest.raises(ValueError, match="no frame"):
        ClipWriter(tmp_path / "a.mp4", 10.0).finish()
    clip = ClipWriter(tmp_path / "b.mp4", 10.0)
    clip.add(next(frames(1)))
    with pytest.raises(ValueError, match="shape"):
        clip.add(next(frames(1, 20, 20)))
    clip.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("fps", "stride"), [(60, 3), (30, 2), (50, 2), (20, 1), (5, 1)])
def test_the_stride_keeps_a_clip_in_real_time(fps, stride):
    assert clip_stride(fps) == stride
