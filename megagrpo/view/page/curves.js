// Curves of all runs, one chart a metric, and where the time of a step goes.

const COLOURS = ["#2f6fb3", "#d9622b", "#2a8c6e", "#6b4fa1", "#b08900", "#c23b7a"];
const SHOWN_FIRST = ["reward/mean", "eval/accuracy", "policy/entropy", "policy/kl_reference", "policy/kl_old",
  "mismatch/logprob_abs_mean", "response/length_mean", "policy/clip_fraction_high", "optim/grad_norm", "loss/total",
  "group/degenerate_fraction", "perf/tokens_per_s"];
const TIME = "time per phase";
// These buttons alone: others of Plotly's would send the chart to a server.
const CONFIG = { displaylogo: false, responsive: true, displayModeBar: "hover",
  modeBarButtons: [["toImage", "zoom2d", "pan2d", "autoScale2d"]] };

let chosenMetrics = null; // names, once there is data

/** Names come from files; Plotly reads tags in what it shows. */
function plain(text) {
  return String(text).replaceAll("&", "&amp;").replaceAll("<", "&lt;");
}

function translucent(colour, opacity) {
  const part = (at) => parseInt(colour.slice(at, at + 2), 16);
  return `rgba(${part(1)},${part(3)},${part(5)},${opacity})`;
}

function layoutOf(title, more = {}) {
  return {
    title: { text: plain(title), font: { size: 13 }, x: 0.02, xanchor: "left", y: 0.96 },
    margin: { l: 52, r: 14, t: 34, b: 34 }, hovermode: "x unified", showlegend: DATA.runs.length > 1,
    legend: { orientation: "h", y: -0.16, font: { size: 11 } }, font: { family: "system-ui, sans-serif", size: 11 },
    xaxis: { gridcolor: "#f0f2f4", zeroline: false, ...more.xaxis },
    yaxis: { gridcolor: "#e4e7eb", zeroline: false, exponentformat: "e", ...more.yaxis },
    ...more.layout,
  };
}

/** Steps are whole numbers, also where there are few. */
function stepAxis() {
  const steps = DATA.runs.flatMap((run) => run.steps);
  return Math.max(...steps) - Math.min(...steps) < 8 ? { dtick: 1 } : {};
}

/** The metric's measured points: [{step, value, std}]; std is what the run itself recorded over a step's samples. */
function pointsOf(run, name) {
  const stds = run.metrics[name.replace(/mean$/, "std")];
  const points = [];
  (run.metrics[name] || []).forEach((value, at) => {
    if (value !== null) points.push({ step: run.steps[at], value, std: name.endsWith("mean") && stds ? stds[at] : null });
  });
  return points;
}

/** Means over the `width` steps around each, and the band: recorded deviation, else that of the values in the window. */
function smoothed(points, width) {
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  let from = 0, to = 0;
  return points.map((point) => {
    while (points[from].step < point.step - (width - 1) / 2) from += 1;
    while (to < points.length && points[to].step <= point.step + (width - 1) / 2) to += 1;
    const near = points.slice(from, to);
    const middle = mean(near.map((p) => p.value));
    const stds = near.map((p) => p.std).filter((std) => std !== null);
    const spread = stds.length ? mean(stds) : Math.sqrt(mean(near.map((p) => (p.value - middle) ** 2)));
    return { step: point.step, middle, low: middle - spread, high: middle + spread, banded: stds.length || near.length > 1 };
  });
}

function tracesOf(run, name, colour, width) {
  const points = pointsOf(run, name);
  const line = smoothed(points, width);
  const x = line.map((p) => p.step);
  const label = plain(run.name);
  const few = points.length < 30;
  const traces = [];
  if (width > 1 && line.every((p, at) => p.middle === points[at].value)) width = 1; // measured too rarely to smooth
  if (line.some((p) => p.banded)) {
    const edge = { x, mode: "lines", line: { width: 0 }, hoverinfo: "skip", showlegend: false, legendgroup: label };
    traces.push({ ...edge, y: line.map((p) => p.low) });
    traces.push({ ...edge, y: line.map((p) => p.high), fill: "tonexty", fillcolor: translucent(colour, 0.15) });
  }
  if (width > 1) {
    traces.push({ x, y: points.map((p) => p.value), mode: "lines", line: { color: colour, width: 0.7 }, opacity: 0.45,
      hoverinfo: "skip", showlegend: false, legendgroup: label });
  }
  traces.push({ x, y: line.map((p) => p.middle), name: label, mode: few ? "lines+markers" : "lines", legendgroup: label,
    line: { color: colour, width: 2 }, marker: { size: 4 }, hovertemplate: "%{y:.5g}" });
  return traces;
}

function drawMetric(element, name) {
  const width = Number(byId("window").value);
  const traces = DATA.runs.flatMap((run, at) => tracesOf(run, name, COLOURS[at % COLOURS.length], width));
  const positive = traces.every((trace) => (trace.y || []).every((y) => y > 0));
  const type = byId("logarithmic").checked && positive ? "log" : "linear";
  Plotly.react(element, traces, layoutOf(name, { xaxis: stepAxis(), yaxis: { type, autorange: true } }), CONFIG);
}

function phasesOf(run) {
  const means = Object.keys(run.metrics).filter((name) => /^time\/.*_s$/.test(name) && name !== "time/step_s")
    .map((name) => [name, run.metrics[name].reduce((sum, value) => sum + (value || 0), 0)]);
  return means.sort((a, b) => b[1] - a[1]).map(([name]) => name);
}

function drawTimes(element, run) {
  const measured = run.steps.map((_, at) => at).filter((at) => (run.metrics["time/step_s"] || [])[at] != null);
  const x = measured.map((at) => run.steps[at]);
  const traces = phasesOf(run).map((name) => {
    const phase = name.slice("time/".length, -"_s".length);
    return { x, y: measured.map((at) => run.metrics[name][at] || 0), name: plain(phase), mode: "lines", stackgroup: "all",
      line: { width: 0.5, color: phaseColour(phase) }, hovertemplate: "%{y:.3g} s" };
  });
  const title = DATA.runs.length > 1 ? `seconds per phase: ${run.name}` : "seconds per phase";
  Plotly.react(element, traces, layoutOf(title, { xaxis: stepAxis(), layout: { showlegend: true } }), CONFIG);
}

function allMetrics() {
  return [...new Set(DATA.runs.flatMap((run) => Object.keys(run.metrics)))].sort();
}

/** What is drawn: a chart's key, and the function that draws it. */
function chosenCharts() {
  const charts = allMetrics().filter((name) => chosenMetrics.has(name))
    .sort((a, b) => rankOf(a) - rankOf(b)).map((name) => [name, (element) => drawMetric(element, name)]);
  if (chosenMetrics.has(TIME)) {
    DATA.runs.forEach((run, at) => charts.push([`${TIME} ${at}`, (element) => drawTimes(element, run)]));
  }
  return charts;
}

function rankOf(name) {
  const at = SHOWN_FIRST.indexOf(name);
  return at < 0 ? SHOWN_FIRST.length : at;
}

function listMetrics() {
  const wanted = byId("metric-search").value.toLowerCase();
  const list = byId("metric-list");
  list.replaceChildren();
  let group = "";
  for (const name of [TIME, ...allMetrics()]) {
    if (!name.toLowerCase().includes(wanted)) continue;
    const itsGroup = name.includes("/") ? name.split("/")[0] : "";
    if (itsGroup !== group) list.append(make("h2", itsGroup));
    group = itsGroup;
    const box = make("input");
    box.type = "checkbox";
    box.checked = chosenMetrics.has(name);
    box.addEventListener("change", () => {
      if (box.checked) chosenMetrics.add(name); else chosenMetrics.delete(name);
      drawCurves();
    });
    const label = make("label");
    label.append(box, ` ${itsGroup ? name.slice(itsGroup.length + 1) : name}`);
    label.title = name;
    list.append(label);
  }
}

function drawCurves() {
  if (chosenMetrics === null || !allMetrics().some((name) => chosenMetrics.has(name))) {
    chosenMetrics = new Set([...SHOWN_FIRST, TIME]);
  }
  listMetrics();
  const charts = new Map(chosenCharts());
  const place = byId("charts");
  const old = new Map([...place.children].map((element) => [element.dataset.key, element]));
  for (const [key, element] of old) if (!charts.has(key)) { Plotly.purge(element); element.remove(); }
  for (const [key, draw] of charts) {
    const element = old.get(key) || make("div");
    element.dataset.key = key;
    place.append(element); // also puts it in order
    draw(element);
  }
}

function startCurves() {
  const longest = Math.max(...DATA.runs.map((run) => run.steps.length));
  byId("window").value = longest > 200 ? "10" : longest > 40 ? "5" : "1";
  byId("metric-search").addEventListener("input", listMetrics);
  for (const id of ["window", "logarithmic"]) byId(id).addEventListener("change", drawCurves);
}
