"""Charts of the Live page that are pinned, hidden and searched, by the page's own script in Node.js."""

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from harness import PATIENCE_S

pytest.importorskip("streamlit")
from spreeze.dashboard import live_api
from spreeze.formatting import DASH, duration, number

pytestmark = pytest.mark.skipif(shutil.which("node") is None, reason="needs Node.js")
_DOCUMENT = """
class Node {
  constructor() { this.children = []; this.style = {}; this.attributes = {}; }
  appendChild(child) {
    const before = child.parentElement;
    if (before) before.children = before.children.filter((each) => each !== child);
    child.parentElement = this; this.children.push(child); return child;
  }
  replaceChildren() { this.children = []; }
  setAttribute(name, value) { this.attributes[name] = value; }
}
const stored = new Map();
globalThis.sessionStorage = globalThis.localStorage = {
  getItem: (key) => stored.get(key) ?? null, setItem: (key, value) => stored.set(key, value),
};
globalThis.document = { createElement: () => new Node() };
const CHARTS = [
  ["env", "Env steps/s", "Speed"], ["updates", "Updates/s", "Speed"], ["loss", "Critic loss", "Learning"],
];
function opened(drawn = ["env", "updates", "loss"]) {
  const board = new ChartBoard(new Node());
  for (const [key, title, group] of CHARTS) {
    const box = board.grid(group).appendChild(new Node()), head = new Node();
    board.add({ spec: { key, title, group }, box, head, chart: drawn.includes(key) ? {} : null });
    box.key = key;
  }
  const tools = new Node();
  board.tools(tools);
  board.search = tools.children[0];
  return board;
}
const shown = (board) => Object.fromEntries([...board.groups].filter(([, { box }]) => box.style.display !== "none").map(
  ([name, { grid }]) => [name, grid.children.filter((box) => box.style.display !== "none").map((box) => box.key)]));
const press = (board, key, place) => board.cards.find((card) => card.spec.key === key).head.children[place].onclick();
const PIN = 0, HIDE = 1, out = [];
"""


def played(*lines):
    """What each expression of ``lines`` that is pushed to ``out`` gives."""
    folder = Path(live_api.__file__).parent
    parts = [(folder / name).read_text() for name in ("chart.js", "board.js", "live.js")]
    parts[-1] = parts[-1].replace("export default function", "function mount")
    script = "\n".join(("globalThis.window = {};", *parts, _DOCUMENT, *lines))
    command = ["node", "-e", f"{script}\nconsole.log(JSON.stringify(out));"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    return json.loads(done.stdout)


def test_a_group_is_shown_with_its_first_chart():
    all_drawn, one = played('out.push(shown(opened()), shown(opened(["loss"])));')
    assert all_drawn == {"Speed": ["env", "updates"], "Learning": ["loss"]}
    assert one == {"Learning": ["loss"]}


def test_pinned_charts_stand_above_all_others_in_their_order_and_go_back_to_their_place():
    pinned, again, back = played(
        "const board = opened(); press(board, 'loss', PIN); press(board, 'env', PIN); out.push(shown(board));",
        "const other = opened(); out.push(shown(other));",
        "press(other, 'env', PIN); press(other, 'loss', PIN); out.push(shown(other));",
    )
    assert pinned == {"Pinned": ["env", "loss"], "Speed": ["updates"]}
    assert again == pinned, "another page of this browser"
    assert back == {"Speed": ["env", "updates"], "Learning": ["loss"]}


def test_hidden_charts_are_counted_and_shown_again_on_a_click():
    hidden, text, restored, empty = played(
        "const board = opened(); press(board, 'env', HIDE); press(board, 'loss', HIDE);",
        "out.push(shown(board), board.restore.textContent);",
        "board.restore.onclick(); out.push(shown(board), board.restore.textContent);",
    )
    assert hidden == {"Speed": ["updates"]}
    assert text == "show 2 hidden"
    assert restored == {"Speed": ["env", "updates"], "Learning": ["loss"]}
    assert empty == ""


def test_times_and_returns_read_as_in_the_texts_of_the_server():
    times, values = (0, 59.4, 106.48, 3599.6, 7384, 90000), (0, -250, 374.353, 0.12, 0.0123, 9999, 12345.6, -2.5e6, 3e9)
    told = played(f"out.push({list(times)}.map(durationText), {list(values)}.map(numberText), numberText(null));")
    assert told == [[duration(one) for one in times], [number(one) for one in values], DASH]
    script = """
      const page = Object.create(LivePage.prototype), card = { spec: { key: "return" } };
      Object.assign(page, { returnCard: card, axis: "t", unit: { name: "min", by: 60 } });
      out.push(page.axisText(card, 106.48 / 60));
      page.axis = "u";
      out.push(page.axisText(card, 1981));
    """
    assert played(script) == ["wall time 1:46", "1,981 updates"]


@pytest.mark.parametrize(("text", "found"), [
    ("  UPDATE", {"Speed": ["updates"]}), ("learning", {"Learning": ["loss"]}), ("nothing like it", {}),
])  # fmt: skip
def test_the_search_finds_titles_and_groups(text, found):
    typed = f"const board = opened(); board.search.value = {json.dumps(text)}; board.search.oninput();"
    assert played(typed, "out.push(shown(board));") == [found]


def test_a_warning_stands_above_the_charts_until_it_is_over_or_dismissed():
    lines = (
        "const page = Object.assign(Object.create(LivePage.prototype), { alert: new Node() });",
        'page.data = { run: "r1" };',
        "const told = () => page.alert.children[0]?.textContent ?? null;",
        'const killed = ["0:09", "error", "learner", "ended by SIGKILL"];',
        "page.warn(null); out.push(told());",
        "page.warn(killed); out.push(told());",
        "page.warn(null); out.push(told());",
        "page.warn(killed); page.alert.children[1].onclick(); page.warn(killed); out.push(told());",
        "page.alertKey = null; page.warn(killed); out.push(told());",
        'page.warn(["0:20", "warning", "evaluator", "is slow"]); out.push(told());',
    )
    killed = "0:09 error: learner: ended by SIGKILL "
    assert played(*lines) == [None, killed, None, None, None, "0:20 warning: evaluator: is slow "]
