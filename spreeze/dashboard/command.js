// Called again on the same root when the text changes.
export default function ({ parentElement: root, data }) {
  root.querySelector("code").textContent = data.text;
  const button = root.querySelector("button");
  button.setAttribute("aria-label", `copy ${data.text}`);
  button.onclick = async () => {
    try { await navigator.clipboard.writeText(data.text); button.textContent = "copied"; } catch { button.textContent = "select it by hand"; }
    setTimeout(() => { button.textContent = "copy"; }, 1500);
  };
}
