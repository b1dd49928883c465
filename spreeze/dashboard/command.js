// One row per command, each with a copy button. Called again on the same root when the commands change.
const COPIED_MS = 1500;

export default function ({ parentElement: root, data }) {
  const rows = data.lines.map((line) => {
    const row = document.createElement("div"), code = document.createElement("code"), button = document.createElement("button");
    row.className = "sz-command";
    code.textContent = line;
    button.type = "button"; button.textContent = "copy"; button.setAttribute("aria-label", `copy ${line}`);
    button.onclick = async () => {
      try { await navigator.clipboard.writeText(line); button.textContent = "copied"; } catch { button.textContent = "select it by hand"; }
      setTimeout(() => { button.textContent = "copy"; }, COPIED_MS);
    };
    row.append(code, button);
    return row;
  });
  root.querySelector(".sz-commands").replaceChildren(...rows);
}
