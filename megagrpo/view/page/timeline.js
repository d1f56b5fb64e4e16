// What every rank and every engine did in one step.

const PHASE_COLOURS = { rollout: "#2f6fb3", update: "#d9622b", logprobs: "#e3a857", publish: "#2a8c6e", evaluate: "#6b4fa1",
  checkpoint: "#8a8f98", pause_generation: "#b08900", digest: "#4aa98a", record: "#9c6ade", continue_generation: "#6aa84f" };

function phaseColour(name) {
  if (name.startsWith("what follows")) return "#dfe3e8";
  if (PHASE_COLOURS[name]) return PHASE_COLOURS[name];
  let sum = 0;
  for (const letter of name) sum = (sum * 31 + letter.charCodeAt(0)) % 360;
  return `hsl(${sum}, 40%, 55%)`;
}

/** One bar trace a phase, so that a click in the legend hides it everywhere. */
function barsOf(step) {
  const spans = [];
  for (const { rank, phases } of step.ranks) {
    for (const [name, start, end] of phases) spans.push([`rank ${rank}`, name, start, end]);
  }
  for (const [engine, name, start, end] of step.calls) spans.push([`${step.engines[engine]} calls`, name, start, end]);
  const byName = new Map();
  for (const [row, name, start, end] of spans) {
    const shown = name.startsWith("what follows") ? "between phases" : name;
    if (!byName.has(shown)) {
      byName.set(shown, { type: "bar", orientation: "h", name: plain(shown), x: [], base: [], y: [], customdata: [], width: 0.7,
        marker: { color: phaseColour(name) }, hovertemplate: "%{customdata}<extra>%{y}</extra>" });
    }
    const trace = byName.get(shown);
    trace.x.push(end - start);
    trace.base.push(start);
    trace.y.push(plain(row));
    trace.customdata.push(plain(`${name}: ${(end - start).toFixed(3)} s, from ${start.toFixed(3)} to ${end.toFixed(3)}`));
  }
  return [...byName.values()];
}

/** Requests that run on each engine, as steps of a line. */
function runningOf(step) {
  return step.engines.map((engine, number) => {
    const changes = step.requests.filter((request) => request[0] === number)
      .flatMap(([, start, end, , weight]) => [[start, weight], [end, -weight]]).sort((a, b) => a[0] - b[0]);
    let running = 0;
    const y = changes.map(([, change]) => { running += change; return Math.max(0, Math.round(running * 100) / 100); });
    const colour = COLOURS[number % COLOURS.length];
    return { x: changes.map(([moment]) => moment), y, name: plain(`requests on ${engine}`), mode: "lines", yaxis: "y2",
      line: { shape: "hv", width: 1.3, color: colour }, fill: "tozeroy", fillcolor: translucent(colour, 0.12),
      hovertemplate: "%{y} running<extra>" + plain(engine) + "</extra>" };
  });
}

function drawTimeline() {
  const run = DATA.runs[Number(byId("timeline-run").value)];
  const step = run.timeline[Number(byId("timeline-step").value)];
  const said = byId("timeline-said");
  const chart = byId("timeline-chart");
  if (!step) {
    said.textContent = "this run recorded no timeline (log.timeline)";
    Plotly.purge(chart);
    return;
  }
  const requests = step.requests.reduce((sum, request) => sum + request[4], 0);
  const tokens = step.requests.reduce((sum, request) => sum + request[3] * request[4], 0);
  const failed = step.requests.reduce((sum, request) => sum + (request[3] === 0 ? request[4] : 0), 0);
  said.textContent = `${Math.round(requests)} requests, ${Math.round(tokens)} tokens` +
    (failed ? `, ${Math.round(failed)} attempts without a sample` : "") +
    `; began ${new Date(step.start * 1000).toLocaleString()}; clocks of different machines are not compared`;
  const rows = [...step.ranks.map(({ rank }) => `rank ${rank}`),
    ...new Set(step.calls.map((call) => `${step.engines[call[0]]} calls`))].map(plain);
  const layout = layoutOf(`step ${step.label}: seconds`, { layout: {
    barmode: "overlay", hovermode: "closest", showlegend: true, legend: { orientation: "h", y: -0.07 },
    margin: { l: 120, r: 20, t: 36, b: 40 }, xaxis: { anchor: "y2", gridcolor: "#eef0f2" },
    yaxis: { domain: [0.42, 1], categoryorder: "array", categoryarray: rows.reverse(), type: "category" },
    yaxis2: { domain: [0, 0.36], title: { text: "requests running" }, gridcolor: "#eef0f2", rangemode: "tozero" },
  } });
  Plotly.react(chart, [...barsOf(step), ...runningOf(step)], layout, CONFIG);
}

function fillTimeline() {
  fillSelect("timeline-run", DATA.runs.map((run, at) => [String(at), run.name]));
  const steps = DATA.runs[Number(byId("timeline-run").value)].timeline;
  const last = steps.length - 1;
  fillSelect("timeline-step", steps.map((step, at) => [String(at), step.label]).reverse(), String(last));
  drawTimeline();
}

function startTimeline() {
  byId("timeline-run").addEventListener("change", fillTimeline);
  byId("timeline-step").addEventListener("change", drawTimeline);
}
