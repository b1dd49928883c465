"""Commands and programs that the README and its pages print, as a reader would type them."""

import re
import shlex
from pathlib import Path

from spreeze.__main__ import COMMANDS

ROOT = Path(__file__).resolve().parents[2]
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in (ROOT / "README.md", *sorted((ROOT / "assets").rglob("*.md")))
}
"""Path -> text of everything that is written for people."""
STANDS_FOR = {
    "RUN": "latest", "NAME": "walker",
    "SQL": "SELECT 1", "ID": "Pendulum-v1", "ENV": "Pendulum-v1", "ALGO": "sac", "N": "20", "S": "1",
    "K": "1", "R": "0", "B": "64", "D": "cpu", "F": "0.5", "SHELL": "bash", "FILE": "file.npz", "DIR": "runs",
    "HOST:PORT": "local:1", "OWNER/NAME": "me/robot",
}  # fmt: skip
"""Word that a page prints for whatever the reader has -> one that can be typed."""
NAMES = [["runs", "stop"], ["runs", "pause"], ["runs", "continue"], ["runs", "evaluate"]]
"""Commands that are named without what they need."""
_ANY_BLOCK = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)


def blocks(language):
    """Page and text of each block of code in that language."""
    for page, text in PAGES.items():
        for block in re.findall(rf"^```{language}\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
            yield page, block


def shell_commands():
    """Page and words of every command in a block of shell."""
    return [(page, words) for page, block in blocks("bash") for words in commands_of(block)]


def commands_of(block):
    """Words of each command of a block of shell, variables that it sets first left out."""
    for line in block.replace("\\\n", " ").splitlines():
        for part in re.split(r"&&|;", re.sub(r"(^|\s)#.*", "", line)):
            words = shlex.split(part)
            while words and re.match(r"[A-Z_]+=", words[0]):
                words.pop(0)
            if words:
                yield words


def ours(words):
    """Verb and arguments of a command of Spreeze, which can be typed so; None for any other command."""
    words = words[2:] if words[:2] == ["exec", "srun"] else words
    if words[:1] == ["spreeze"]:
        rest = words[1:]
    elif words[:2] == ["python", "-m"] and words[2].partition(".")[0] == "spreeze":
        rest = [*words[2].split(".")[1:], *words[3:]]
    else:
        return None
    typed = [STANDS_FOR.get(word.removesuffix("..."), word) for word in rest]
    return typed if typed and typed[0] in COMMANDS else None


def spoken_commands():
    """Page and words of every command of Spreeze that stands in a sentence or table with all that it needs."""
    for page, text in PAGES.items():
        if page.endswith("changelog.md"):
            continue  # it names flags, with what they need left out
        for span in re.findall(r"`([^`]+)`", _ANY_BLOCK.sub("", text)):
            if re.search(r"\.\.\. |\.\.\.$|[^\w]NAME NAME", span) and "RUN..." not in span:
                continue  # a part is left out
            try:
                words = shlex.split(span)
            except ValueError:
                continue
            typed = ours(words) or (ours(["spreeze", *words]) if len(words) > 1 else None)
            if typed and typed not in NAMES:
                yield page, typed
