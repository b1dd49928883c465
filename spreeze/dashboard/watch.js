// A button of the Watch page that opens the newest recorded episode.
export default function ({ parentElement: root, data }) {
  root.__watch?.dispose();
  const host = root.querySelector(".sz-watch");
  host.replaceChildren();
  const player = new EpisodePlayer(host, { base: data.base, run: data.run, colours: data.colours, look: () => lookOf(host, data.colours[0]) });
  const button = make(host, "button", "sz-button", "Episodes of evaluations");
  button.title = "best, median and worst episode, step by step";
  button.onclick = () => player.open("t", Number.MAX_SAFE_INTEGER);
  root.__watch = player;
  return () => player.dispose();
}
