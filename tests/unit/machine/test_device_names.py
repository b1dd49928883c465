"""Names of devices: what each text means, and what is refused with the form that is expected."""

import pytest

from spreeze.errors import ConfigError
from spreeze.machine.hardware import named_devices


@pytest.mark.parametrize(
    ("text", "num_gpus", "names"),
    [
        ("auto", 0, ("cpu",)),
        ("auto", 2, ("cuda:0",)),
        ("cpu", 2, ("cpu",)),
        ("cuda", 1, ("cuda:0",)),
        ("cuda:1", 2, ("cuda:1",)),
        ("split", 2, ("cuda:0", "cuda:1")),
        ("cpu+cpu", 0, ("cpu", "cpu")),
        ("cuda:1+cuda", 2, ("cuda:1", "cuda:0")),
    ],
)
def test_every_text_names_devices_that_are_there(text, num_gpus, names):
    assert named_devices(text, num_gpus) == names


@pytest.mark.parametrize(
    "text",
    ["", "gpu", "cuda:", "cuda:x", "cuda:-1", "cuda:²", "cuda1", "auto+cpu", "cpu+split", "cpu+cpu+cpu", "cpu+", "CPU"],
)
def test_what_is_no_device_is_refused_with_what_is_allowed(text):
    with pytest.raises(ConfigError, match=r"must be auto, cpu, cuda, cuda:N, split, or two as ACTOR\+CRITICS"):
        named_devices(text, 8)


@pytest.mark.parametrize(("text", "num_gpus"), [("cuda", 0), ("cuda:1", 1), ("split", 1), ("cpu+cuda:3", 2)])
def test_a_gpu_that_is_not_there_is_refused_with_the_reason(text, num_gpus):
    with pytest.raises(ConfigError, match=rf"this machine has {num_gpus} usable GPUs \(no driver\); use --device auto"):
        named_devices(text, num_gpus, "no driver")
