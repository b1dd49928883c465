"""Watch: the clips of a run in time order: how the policy learned to move."""

from __future__ import annotations

import streamlit as st

from spreeze.dashboard import components, control, run_picker
from spreeze.dashboard.run_data import SAMPLE, Clip, clips, row, short
from spreeze.formatting import DASH, duration, number, size

_MAX_CLIP_BYTES = 50_000_000


def page() -> None:
    """The page."""
    path = run_picker.need_run()
    st.subheader(f"Clips of {row(path).name}", anchor=False)
    if path != SAMPLE:  # its networks were not kept
        components.show_command("play", control.shown("spreeze", "play", short(path)))
    found = clips(path)
    if not found:
        st.info("No clip yet: the first one comes after the visualizer's clip interval (two minutes by default).")
        return
    index = 0
    if len(found) > 1:
        index = st.select_slider("Clip", range(len(found)), value=len(found) - 1, format_func=lambda i: label(found[i]),
                                 help="In time order, with the updates that the shown policy had seen.")
    clip = found[index]
    left, right = st.columns([3, 2])
    if clip.path.stat().st_size > _MAX_CLIP_BYTES:
        left.info(f"This clip has {size(clip.path.stat().st_size)}: too large to show; open {short(clip.path)}")
        return
    data = clip.path.read_bytes()
    left.video(data, autoplay=True, loop=True, muted=True)
    facts = clip.facts
    shown = ", ".join(number(value) for value in clip.episode_returns) or DASH
    right.markdown(
        f"**Policy version** {number(facts.get('version'))} updates\n\n"
        f"**Recorded at** {duration(facts.get('wall_s'))} (h:min:s of training), "
        f"{number(facts.get('env_steps'))} env steps\n\n"
        f"**Returns of whole episodes in it** {shown}\n\n"
        f"**Return of the episode that goes on** {number(facts.get('return_so_far'))}"
    )
    right.caption("A return is the undiscounted sum of an episode's rewards, here of the greedy policy.")
    right.download_button("Download MP4", data, clip.path.name, "video/mp4", help=f"It lies in {short(clip.path)}")


def label(clip: Clip) -> str:
    """A clip's place on the slider."""
    return f"{duration(clip.facts.get('wall_s'))} \u00b7 {number(clip.facts.get('version'))} updates"
