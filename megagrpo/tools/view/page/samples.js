// The run's curves, the table of samples, its filters, and one sample at a time with its tokens. Text reaches the page by textContent only;
// Markdown and formulas come as HTML, of which only known elements are copied.

const DATA = JSON.parse(byId("data").textContent);
const ROWS_AT_ONCE = 100;
const COLUMNS = [ // title, value of a row, how it is shown, what it is
  ["run", (row) => row.run.name, null],
  ["step", (row) => row.group.step, null],
  ["prompt", (row) => row.group.prompt, null],
  ["answer", (row) => row.group.answer, null],
  ["response", (row) => row.sample.text, null],
  ["reward", (row) => row.sample.reward, (value) => number(value, 3)],
  ["advantage", (row) => row.sample.advantage, (value) => number(value, 3)],
  ["tokens", (row) => row.sample.num_tokens, (value) => number(value, 6)],
  ["finish", (row) => row.sample.finish_reason, null],
  ["version", (row) => row.sample.weight_version, (value) => number(value, 9),
    "steps after which the weights were published that sampled it"],
  ["max |\u0394|", (row) => largest(row.sample), (value) => number(value, 2),
    "the largest difference between the trainer's and the engine's log-probability of one of its tokens, in nats"],
];
const WIDTH = 205, HEIGHT = 56, LEFT = 2; // of a curve, in pixels
const COLORS = ["#2f6fb3", "#c2571a", "#1d7a55", "#8a4fa3", "#b3372f", "#6b7280"]; // of runs
const THOUGHT_END = "</think>"; // in the chat templates of all supported families
const KEPT = ["run", "step", "finish", "search", "reward-min", "reward-max"]; // choices that a reload keeps
const ELEMENTS = new Set(("p h1 h2 h3 h4 h5 h6 ul ol li pre code strong em blockquote hr br table thead tbody tr th td " +
  "math mrow mi mn mo mtext mspace ms mfrac msqrt mroot mstyle merror mpadded mphantom msub msup msubsup munder mover " +
  "munderover mmultiscripts mprescripts none mtable mtr mtd menclose").split(" ")); // of Markdown and MathML
const ATTRIBUTES = new Set(("align start display mathvariant stretchy fence form displaystyle scriptlevel columnalign columnspacing " +
  "columnlines rowspacing rowlines linethickness accent accentunder movablelimits largeop notation minsize maxsize lspace " +
  "rspace width height depth").split(" "));
const BINS = [1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1]; // nats: the limits of |difference| between the shades
const SHADES = ["#ffffff", "#fffbe6", "#fff1c2", "#ffe08a", "#ffc267", "#f98e52", "#e2574c", "#b3202c"];

let rows = []; // those that pass the filters, in order
let numShown = 0;
let sortedBy = [1, true]; // column, descending: the newest step first
let chosenRow = null;
let lastInput = Date.now();

function byId(id) {
  return document.getElementById(id);
}

function make(tag, text = "") {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}

/** Fills a choice with "all" and the distinct values. */
function fillSelect(id, values) {
  byId(id).replaceChildren(...["", ...new Set(values)].map((value) => {
    const option = make("option", value === "" ? "all" : value);
    option.value = value;
    return option;
  }));
}

function number(value, digits) {
  if (value === null || value === undefined) return "-";
  const short = Number(value.toPrecision(digits));
  return short !== 0 && Math.abs(short) < 1e-3 ? short.toExponential() : String(short);
}

function largest(sample) {
  const values = sample.tokens ? sample.tokens.difference.filter((value) => value !== null).map(Math.abs) : [];
  return values.length ? values.reduce((a, b) => Math.max(a, b)) : null;
}

function allRows() {
  return DATA.runs.flatMap((run) => run.groups.flatMap((group) => group.samples.map((sample) => ({ run, group, sample }))));
}

function passes() {
  const words = byId("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const is = (id, value) => byId(id).value === "" || byId(id).value === String(value);
  const low = byId("reward-min").valueAsNumber, high = byId("reward-max").valueAsNumber;
  const withTokens = byId("with-tokens").checked;
  return ({ run, group, sample }) => {
    if (!is("run", run.name) || !is("step", group.step) || !is("finish", sample.finish_reason)) return false;
    if (withTokens && !sample.tokens) return false;
    if (!Number.isNaN(low) && !(sample.reward !== null && sample.reward >= low)) return false;
    if (!Number.isNaN(high) && !(sample.reward !== null && sample.reward <= high)) return false;
    const text = `${group.prompt}\n${group.answer}\n${sample.text}`.toLowerCase();
    return words.every((word) => text.includes(word));
  };
}

function filterSamples() {
  const all = allRows();
  rows = all.filter(passes());
  const [column, descending] = sortedBy;
  const value = COLUMNS[column][1], sign = descending ? -1 : 1;
  const order = (a, b) => (a === null) - (b === null) || sign * (a < b ? -1 : a > b ? 1 : 0); // missing values come last
  rows = rows.map((row) => [value(row), row]).sort((a, b) => order(a[0], b[0])).map(([, row]) => row);
  byId("count").textContent = `${rows.length} of ${all.length} samples`;
  byId("table").tBodies[0].replaceChildren();
  numShown = 0;
  byId("scroll").scrollTop = 0;
  showMoreRows();
  remember();
}

function nameOf({ run, group, sample }) {
  return [group.step, group.group_id, sample.index, run.name].join(" ");
}

/** Writes the choices into the address, from which a reload takes them. */
function remember() {
  const kept = new URLSearchParams(KEPT.map((id) => [id, byId(id).value]).filter(([, value]) => value !== ""));
  for (const id of ["with-tokens", "markdown"]) if (byId(id).checked) kept.set(id, "on");
  kept.set("order", sortedBy.map(Number).join(" "));
  if (chosenRow !== null) kept.set("sample", nameOf(chosenRow));
  history.replaceState(null, "", `#${kept}`);
}

/** Takes the choices of before a reload; returns the name of the sample that was shown. */
function recall() {
  const kept = new URLSearchParams(location.hash.slice(1));
  for (const id of KEPT) {
    byId(id).value = kept.get(id) ?? "";
    if (byId(id).value === "") byId(id).value = ""; // what is no choice any more
  }
  for (const id of ["with-tokens", "markdown"]) byId(id).checked = kept.has(id);
  const [column, descending] = (kept.get("order") ?? "").split(" ").map(Number);
  if (COLUMNS[column] && descending !== undefined) sortedBy = [column, descending === 1];
  return kept.get("sample") ?? "";
}

/** Appends the next rows; thousands at once would make the page slow. */
function showMoreRows() {
  const body = byId("table").tBodies[0];
  for (const row of rows.slice(numShown, numShown + ROWS_AT_ONCE)) {
    const line = body.insertRow();
    line.tabIndex = 0;
    for (const [title, value, form] of COLUMNS) {
      if (title === "run" && DATA.runs.length === 1) continue;
      const cell = line.insertCell();
      cell.textContent = form ? form(value(row)) : String(value(row)).slice(0, 200);
      if (form || title === "step") cell.className = "number";
    }
    line.addEventListener("click", () => choose(row, line));
    line.addEventListener("keydown", (event) => { if (event.key === "Enter") choose(row, line); });
    if (chosenRow !== null && chosenRow.sample === row.sample) line.className = "chosen";
  }
  numShown = Math.min(rows.length, numShown + ROWS_AT_ONCE);
}

function choose(row, line) {
  for (const other of byId("table").querySelectorAll("tr.chosen")) other.className = "";
  line.className = "chosen";
  chosenRow = row;
  showSample(row);
  remember();
}

function showSample({ run, group, sample }) {
  const reward = sample.outcome.status === "score" ? `reward ${number(sample.reward, 5)}`
    : `${sample.outcome.status}: ${sample.outcome.detail}`;
  const rollout = sample.rollout === undefined ? "" : ` of rollout ${sample.rollout}`;
  const end = sample.outcome.end ? `, the rollout by ${sample.outcome.end}` : "";
  const facts = [`step ${group.step}, prompt ${group.prompt_id}, sample ${sample.index}${rollout} of ${group.size}`, reward,
    `advantage ${number(sample.advantage, 5)}`, `${sample.num_tokens} tokens, ended by ${sample.finish_reason}${end}`,
    `weights ${sample.weight_version}`,
    ...(sample.teacher_logprob === undefined ? [] : [`teacher's log-probability ${number(sample.teacher_logprob, 5)}`])];
  const pane = byId("detail");
  pane.replaceChildren(make("h2", facts.join("  \u00b7  ")), make("h2", "prompt"),
    textOf(run, sample.prompt ?? group.prompt, sample.prompt === undefined ? group.html : sample.prompt_html),
    make("h2", "answer"), make("pre", group.answer), make("h2", "response"));
  pane.children[2].after(...(group.images || []).filter((key) => run.images[key]).map((key) => {
    const image = make("img", "");
    image.src = run.images[key];
    return image;
  }));
  const turns = sample.turns.length ? sample.turns : [{ by: "model", text: sample.text, html: sample.html }];
  for (const turn of turns) pane.append(...turnOf(run, turn));
  if (sample.tokens) pane.append(make("h2", "tokens, colored by |trainer \u2212 rollout| log-probability"), legend(),
    tokensOf(run, sample.tokens));
  else pane.append(make("h2", "its tokens were not recorded (log.tokens: groups of a step)"));
  pane.append(make("h2", "the group"));
  for (const other of group.samples) {
    const line = make("div", `${other.index}: reward ${number(other.reward, 3)}, advantage ${number(other.advantage, 3)}  ` +
      other.text.slice(0, 120));
    line.className = other.advantage > 0 ? "good" : other.advantage < 0 ? "bad" : "";
    pane.append(line);
  }
}

/** Returns the element of a text: as it is, or its HTML if that is chosen and it has marks. */
function textOf(run, text, html) {
  if (!html || !byId("markdown").checked) return make("pre", text);
  const box = make("div");
  box.className = "markdown";
  box.append(...copiesOf(run, html));
  return box;
}

/** Returns the nodes of HTML, of known elements and attributes only: nothing of a response loads, runs or leads away. */
function copiesOf(run, html) {
  const copies = (parent) => [...parent.childNodes].flatMap((node) => {
    if (node.nodeType === Node.TEXT_NODE) return [node.data];
    if (node.className === "formula") return [parent.localName === "code" ? node.textContent : formulaOf(run, node.textContent)];
    const isLink = node.localName === "a";
    if (!isLink && !ELEMENTS.has(node.localName)) return copies(node);
    const copy = isLink ? make("u") : document.createElementNS(node.namespaceURI, node.localName);
    if (isLink) copy.title = node.getAttribute("href");
    for (const { name, value } of node.attributes) if (ATTRIBUTES.has(name)) copy.setAttribute(name, value);
    copy.append(...copies(node));
    return [copy];
  });
  return copies(new DOMParser().parseFromString(html, "text/html").body); // where nothing loads or runs
}

/** Returns a formula, or its LaTeX if the converter could not read that. */
function formulaOf(run, latex) {
  const mathml = Object.hasOwn(run.formulas, latex) && run.formulas[latex];
  const element = mathml ? copiesOf(run, mathml)[0] : make("code", latex);
  element.setAttribute("title", latex);
  return element;
}

/** Returns a turn's elements: a model's reasoning, folded, and what follows. */
function turnOf(run, { by, text, reward, html: [thought, rest] }) {
  const start = by === "model" ? text.lastIndexOf(THOUGHT_END) + 1 : 0, elements = [];
  if (start) {
    const fold = make("details");
    fold.append(make("summary", `reasoning, ${start - 1} characters`), textOf(run, text.slice(0, start - 1), thought));
    elements.push(fold);
    text = text.slice(start - 1 + THOUGHT_END.length).trimStart();
  }
  const box = textOf(run, text, rest);
  box.classList.add(by);
  if (by !== "model") box.title = "the environment's: not trained on";
  else if (reward !== undefined) box.title = `reward ${number(reward, 5)}`;
  if (reward) box.append(make("b", `  reward ${number(reward, 5)}`));
  return [...elements, box];
}

function shadeOf(difference) {
  const at = BINS.findIndex((limit) => Math.abs(difference) < limit);
  return SHADES[at < 0 ? BINS.length : at];
}

function legend() {
  const line = make("div");
  line.className = "legend";
  line.append("below ");
  for (const [at, limit] of BINS.entries()) {
    const box = make("i", limit.toExponential(0));
    box.style.background = SHADES[at];
    line.append(box);
  }
  const above = make("i", "more");
  above.style.background = SHADES[BINS.length];
  line.append(above);
  return line;
}

function tokensOf(run, { ids, difference }) {
  const pane = make("pre");
  ids.forEach((id, at) => {
    const token = make("span", run.pieces[id]);
    token.className = "token";
    const value = difference[at];
    token.title = value === null ? `token ${id}: not trained on` : `token ${id}: trainer \u2212 rollout = ${value}`;
    if (value !== null) token.style.background = shadeOf(value);
    pane.append(token);
  });
  return pane;
}

function drawn(tag, attributes, text = "") {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.textContent = text;
  return element;
}

/** Draws one metric of all runs; a click takes the samples of the nearest step that has some. */
function curveOf(name) {
  const points = DATA.runs.flatMap((run) => run.curves[name] ?? []);
  const steps = points.map(([step]) => step), values = points.map(([, value]) => value);
  const first = Math.min(...steps), last = Math.max(...steps), low = Math.min(...values), high = Math.max(...values);
  const x = (step) => LEFT + (last > first ? (step - first) / (last - first) : 0.5) * (WIDTH - 2 * LEFT);
  const y = (value) => 4 + (high > low ? (high - value) / (high - low) : 0.5) * (HEIGHT - 8);
  const picture = drawn("svg", { width: WIDTH, height: HEIGHT });
  DATA.runs.forEach((run, at) => {
    const own = run.curves[name] ?? [], stroke = COLORS[at % COLORS.length];
    picture.append(drawn("polyline", { stroke, points: own.map(([step, value]) => `${x(step)},${y(value)}`).join(" ") }));
    for (const [step, value] of own) {
      const point = drawn("circle", { cx: x(step), cy: y(value), r: own.length > 60 ? 1 : 2, fill: stroke });
      point.append(drawn("title", {}, `${run.name}, step ${step}: ${number(value, 4)}`));
      picture.append(point);
    }
  });
  picture.addEventListener("click", (event) => {
    const at = first + (event.offsetX - LEFT) / (WIDTH - 2 * LEFT) * (last - first);
    const known = DATA.runs.flatMap((run) => run.groups.map((group) => group.step));
    if (!known.length) return;
    byId("step").value = known.reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
    filterSamples();
    chooseAgain("");
  });
  const figure = make("figure"), whole = `${name}: ${number(low, 3)} to ${number(high, 3)}`, caption = make("figcaption", whole);
  caption.title = whole;
  picture.addEventListener("pointerleave", () => { caption.textContent = whole; });
  picture.addEventListener("pointermove", (event) => {
    const at = first + (event.offsetX - LEFT) / (WIDTH - 2 * LEFT) * (last - first);
    const step = steps.reduce((a, b) => (Math.abs(b - at) < Math.abs(a - at) ? b : a));
    const here = points.filter((point) => point[0] === step).map(([, value]) => number(value, 4));
    caption.textContent = `${name}, step ${step}: ${here.join(", ")}`;
  });
  const axis = make("div");
  axis.className = "axis";
  axis.append(make("span", `step ${first}`), make("span", last));
  figure.append(caption, picture, axis);
  return figure;
}

function drawCurves() {
  const names = new Set(DATA.runs.flatMap((run) => Object.keys(run.curves)));
  byId("curves").replaceChildren(...[...names].map(curveOf));
  if (DATA.runs.length === 1) return;
  DATA.runs.forEach((run, at) => {
    const name = make("span", `\u2014 ${run.name}`);
    name.style.color = COLORS[at % COLORS.length];
    byId("curves").append(name);
  });
}

/** Shows the sample of this name, or else the first. */
function chooseAgain(name) {
  const at = Math.max(0, rows.findIndex((row) => nameOf(row) === name));
  while (numShown <= at && numShown < rows.length) showMoreRows();
  if (rows.length) choose(rows[at], byId("table").tBodies[0].rows[at]);
}

function fillControls() {
  const groups = DATA.runs.flatMap((run) => run.groups);
  fillSelect("run", DATA.runs.map((run) => run.name));
  fillSelect("step", groups.map((group) => group.step).sort((a, b) => b - a));
  fillSelect("finish", groups.flatMap((group) => group.samples.map((sample) => sample.finish_reason)));
  const head = byId("table").tHead;
  head.replaceChildren(make("tr"));
  COLUMNS.forEach(([title, , , meaning], column) => {
    if (title === "run" && DATA.runs.length === 1) return;
    const cell = make("th", title);
    cell.title = meaning ?? "";
    cell.addEventListener("click", () => {
      sortedBy = [column, sortedBy[0] === column && !sortedBy[1]];
      filterSamples();
    });
    head.rows[0].append(cell);
  });
  const notes = DATA.runs.flatMap((run) => run.notes.map((note) => (DATA.runs.length > 1 ? `${run.name}: ${note}` : note)));
  byId("notes").textContent = notes.join("  \u00b7  ");
}

function listen() {
  let timer = 0;
  const soon = () => { clearTimeout(timer); timer = setTimeout(filterSamples, 120); };
  for (const id of ["search", "reward-min", "reward-max"]) byId(id).addEventListener("input", soon);
  for (const id of ["run", "step", "finish", "with-tokens"]) {
    byId(id).addEventListener("change", filterSamples);
  }
  byId("markdown").addEventListener("change", () => { if (chosenRow !== null) showSample(chosenRow); remember(); });
  const scroll = byId("scroll");
  scroll.addEventListener("scroll", () => {
    if (scroll.scrollTop + scroll.clientHeight > scroll.scrollHeight - 400 && numShown < rows.length) showMoreRows();
  });
}

/** Loads a served page again every minute, unless somebody uses it. */
function renew() {
  for (const kind of ["pointerdown", "keydown", "wheel", "scroll"]) {
    addEventListener(kind, () => { lastInput = Date.now(); }, { capture: true, passive: true });
  }
  const timer = setInterval(() => {
    if (Date.now() - lastInput <= DATA.renew_s * 1000) return;
    clearInterval(timer); // another reload would begin anew, and a large page takes seconds
    location.reload();
  }, 1000);
}

fillControls();
drawCurves();
listen();
const shownBefore = recall();
filterSamples();
chooseAgain(shownBefore);
if (DATA.renew_s) renew();
