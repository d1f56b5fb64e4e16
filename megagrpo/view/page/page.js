// Starts the page: data, tabs, and, where a server is behind it, newer data. Text reaches the page by textContent alone.

const POLL_MS = 3000;
let DATA = JSON.parse(document.getElementById("data").textContent);

function byId(id) {
  return document.getElementById(id);
}

function make(tag, text = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}

/** Fills a choice with [value, text] pairs; what was chosen stays, unless it was `wanted` by default or is gone. */
function fillSelect(id, pairs, wanted = null) {
  const select = byId(id);
  const before = select.value;
  const followed = select.dataset.wanted === undefined || before === select.dataset.wanted;
  select.replaceChildren(...pairs.map(([value, text]) => {
    const option = make("option", text);
    option.value = value;
    return option;
  }));
  const there = pairs.some(([value]) => value === before);
  if (wanted !== null && (followed || !there)) select.value = wanted;
  else if (there) select.value = before;
  if (wanted !== null) select.dataset.wanted = wanted;
}

const TABS = { curves: drawCurves, timeline: fillTimeline, samples: fillSamples };

function open(tab) {
  for (const name of Object.keys(TABS)) byId(name).classList.toggle("chosen", name === tab);
  for (const button of document.querySelectorAll("nav button")) {
    button.classList.toggle("chosen", button.dataset.tab === tab);
  }
  TABS[tab]();
}

function opened() {
  return Object.keys(TABS).find((name) => byId(name).classList.contains("chosen"));
}

function showNotes() {
  byId("made").textContent = `as of ${DATA.made}`;
  const notes = DATA.runs.flatMap((run) => run.notes.map((note) => (DATA.runs.length > 1 ? `${run.name}: ${note}` : note)));
  byId("notes").textContent = notes.join("  \u00b7  ");
}

async function poll() {
  try {
    const answer = await fetch(`/data?known=${encodeURIComponent(DATA.stamp)}`);
    if (answer.status === 200) {
      DATA = await answer.json();
      showNotes();
      TABS[opened()]();
    }
  } catch (error) {
    byId("made").textContent = `as of ${DATA.made}; the server is gone`;
  }
  setTimeout(poll, POLL_MS);
}

for (const button of document.querySelectorAll("nav button")) {
  button.addEventListener("click", () => open(button.dataset.tab));
}
showNotes();
startCurves();
startTimeline();
startSamples();
open("curves");
if (location.protocol === "http:" && DATA.live) poll();
